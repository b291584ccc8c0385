"""The byte ledger of a process: exact integers, per step for the last few steps and as running totals (design §8).

Pure bookkeeping behind one small lock: no I/O, no torch, no clock but the one given. Only a *completed* put or get adds
bytes; failures and retries go to a counter of their own (FC-48).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from relax_tq_rdma.accounting import names
from relax_tq_rdma.accounting.names import (
    Direction,
    FanoutMode,
    Metric,
    Path,
    ProcessorCall,
    Result,
    StageName,
    StagingRung,
)
from relax_tq_rdma.accounting.records import Batch, Histogram, PoolState, StepSummary, Totals
from relax_tq_rdma.accounting.steps import Cell, Step, summarise

KEEP_STEPS = 4


@dataclass(slots=True, eq=False)
class Operation:
    """A put or get in flight; :meth:`Ledger.end` closes it."""

    direction: Direction
    step: Step | None
    started: int
    ended: int | None = None


class Ledger:
    """Counts for one process. Every method may be called from any thread.

    Args:
        clock: monotonic nanoseconds.
    """

    def __init__(self, *, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._totals = Totals(counters={}, histograms={})
        self._labels: set[str] = set()
        self._steps: dict[str, Step] = {}  # oldest first
        self._due: list[Step] = []
        self._pool = PoolState()
        self.revision = 0
        """Grows with every change, so that a publisher can tell news from silence."""

    # --- operations ---------------------------------------------------------------------------------------------------

    def begin(self, direction: Direction, step: str) -> Operation:
        """A put or get starts. ``step`` is the partition id; an empty one is counted in the totals only."""
        with self._lock:
            found = self._open(step) if step else None
            now = self._clock()
            if found is not None:
                lane = found.lanes[direction]
                if lane.in_flight == 0:
                    lane.busy_since = now
                lane.in_flight += 1
                found.open += 1
                if lane.first_start is None:
                    lane.first_start = now
            return Operation(direction, found, now)

    def stop(self, operation: Operation) -> None:
        """Stop the clock of an operation that :meth:`end` closes later, so that measuring the result costs no time."""
        with self._lock:
            self._stop(operation)

    def end(self, operation: Operation, result: Result, batch: Batch | None = None) -> None:
        """The operation is over. Only ``ok`` adds its time and the bytes of ``batch``."""
        with self._lock:
            self.revision += 1
            ended = self._stop(operation)
            direction, step = operation.direction, operation.step
            self._count(names.OPERATIONS, (direction, result))
            if result == "ok":
                self._stage(direction, ended - operation.started, step)
                if batch is not None:
                    self._deliver(direction, batch, step)
            if step is not None:
                lane = step.lanes[direction]
                if result == "ok":
                    lane.last_end = ended
                else:
                    lane.failed += 1
                step.open -= 1
                step.dirty = True
                if not step.open and not self._is_newest(step) and not self._can_wait(step):
                    self._close(step)

    def retried(self, direction: Direction, step: str | None = None) -> None:
        """One attempt of an operation failed and is being repeated."""
        with self._lock:
            self.revision += 1
            self._count(names.OPERATIONS, (direction, "retried"))
            if found := self._named(step):
                found.lanes[direction].retried += 1
                found.dirty = True

    def wire(self, field_name: str, direction: Direction, wire_bytes: int, saved_bytes: int, step: str | None) -> None:
        """What a field really cost: bytes handed to the storage, and payload bytes that deduplication did not move."""
        with self._lock:
            self.revision += 1
            label = self._label(field_name)
            self._count(names.BYTES_WIRE, (label, direction), wire_bytes)
            self._count(names.BYTES_SAVED, (label, direction), saved_bytes)
            if found := self._named(step):
                sums = found.wire.setdefault((label, direction), [0, 0])
                sums[0] += wire_bytes
                sums[1] += saved_bytes
                found.dirty = True

    def left_raw(self, field_name: str, rows: int, step: str | None) -> None:
        """``rows`` of a put could not be normalised, or must not be."""
        with self._lock:
            self.revision += 1
            self._count(names.ROWS_RAW, (self._label(field_name),), rows)
            if found := self._named(step):
                found.raw_rows += rows
                found.dirty = True

    # --- times and events ---------------------------------------------------------------------------------------------

    def stage(self, name: StageName, ns: int, step: str | None = None) -> None:
        """A stage took ``ns``. Without ``step`` the time goes to the newest step."""
        with self._lock:
            self.revision += 1
            found = self._named(step)
            self._stage(name, ns, found)
            if found is not None and name == "rebuild":
                found.last_rebuild = self._clock()

    def fanout(self, mode: FanoutMode, ns: int, step: str | None = None) -> None:
        """A batch reached all ranks of the cohort after ``ns``."""
        with self._lock:
            self.revision += 1
            self._stage("fanout", ns, self._named(step))
            self._observe(names.FANOUT, (mode,), ns)

    def processor_called(self, result: ProcessorCall) -> None:
        """A sample asked for the image processor."""
        with self._lock:
            self.revision += 1
            self._count(names.PROCESSOR, (result,))

    def registered(self, direction: Direction, path: Path, regions: int, ns: int) -> None:
        """``regions`` memory regions were registered in ``ns``."""
        with self._lock:
            self.revision += 1
            self._count(names.MR_REGISTER, (direction, path), regions)
            self._stage("register", ns, self._named(None))
            self._observe(names.MR_REGISTER_SECONDS, (), ns)

    def allocated(self, ns: int) -> None:
        """Destination memory of a get was allocated in ``ns``."""
        with self._lock:
            self.revision += 1
            self._stage("alloc", ns, self._named(None))
            self._observe(names.GET_ALLOC_SECONDS, (), ns)

    def staged(self, direction: Direction, rung: StagingRung, values: int, nbytes: int) -> None:
        """``values`` were moved with host staging, by one kind of memory."""
        with self._lock:
            self.revision += 1
            self._count(names.STAGING_VALUES, (direction, rung), values)
            self._count(names.STAGING_BYTES, (direction, rung), nbytes)
            if found := self._named(None):
                sums = found.staged.setdefault((direction, rung), [0, 0])
                sums[0] += values
                sums[1] += nbytes
                found.dirty = True

    def pool(self, state: PoolState) -> None:
        """How the staging pool of this process is now."""
        with self._lock:
            self.revision += 1
            self._pool = state
            if found := self._named(None):
                found.pool = state

    def gauges(self) -> dict[str, int]:
        """What is the case now, by the metric's name."""
        pool = self._pool
        return {
            names.STAGING_CAPACITY.name: pool.capacity,
            names.STAGING_HELD.name: pool.held,
            names.STAGING_PEAK.name: pool.peak,
            names.STAGING_RETIRED.name: pool.retired,
        }

    def fallback(self, from_: str, to: str, reason: str) -> None:
        """The job took one step down the ladder."""
        with self._lock:
            self.revision += 1
            labels = (
                names.one_of(from_, names.RUNGS),
                names.one_of(to, names.RUNGS),
                names.one_of(reason, names.REASONS),
            )
            self._count(names.FALLBACK, labels)

    def cleared(self, step: str) -> None:
        """The partition was cleared, in whole or in part: its summary is due.

        A partition that is cleared piece by piece is summed up at the first piece and once more when it is over.
        """
        with self._lock:
            found = self._steps.get(step)
            if found is not None and (found.summaries == 0 or not self._is_newest(found)):
                self._close(found)

    # --- readers ------------------------------------------------------------------------------------------------------

    @property
    def has_due(self) -> bool:
        """Whether :meth:`take_due` has something; needs no lock."""
        return bool(self._due)

    def take_due(self) -> list[StepSummary]:
        """Summaries of the steps that ended since the last call."""
        with self._lock:
            due, self._due = self._due, []
            return [self._report(step) for step in due]

    def drain(self) -> list[StepSummary]:
        """Summaries of all steps with news, ended or not."""
        with self._lock:
            for step in list(self._steps.values()):
                self._close(step)
            due, self._due = self._due, []
            return [self._report(step) for step in due]

    def step(self, name: str) -> StepSummary | None:
        """What is known of a step now; ``None`` when it was never seen or is no longer kept."""
        with self._lock:
            found = self._steps.get(name)
            return summarise(found) if found else None

    def steps(self) -> tuple[StepSummary, ...]:
        """The kept steps, oldest first."""
        with self._lock:
            return tuple(summarise(step) for step in self._steps.values())

    def totals(self) -> Totals:
        """A copy of the running totals."""
        with self._lock:
            return Totals(
                counters=dict(self._totals.counters),
                histograms={key: h.copy() for key, h in self._totals.histograms.items()},
            )

    # --- under the lock -----------------------------------------------------------------------------------------------

    def _stop(self, operation: Operation) -> int:
        if operation.ended is None:
            operation.ended = self._clock()
            if operation.step is not None:
                lane = operation.step.lanes[operation.direction]
                lane.in_flight -= 1
                if lane.in_flight == 0:
                    lane.busy_ns += operation.ended - lane.busy_since
        return operation.ended

    def _open(self, name: str) -> Step:
        found = self._steps.get(name)
        if found is None:
            for older in self._steps.values():
                if not older.open:
                    self._close(older)
            found = self._steps[name] = Step(name)
            if len(self._steps) > KEEP_STEPS:
                self._close(self._steps.pop(next(iter(self._steps))))
        return found

    def _named(self, name: str | None) -> Step | None:
        if name:
            return self._open(name)
        return next(reversed(self._steps.values()), None)

    def _is_newest(self, step: Step) -> bool:
        return next(reversed(self._steps.values()), None) is step

    def _can_wait(self, step: Step) -> bool:
        """News after a step's line wait for the next step, a clear or the end: a line a step, not one for each get."""
        return bool(step.summaries) and self._steps.get(step.name) is step

    def _close(self, step: Step) -> None:
        if step.dirty and step not in self._due:
            self._due.append(step)

    def _report(self, step: Step) -> StepSummary:
        step.summaries += 1
        step.dirty = False
        return summarise(step)

    def _deliver(self, direction: Direction, batch: Batch, step: Step | None) -> None:
        if step is not None:
            step.lanes[direction].rows += batch.rows
            if direction == "put":
                step.unique_by = batch.unique_by
        for stats in batch.fields:
            label = self._label(stats.name)
            self._count(names.BYTES, (label, stats.path, direction), stats.bytes)
            self._count(names.ROWS, (label, stats.path, direction), stats.rows)
            if direction == "put":
                self._count(names.BYTES_UNIQUE, (label,), stats.unique_bytes)
            if step is not None:
                step.cells.setdefault((label, direction, stats.path), Cell()).add(stats)

    def _stage(self, name: str, ns: int, step: Step | None) -> None:
        self._observe(names.STAGE, (name,), ns)
        if step is not None:
            step.stages_ns[name] = step.stages_ns.get(name, 0) + ns
            step.dirty = True

    def _label(self, field_name: str) -> str:
        if field_name not in self._labels:
            if len(self._labels) >= names.FIELD_LIMIT:
                return names.OTHER
            self._labels.add(field_name)
        return field_name

    def _count(self, metric: Metric, labels: tuple[str, ...], by: int = 1) -> None:
        key = (metric.name, labels)
        self._totals.counters[key] = self._totals.counters.get(key, 0) + by

    def _observe(self, metric: Metric, labels: tuple[str, ...], ns: int) -> None:
        self._totals.histograms.setdefault((metric.name, labels), Histogram()).observe(ns)
