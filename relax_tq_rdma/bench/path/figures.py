"""Medians, spreads and ratios of a run, and the JSON object. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from relax_tq_rdma.bench.path.messages import Counters, Moved

SCHEMA = "relax-tq-rdma/bench-path/1"
HEADLINE_TIER = 256
MOONCAKE, SIMPLE = "mooncake_l2_l5", "simple_l2"
"""The cases that the ratios of a backend are about."""

EFFECTIVE = {
    "mooncake_effective_copies": ("mooncake_l2_l3b_l5", "mooncake_dict"),
    "mooncake_effective_share": ("mooncake_l2_l3b_share_l5", "mooncake_dict"),
    "simple_effective_copies": ("simple_l2_l3b", "simple_dict"),
    "simple_effective_share": ("simple_l2_l3b_share", "simple_dict"),
}
"""Ratios of the time of put and get together: the plugin's case and TransferQueue's."""


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds: median and range over the repeats."""

    median: float
    min: float
    max: float


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """Puts of the producer, or gets of the consumer.

    Attributes:
        gbs: payload bytes that the reader has in the end, over the median, in 1e9 bytes a second.
        copies: payload bytes copied by this process outside engine and sockets, over payload bytes.
        fresh: memory that the kernel had to supply, over payload bytes; 1 is one payload-sized allocation.
        registrations: engine registrations in one step, the median.
        moved_bytes: asked of the engine (Mooncake) or sent in messages (SimpleStorage).
        peak_rss_bytes: highest resident bytes above those at the start of the step; the largest of all repeats.
    """

    seconds: Spread
    gbs: float
    copies: float
    fresh: float
    registrations: float
    registered_bytes: float
    moved_bytes: int
    peak_rss_bytes: int
    cpu_s: float
    all_seconds: list[float]


class CaseFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One case on one tier. ``not_measured`` says why there are no figures, else it is empty."""

    case: str
    backend: str
    tier_mib: int
    payload_bytes: int
    rows: int
    dup: int
    put: Side | None = None
    get: Side | None = None
    stored_bytes: int = 0
    encoded_rows: int = 0
    not_measured: str = ""


class TierLimits(msgspec.Struct, frozen=True, kw_only=True):
    """In 1e9 bytes a second, medians; ``None`` where it was not measured."""

    memcpy: float | None = None
    loopback: float | None = None
    engine_put: float | None = None
    engine_get: float | None = None
    put_copy: float | None = None


def side(moves: Sequence[Moved], last: Moved, payload: int) -> Side:
    """Figures of one direction from its measured repeats and ``last``, its watched one."""
    watched = last.watched
    assert watched is not None
    seconds = [move.seconds for move in moves]
    counters = [move.counters for move in moves]

    def median(name: str) -> float:
        return float(statistics.median(getattr(one, name) for one in counters))

    return Side(
        seconds=spread(seconds),
        gbs=payload / statistics.median(seconds) / 1e9,
        copies=watched.copied_bytes / payload,
        fresh=median("fresh_bytes") / payload,
        registrations=median("registrations"),
        registered_bytes=median("registered_bytes"),
        moved_bytes=last.counters.moved_bytes or watched.message_bytes,
        peak_rss_bytes=max(_above_start(one) for one in counters),
        cpu_s=median("cpu_s"),
        all_seconds=seconds,
    )


def spread(seconds: Sequence[float]) -> Spread:
    return Spread(median=statistics.median(seconds), min=min(seconds), max=max(seconds))


def limits(payload: int, seconds: Mapping[str, Sequence[float]], engine: CaseFigures | None) -> TierLimits:
    """``put_copy`` is one copy and the engine, one after the other: 1 / (1 / engine_put + 1 / memcpy)."""
    found = {name: payload / statistics.median(each) / 1e9 for name, each in seconds.items() if each}
    copy = found.get("memcpy")
    put = engine.put.gbs if engine and engine.put else None
    return TierLimits(
        memcpy=copy,
        loopback=found.get("loopback"),
        engine_put=put,
        engine_get=engine.get.gbs if engine and engine.get else None,
        put_copy=1 / (1 / put + 1 / copy) if put and copy else None,
    )


def ratios(cases: Iterable[CaseFigures], bounds: TierLimits) -> dict[str, float | None]:
    """Of one tier; above 1 the plugin is faster; ``None`` where a part of the ratio was not measured."""
    by_name = {case.case: case for case in cases}

    def gbs(name: str, direction: str) -> float | None:
        found: Side | None = getattr(by_name.get(name), direction, None)
        return found.gbs if found else None

    def seconds(name: str) -> float | None:
        case = by_name.get(name)
        return case.put.seconds.median + case.get.seconds.median if case and case.put and case.get else None

    found = {
        "mooncake_get_vs_engine": _over(gbs(MOONCAKE, "get"), bounds.engine_get),
        "mooncake_put_vs_copy_limit": _over(gbs(MOONCAKE, "put"), bounds.put_copy),
    }
    for name, ours, theirs in (
        ("mooncake_{}_vs_upstream_dict", MOONCAKE, "mooncake_dict"),
        ("mooncake_{}_vs_upstream_jagged", MOONCAKE, "mooncake_jagged"),
        ("simple_{}_vs_upstream_dict", SIMPLE, "simple_dict"),
    ):
        for direction in ("get", "put"):
            found[name.format(direction)] = _over(gbs(ours, direction), gbs(theirs, direction))
    for name, (ours, theirs) in EFFECTIVE.items():
        found[name] = _over(seconds(theirs), seconds(ours))
    return found


def headline_tier(tiers: Sequence[int]) -> int:
    """The tier whose ratios stand at the top: 256 MiB, or the largest one that was run."""
    return HEADLINE_TIER if HEADLINE_TIER in tiers else max(tiers)


def document(
    environment: Mapping[str, Any],
    cases: Sequence[CaseFigures],
    bounds: Mapping[int, TierLimits],
    by_tier: Mapping[int, Mapping[str, float | None]],
) -> dict[str, Any]:
    """The JSON object (``docs/reference/bench-path.md``)."""
    tier = headline_tier(list(by_tier))
    return {
        "schema": SCHEMA,
        "environment": dict(environment),
        "cases": [msgspec.to_builtins(case) for case in cases],
        "limits": {str(size): msgspec.to_builtins(found) for size, found in bounds.items()},
        "ratios_tier_mib": tier,
        "ratios": dict(by_tier[tier]),
        "ratios_by_tier": {str(size): dict(found) for size, found in by_tier.items()},
    }


def _above_start(one: Counters) -> int:
    return one.rss_peak - one.rss_before


def _over(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None
