"""What must hold after a soak. Pure: from what was counted to yes or no, with the figures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

import msgspec

from relax_tq_rdma.bench.soak.content import MIB
from relax_tq_rdma.bench.soak.drive import Result
from relax_tq_rdma.bench.soak.sample import Sample

FEWEST = 12
"""Samples after the first step without which nothing can be said about growth."""

RUNGS = ("put/copy", "put/call", "get/lend", "get/copy", "get/call")
AT_CAP = 0.9
"""Of what the pool lends: what a consumer must have held at one time, so that the run was one at the cap."""

LENT_SHARE = 0.75
MARK_BYTES = 64
"""A segment's mark: what a producer leaves in its store as long as it runs."""

_RSS_BYTES, _RSS_SHARE, _RSS_SHARE_AT_FIRST = 64 * MIB, 0.05, 0.25
_SETTLED_SECONDS = 300.0
"""Allowed growth of resident memory; more is allowed in a short run, in which caches and heaps still fill."""

_MORE = 4
"""Descriptors or threads that a process may have more: pools of threads and sockets grow to their size by and by."""

_FIGURES: dict[str, Callable[[Sample, str], int]] = {
    "rss": lambda sample, name: sample.unexplained(name),
    "fds": lambda sample, name: sample.processes[name].fds,
    "threads": lambda sample, name: sample.processes[name].threads,
}


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that must hold. ``ok`` is ``None`` where it was not measured; ``found`` then says why."""

    name: str
    ok: bool | None
    found: str


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of a process's figure in the middle and the last third of a run; ``allowed``: most it may grow."""

    process: str
    what: str
    middle: float
    last: float
    allowed: float

    @property
    def ok(self) -> bool:
        return self.last - self.middle <= self.allowed


def verdict(result: Result, pool_mib: int) -> list[Check]:
    """Every check, in the order of the report."""
    return [
        Check(name="errors", ok=not result.faults, found=result.faults[0] if result.faults else "none"),
        _whole(result),
        _bytes(result),
        _since_first_step(result, "registrations", lambda sample, name: sample.ends[name].registrations),
        _since_first_step(result, "pool misses", lambda sample, name: sample.ends[name].misses),
        _retired(result),
        _rungs(result),
        _at_cap(result, pool_mib * MIB * LENT_SHARE),
        *_growth(result),
        _leases(result),
        _store(result),
    ]


def holds(checks: Iterable[Check]) -> bool:
    """Whether everything was measured and holds."""
    return all(check.ok is True for check in checks)


def growth(samples: Sequence[Sample]) -> list[Growth]:
    """Of every process; empty when there are too few samples."""
    if len(samples) < FEWEST:
        return []
    third = len(samples) // 3
    middle, last = samples[-2 * third : -third], samples[-third:]
    share = _RSS_SHARE if samples[-1].at >= _SETTLED_SECONDS else _RSS_SHARE_AT_FIRST
    found = []
    for name in samples[-1].processes:
        for what, figure in _FIGURES.items():
            before, after = (statistics.median(figure(sample, name) for sample in some) for some in (middle, last))
            allowed = max(_RSS_BYTES, before * share) if what == "rss" else _MORE
            found.append(Growth(process=name, what=what, middle=before, last=after, allowed=allowed))
    return found


def after_first_step(samples: Sequence[Sample]) -> list[Sample]:
    """What is no warm-up: the first step has every kind of row, also the one that no pool can serve."""
    return [sample for sample in samples if sample.warm]


def _whole(result: Result) -> Check:
    totals = result.totals
    found = f"{totals.rows_read} of {totals.rows_put} rows read, {totals.steps} steps cleared"
    if result.final is None:
        return Check(name="every row read once", ok=None, found=f"the run did not come to its end: {found}")
    return Check(name="every row read once", ok=totals.rows_read == totals.rows_put > 0, found=found)


def _bytes(result: Result) -> Check:
    totals = result.totals
    found = (
        f"{totals.bytes_checked:,} compared on arrival, {totals.bytes_rechecked:,} again when let go of; "
        f"{totals.bytes_put:,} put"
    )
    if result.final is None:
        return Check(name="every byte compared", ok=None, found=f"the run did not come to its end: {found}")
    ok = totals.bytes_checked == totals.bytes_put > 0 and totals.bytes_rechecked > 0
    return Check(name="every byte compared", ok=ok, found=found)


def _since_first_step(result: Result, what: str, count: Callable[[Sample, str], int]) -> Check:
    """Of all ends, after the first step; up to the very end of the run when it came to that."""
    name, samples = f"{what} after the first step", after_first_step(result.samples)
    last = result.final or (samples[-1] if samples else None)
    if not samples or last is None:
        return Check(name=name, ok=None, found="the first step was not cleared")
    grown = {end: count(last, end) - count(samples[0], end) for end in last.ends}
    before = sum(count(samples[0], end) for end in last.ends)
    found = ", ".join(f"{end} {number}" for end, number in grown.items())
    return Check(name=name, ok=not any(grown.values()), found=f"{found} (until then {before})")


def _retired(result: Result) -> Check:
    last = result.final or (result.samples[-1] if result.samples else None)
    if last is None:
        return Check(name="memory retired", ok=None, found="no sample was taken")
    retired = {name: end.retired for name, end in last.ends.items()}
    found = ", ".join(f"{name} {nbytes:,} bytes" for name, nbytes in retired.items())
    return Check(name="memory retired", ok=not any(retired.values()), found=found)


def _rungs(result: Result) -> Check:
    last = result.final or (result.samples[-1] if result.samples else None)
    if last is None:
        return Check(name="all rungs used", ok=None, found="no sample was taken")
    moved = {rung: sum(end.rungs.get(rung, (0, 0))[1] for end in last.ends.values()) for rung in RUNGS}
    found = ", ".join(f"{rung} {nbytes / 1e9:.3f} GB" for rung, nbytes in moved.items())
    return Check(name="all rungs used", ok=all(moved.values()), found=found)


def _at_cap(result: Result, lends: float) -> Check:
    name, consumers = "pool at its cap", _consumers(result.samples[-1]) if result.samples else []
    if not consumers:
        return Check(name=name, ok=None, found="no sample was taken")
    peaks = {end: result.samples[-1].ends[end].peak for end in consumers}
    most = {end: sum(sample.ends[end].held > lends / 2 for sample in result.samples) for end in consumers}
    found = ", ".join(
        f"{end} lent up to {peaks[end] >> 20} of {int(lends) >> 20} MiB, more than half in {most[end]} of "
        f"{len(result.samples)} samples"
        for end in consumers
    )
    return Check(name=name, ok=all(peak >= AT_CAP * lends for peak in peaks.values()), found=found)


def _growth(result: Result) -> list[Check]:
    samples = after_first_step(result.samples)
    found = growth(samples)
    if not found:
        why = f"only {len(samples)} samples after the first step, {FEWEST} are needed"
        return [Check(name=f"no growth of {what}", ok=None, found=why) for what in _FIGURES]
    checks = []
    for what in _FIGURES:
        some = [one for one in found if one.what == what]
        unit, scale = (" MiB", MIB) if what == "rss" else ("", 1)
        text = ", ".join(f"{one.process} {one.middle / scale:.0f} to {one.last / scale:.0f}{unit}" for one in some)
        checks.append(Check(name=f"no growth of {what}", ok=all(one.ok for one in some), found=text))
    return checks


def _leases(result: Result) -> Check:
    name = "every lease back"
    if result.final is None:
        return Check(name=name, ok=None, found="the run did not come to its end")
    held = {end: counts.held for end, counts in result.final.ends.items()}
    kept = sum(counts.kept for counts in result.final.ends.values())
    found = ", ".join(f"{end} {nbytes:,} bytes lent" for end, nbytes in held.items())
    return Check(name=name, ok=not any(held.values()) and not kept, found=found)


def _store(result: Result) -> Check:
    name = "store empty after the last clear"
    if result.final is None:
        return Check(name=name, ok=None, found="the run did not come to its end")
    left = result.final.store
    found = f"{left.keys} values of {left.nbytes} bytes left (the producer's own mark is one of {MARK_BYTES})"
    return Check(name=name, ok=left.keys <= 1 and left.nbytes <= MARK_BYTES, found=found)


def _consumers(sample: Sample) -> list[str]:
    return [name for name in sample.ends if name != "producer"]
