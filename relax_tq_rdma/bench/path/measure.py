"""The run: every tier, every repeat, all cases in turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from relax_tq_rdma.bench.path import proof
from relax_tq_rdma.bench.path.cases import Case
from relax_tq_rdma.bench.path.child import ChildError, Refused
from relax_tq_rdma.bench.path.figures import CaseFigures, TierLimits, limits, side
from relax_tq_rdma.bench.path.limits import LIMITS
from relax_tq_rdma.bench.path.messages import (
    Clear,
    Fill,
    Forget,
    Get,
    Limits,
    Measured,
    Moved,
    Put,
)
from relax_tq_rdma.bench.path.options import Options
from relax_tq_rdma.bench.path.payload import MIB, Shape
from relax_tq_rdma.bench.path.stage import Stage, staged

_STEP_SECONDS = 60.0
_SLOWEST_MIB_PER_SECOND = 16

Say = Callable[[str], None]


@dataclass
class Result:
    """Figures in the order of tiers and cases; limits by tier."""

    cases: list[CaseFigures] = field(default_factory=list)
    limits: dict[int, TierLimits] = field(default_factory=dict)


@dataclass
class _Record:
    """What one case did on one tier."""

    puts: list[Moved] = field(default_factory=list)
    gets: list[Moved] = field(default_factory=list)
    watched: tuple[Moved, Moved] | None = None
    problem: str = ""


def measure(options: Options, say: Say) -> Result:
    """Run everything. Processes are gone when it returns or raises. What a lost process leaves is still returned.

    Raises:
        DataplaneError: a process could not be started.
    """
    result = Result()
    with staged(options, say) as stage:
        for tier in options.tiers:
            shape = Shape(tier=tier, rows=options.rows, copies=options.copies, shared=options.shared)
            Tier(stage, options, shape, say).run(result)
    return result


class Tier:
    """All cases on one tier."""

    def __init__(self, stage: Stage, options: Options, shape: Shape, say: Say) -> None:
        self._stage, self._options, self._shape, self._say = stage, options, shape, say
        self._records = {case.name: _Record(problem=stage.refused.get(case.name, "")) for case in options.cases}
        self._limits: dict[str, list[float]] = {name: [] for name in LIMITS}
        self._seconds = _STEP_SECONDS + shape.nbytes / MIB / _SLOWEST_MIB_PER_SECOND
        self._stamp = 0

    def run(self, result: Result) -> None:
        """Measure, and add the figures to the result; a case that fails, or a lost process, is noted there."""
        try:
            if not self._stage.lost:
                self._rounds()
        except ChildError as gone:
            self._stage.lost = str(gone)
        for record in self._records.values():
            if len(record.gets) < self._options.repeats:
                record.problem = record.problem or self._stage.lost
        figures = [self._figures(case) for case in self._options.cases]
        engine = next((one for one in figures if one.case == "engine"), None)
        result.limits[self._shape.tier] = limits(self._shape.nbytes, self._limits, engine)
        result.cases += figures

    def _rounds(self) -> None:
        for end in self._stage.ends:
            end.ask(Fill(shape=self._shape), self._seconds)
        # Memory that is reused in turns is warm only after as many turns as the consumer holds on to, and one more.
        warm_ups = self._options.keep + 1
        for number in range(-warm_ups, self._options.repeats):
            self._round(number, warm_ups)
        for end in self._stage.ends:
            end.ask(Forget(), self._seconds)

    def _round(self, number: int, warm_ups: int) -> None:
        what = f"repeat {number + 1} of {self._options.repeats}" if number >= 0 else f"warm-up {number + warm_ups + 1}"
        self._say(f"{self._shape.tier} MiB: {what}")
        if number >= 0:
            measured = self._stage.consumer.ask(Limits(), self._seconds)
            assert isinstance(measured, Measured)
            for name, seconds in measured.seconds.items():
                self._limits[name].append(seconds)
        self._stamp += 1  # of the same case, no batch is as the one before
        cases = self._stage.cases
        first = number % max(1, len(cases))
        for case in cases[first:] + cases[:first]:
            record = self._records[case.name]
            if record.problem:
                continue
            try:
                put, get = self._move(case, watch=number == -1)
            except Refused as why:
                record.problem = str(why)
                continue
            if number == -1:
                record.watched = put, get
                assert get.watched is not None
                record.problem = proof.problem(case, self._shape, get.watched)
            elif number >= 0:
                record.puts.append(put)
                record.gets.append(get)

    def _move(self, case: Case, *, watch: bool) -> tuple[Moved, Moved]:
        """One batch from end to end, compared byte for byte by the consumer, then removed."""
        partition = f"bench-{case.name}-{self._shape.tier}-{self._stamp}"
        put = self._stage.producer.ask(
            Put(case=case.name, partition=partition, stamp=self._stamp, watch=watch), self._seconds
        )
        assert isinstance(put, Moved)
        try:
            get = self._stage.consumer.ask(
                Get(case=case.name, partition=partition, indexes=put.indexes, digests=put.digests, watch=watch),
                self._seconds,
            )
            assert isinstance(get, Moved)
        finally:
            self._stage.producer.ask(Clear(case=case.name, partition=partition), self._seconds)
        return put, get

    def _figures(self, case: Case) -> CaseFigures:
        record, shape = self._records[case.name], self._shape
        found = CaseFigures(
            case=case.name,
            backend=case.backend,
            tier_mib=shape.tier,
            payload_bytes=shape.nbytes,
            rows=shape.rows,
            dup=shape.copies,
            dup_shared=shape.shared,
            not_measured=record.problem or proof.staging_problem(case, record.puts + record.gets),
        )
        if found.not_measured or record.watched is None:
            return found
        put, get = record.watched
        assert get.watched is not None
        return msgspec.structs.replace(
            found,
            put=side(record.puts, put, shape.nbytes),
            get=side(record.gets, get, shape.nbytes),
            stored_bytes=get.watched.stored_bytes,
            encoded_rows=get.watched.encoded_rows,
        )
