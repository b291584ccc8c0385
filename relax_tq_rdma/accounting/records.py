"""Plain data of accounting: a measured batch, what one step added up to, and the running totals of a process."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Literal

import msgspec

from relax_tq_rdma.accounting.names import BUCKETS_S, METRICS, Direction, Path, StagingRung

UniqueBy = Literal["identity", "content"]
"""How copies were told from originals: by the memory they occupy, or by a blake2b-128 digest of their content."""

Key = tuple[str, tuple[str, ...]]
"""A metric's name and its label values, in the order of ``Metric.labels``."""

Row = tuple[str, tuple[str, ...], int | tuple[list[int], int]]
"""A metric in JSON: name, label values, and a counter's value or a histogram's ``(buckets, sum in ns)``."""

_BOUNDS_NS = tuple(int(bound * 1e9) for bound in BUCKETS_S)


class FieldStats(msgspec.Struct, frozen=True, kw_only=True):
    """One field of one batch on one path. ``unmeasured`` counts leaves whose size is unknown; they add no bytes."""

    name: str
    path: Path
    rows: int
    bytes: int
    unique_bytes: int
    dtypes: tuple[str, ...] = ()
    unmeasured: int = 0


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """What :func:`relax_tq_rdma.accounting.measure` found in one put or get."""

    rows: int
    fields: tuple[FieldStats, ...]
    unique_by: UniqueBy = "identity"


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """One direction of one step. ``seconds`` is wall time with at least one operation in flight.

    ``wire_bytes`` is ``None`` when no layer reported what it handed to the storage.
    """

    rows: int = 0
    bytes: int = 0
    unique_bytes: int = 0
    fast_bytes: int = 0
    slow_bytes: int = 0
    saved_bytes: int = 0
    wire_bytes: int | None = None
    seconds: float = 0.0
    failed: int = 0
    retried: int = 0


class FieldFlow(msgspec.Struct, frozen=True, kw_only=True):
    """One field of one step in one direction on one path. Wire and saved bytes are per field, not per path."""

    field: str
    direction: Direction
    path: Path
    rows: int
    bytes: int
    unique_bytes: int
    unique_by: UniqueBy = "identity"
    dtypes: tuple[str, ...] = ()
    unmeasured: int = 0
    wire_bytes: int | None = None
    saved_bytes: int = 0


class PoolState(msgspec.Struct, frozen=True, kw_only=True):
    """A process's staging pool as of its last put or get, in bytes. ``advised_mb``: the size in MiB with which nothing
    would have been copied out; 0 when there is nothing to advise. ``retired``: of the pool and of other memory."""

    capacity: int = 0
    held: int = 0
    peak: int = 0
    retired: int = 0
    advised_mb: int = 0


class Staged(msgspec.Struct, frozen=True, kw_only=True):
    """What one step moved with host staging through one kind of memory."""

    direction: Direction
    rung: StagingRung
    values: int
    bytes: int


class StepSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What this process moved for one step (= TransferQueue partition).

    ``update`` is 1 for the first summary of a step and grows when late traffic makes another one necessary; the latest
    replaces the earlier ones. ``stages`` holds seconds, summed. ``effective_bytes`` over ``effective_s`` is the
    effective bandwidth of RFC §5.3: bytes rebuilt by the consumer, without those that deduplication saved, from the
    first put until the last rebuild; ``effective_s`` is ``None`` unless this process saw both ends. ``raw_rows``: rows
    put as objects although the job normalises their field.
    """

    step: str
    update: int
    put: Flow
    get: Flow
    stages: dict[str, float]
    fields: tuple[FieldFlow, ...]
    unique_by: UniqueBy = "identity"
    unmeasured: int = 0
    raw_rows: int = 0
    staged: tuple[Staged, ...] = ()
    pool: PoolState | None = None
    effective_s: float | None = None

    @property
    def effective_bytes(self) -> int:
        return self.get.bytes - self.get.saved_bytes


class Histogram(msgspec.Struct):
    """Counts per bucket of ``names.BUCKETS_S``, with one more at the end, and the exact sum."""

    buckets: list[int] = msgspec.field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    sum_ns: int = 0

    @property
    def count(self) -> int:
        return sum(self.buckets)

    def observe(self, ns: int) -> None:
        self.buckets[bisect_left(_BOUNDS_NS, ns)] += 1
        self.sum_ns += ns

    def add(self, other: Histogram) -> None:
        for i, n in enumerate(other.buckets):
            self.buckets[i] += n
        self.sum_ns += other.sum_ns

    def copy(self) -> Histogram:
        return Histogram(list(self.buckets), self.sum_ns)


class Totals(msgspec.Struct):
    """Running totals. Integers are exact at any size; only the Prometheus export turns them into floats."""

    counters: dict[Key, int] = {}
    histograms: dict[Key, Histogram] = {}

    def add(self, other: Totals) -> None:
        for key, value in other.counters.items():
            self.counters[key] = self.counters.get(key, 0) + value
        for key, histogram in other.histograms.items():
            self.histograms.setdefault(key, Histogram()).add(histogram)

    def to_rows(self) -> list[Row]:
        """All metrics as rows."""
        rows: list[Row] = [(name, labels, value) for (name, labels), value in self.counters.items()]
        rows += [(name, labels, (h.buckets, h.sum_ns)) for (name, labels), h in self.histograms.items()]
        return rows

    @classmethod
    def from_rows(cls, rows: Iterable[Row]) -> Totals:
        """Read :meth:`to_rows` back.

        Raises:
            ValueError: a metric, label count or number that this version does not know.
        """
        totals = cls()
        for name, labels, value in rows:
            metric = METRICS.get(name)
            if metric is None or len(labels) != len(metric.labels):
                raise ValueError(f"metric {name!r} with {len(labels)} labels is not known to this version")
            if isinstance(value, int) and metric.kind == "counter" and value >= 0:
                totals.counters[name, labels] = value
            elif isinstance(value, tuple) and metric.kind == "histogram" and _valid(*value):
                totals.histograms[name, labels] = Histogram(*value)
            else:
                raise ValueError(f"metric {name!r} holds {value!r}, which is no {metric.kind}")
        return totals


def _valid(buckets: list[int], sum_ns: int) -> bool:
    return len(buckets) == len(BUCKETS_S) + 1 and min(buckets) >= 0 and sum_ns >= 0
