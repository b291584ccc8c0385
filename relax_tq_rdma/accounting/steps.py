"""What a ledger keeps of one step, and how it becomes a :class:`StepSummary`. Not thread-safe: the ledger locks."""

from __future__ import annotations

from dataclasses import dataclass, field

from relax_tq_rdma.accounting.names import Direction, Path, StagingRung
from relax_tq_rdma.accounting.records import FieldFlow, FieldStats, Flow, PoolState, Staged, StepSummary, UniqueBy


@dataclass(slots=True)
class Cell:
    """Sums of one (field, direction, path) of a step."""

    rows: int = 0
    bytes: int = 0
    unique_bytes: int = 0
    unmeasured: int = 0
    dtypes: set[str] = field(default_factory=set)

    def add(self, stats: FieldStats) -> None:
        self.rows += stats.rows
        self.bytes += stats.bytes
        self.unique_bytes += stats.unique_bytes
        self.unmeasured += stats.unmeasured
        self.dtypes.update(stats.dtypes)


@dataclass(slots=True)
class Lane:
    """One direction of a step. Overlapping operations count their common wall time once."""

    rows: int = 0
    failed: int = 0
    retried: int = 0
    in_flight: int = 0
    busy_since: int = 0
    busy_ns: int = 0
    first_start: int | None = None
    last_end: int | None = None


@dataclass(slots=True, eq=False)
class Step:
    """One step (= TransferQueue partition) of this process."""

    name: str
    open: int = 0  # operations begun and not ended
    cells: dict[tuple[str, Direction, Path], Cell] = field(default_factory=dict)
    wire: dict[tuple[str, Direction], list[int]] = field(default_factory=dict)  # [wire bytes, saved bytes]
    stages_ns: dict[str, int] = field(default_factory=dict)
    lanes: dict[Direction, Lane] = field(default_factory=lambda: {"put": Lane(), "get": Lane()})
    raw_rows: int = 0
    staged: dict[tuple[Direction, StagingRung], list[int]] = field(default_factory=dict)  # [values, bytes]
    pool: PoolState | None = None
    unique_by: UniqueBy = "identity"
    last_rebuild: int | None = None
    dirty: bool = False
    summaries: int = 0


def summarise(step: Step) -> StepSummary:
    fields = []
    for (name, direction, path), cell in step.cells.items():
        wire = step.wire.get((name, direction))
        fields.append(
            FieldFlow(
                field=name,
                direction=direction,
                path=path,
                rows=cell.rows,
                bytes=cell.bytes,
                unique_bytes=cell.unique_bytes,
                unique_by=step.unique_by if direction == "put" else "identity",
                dtypes=tuple(sorted(cell.dtypes)),
                unmeasured=cell.unmeasured,
                wire_bytes=wire[0] if wire else None,
                saved_bytes=wire[1] if wire else 0,
            )
        )
    rebuilt = max((t for t in (step.last_rebuild, step.lanes["get"].last_end) if t is not None), default=None)
    began = step.lanes["put"].first_start
    return StepSummary(
        step=step.name,
        update=max(1, step.summaries),
        put=_flow(step, "put"),
        get=_flow(step, "get"),
        stages={name: ns / 1e9 for name, ns in step.stages_ns.items()},
        fields=tuple(fields),
        unique_by=step.unique_by,
        unmeasured=sum(cell.unmeasured for cell in step.cells.values()),
        raw_rows=step.raw_rows,
        staged=tuple(
            Staged(direction=direction, rung=rung, values=values, bytes=nbytes)
            for (direction, rung), (values, nbytes) in step.staged.items()
        ),
        pool=step.pool,
        effective_s=(rebuilt - began) / 1e9 if rebuilt is not None and began is not None and rebuilt > began else None,
    )


def _flow(step: Step, direction: Direction) -> Flow:
    lane = step.lanes[direction]
    cells = [(path, cell) for (_, way, path), cell in step.cells.items() if way == direction]
    wires = [sums for (_, way), sums in step.wire.items() if way == direction]
    return Flow(
        rows=lane.rows,
        bytes=sum(cell.bytes for _, cell in cells),
        unique_bytes=sum(cell.unique_bytes for _, cell in cells),
        fast_bytes=sum(cell.bytes for path, cell in cells if path == "fast"),
        slow_bytes=sum(cell.bytes for path, cell in cells if path == "slow"),
        saved_bytes=sum(saved for _, saved in wires),
        wire_bytes=sum(wire for wire, _ in wires) if wires else None,
        seconds=lane.busy_ns / 1e9,
        failed=lane.failed,
        retried=lane.retried,
    )
