"""Medians, spreads and ratios of a run, and the JSON object. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from relax_tq_rdma.bench.path.messages import Counters, Moved

SCHEMA = "relax-tq-rdma/bench-path/1"
Pick = Literal["median", "min"]
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
        rungs: bytes by each rung of the plugin's staging, in the last repeat.
        peak_rss_bytes: highest resident bytes above those at the start of the step; the largest of all repeats.
    """

    seconds: Spread
    gbs: float
    copies: float
    fresh: float
    registrations: float
    registered_bytes: float
    moved_bytes: int
    rungs: dict[str, int]
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
    dup_shared: bool
    put: Side | None = None
    get: Side | None = None
    stored_bytes: int = 0
    encoded_rows: int = 0
    not_measured: str = ""


class TierLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds for ``payload_bytes``; ``None`` where it was not measured."""

    payload_bytes: int = 0
    memcpy: Spread | None = None
    memcpy_rows: Spread | None = None
    loopback: Spread | None = None
    engine_put: Spread | None = None
    engine_get: Spread | None = None

    def gbs(self) -> dict[str, float | None]:
        """1e9 bytes a second, medians. ``put_copy``: one copy, then the engine: 1 / (1 / engine_put + 1 / memcpy)."""
        names = ("memcpy", "memcpy_rows", "loopback", "engine_put", "engine_get")
        seconds = {name: _picked(getattr(self, name), "median") for name in names}
        put, copy = seconds["engine_put"], seconds["memcpy"]
        seconds["put_copy"] = put + copy if put and copy else None
        return {name: _over(self.payload_bytes / 1e9, found) for name, found in seconds.items()}


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
        rungs=moves[-1].rungs,
        peak_rss_bytes=max(_above_start(one) for one in counters),
        cpu_s=median("cpu_s"),
        all_seconds=seconds,
    )


def spread(seconds: Sequence[float]) -> Spread:
    return Spread(median=statistics.median(seconds), min=min(seconds), max=max(seconds))


def limits(payload: int, seconds: Mapping[str, Sequence[float]], engine: CaseFigures | None) -> TierLimits:
    """Of one tier, from the seconds of each limit in each repeat, and the case of the engine."""
    found = {name: spread(each) for name, each in seconds.items() if each}
    return TierLimits(
        payload_bytes=payload,
        **found,
        engine_put=engine.put.seconds if engine and engine.put else None,
        engine_get=engine.get.seconds if engine and engine.get else None,
    )


def ratios(cases: Iterable[CaseFigures], bounds: TierLimits, pick: Pick = "median") -> dict[str, float | None]:
    """Of one tier; above 1 the plugin is faster; ``None`` where a part of the ratio was not measured.

    ``pick``: of all repeats the median, or for a look past the noise of a busy machine the best (``min``).
    """
    by_name = {case.case: case for case in cases}

    def seconds(name: str, *directions: str) -> float | None:
        sides: list[Side | None] = [getattr(by_name.get(name), direction, None) for direction in directions]
        found = [_picked(one.seconds, pick) for one in sides if one is not None]
        return sum(filter(None, found)) if len(found) == len(directions) else None

    engine_put, memcpy = _picked(bounds.engine_put, pick), _picked(bounds.memcpy, pick)
    copy_limit = engine_put + memcpy if engine_put and memcpy else None
    found = {
        "mooncake_get_vs_engine": _over(_picked(bounds.engine_get, pick), seconds(MOONCAKE, "get")),
        "mooncake_put_vs_copy_limit": _over(copy_limit, seconds(MOONCAKE, "put")),
    }
    for name, ours, theirs in (
        ("mooncake_{}_vs_upstream_dict", MOONCAKE, "mooncake_dict"),
        ("mooncake_{}_vs_upstream_jagged", MOONCAKE, "mooncake_jagged"),
        ("simple_{}_vs_upstream_dict", SIMPLE, "simple_dict"),
    ):
        for way in ("get", "put"):
            found[name.format(way)] = _over(seconds(theirs, way), seconds(ours, way))
    for name, (ours, theirs) in EFFECTIVE.items():
        found[name] = _over(seconds(theirs, "put", "get"), seconds(ours, "put", "get"))
    return found


def headline_tier(tiers: Sequence[int]) -> int:
    """The tier whose ratios stand at the top: 256 MiB, or the largest one that was run."""
    return HEADLINE_TIER if HEADLINE_TIER in tiers else max(tiers)


def document(
    environment: Mapping[str, Any], cases: Sequence[CaseFigures], bounds: Mapping[int, TierLimits]
) -> dict[str, Any]:
    """The JSON object (``docs/reference/bench-path.md``)."""
    top = headline_tier(list(bounds))

    def by_tier(pick: Pick) -> dict[str, dict[str, float | None]]:
        return {
            str(tier): ratios([case for case in cases if case.tier_mib == tier], found, pick)
            for tier, found in bounds.items()
        }

    medians = by_tier("median")
    return {
        "schema": SCHEMA,
        "environment": dict(environment),
        "cases": [msgspec.to_builtins(case) for case in cases],
        "tier_mib": top,
        "limits": bounds[top].gbs(),
        "ratios": medians[str(top)],
        "limits_by_tier": {str(tier): found.gbs() for tier, found in bounds.items()},
        "limits_seconds_by_tier": {str(tier): msgspec.to_builtins(found) for tier, found in bounds.items()},
        "ratios_by_tier": medians,
        "ratios_of_best_by_tier": by_tier("min"),
    }


def _picked(found: Spread | None, pick: Pick) -> float | None:
    value: float | None = getattr(found, pick, None)
    return value


def _above_start(one: Counters) -> int:
    return one.rss_peak - one.rss_before


def _over(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None
