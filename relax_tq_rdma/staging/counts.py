"""What the staging of one client has done so far, as plain numbers."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from relax_tq_rdma.accounting import Direction, StagingRung
from relax_tq_rdma.transport.memory import MIB


@dataclass(frozen=True)
class Moved:
    values: int = 0
    nbytes: int = 0


@dataclass(frozen=True)
class StagingCounts:
    """Exact counts since the client was made; sizes in bytes.

    Attributes:
        rungs: what was moved in each direction by each rung. ``lend``: read where it is offered; ``copy``: through
            memory borrowed for the transfer; ``call``: memory registered for this call only.
        capacity: of the pool; 0 while there is none.
        held: lent to consumers now.
        peak: most that was lent at one time.
        retired: of the pool, never to be used again.
        misses: values that the pool should have served and could not, so that they took ``call``.
        registrations: regions registered so far, for single calls.
        retired_regions: bytes of such regions that are kept for the life of the process.
        allocations: fresh blocks of ordinary memory for results, of :data:`~.recycled.SMALL_BYTES` and more.
        allocated: bytes of those.
        spare: bytes of ordinary memory kept for later results.
    """

    rungs: dict[tuple[Direction, StagingRung], Moved] = field(default_factory=dict)
    capacity: int = 0
    held: int = 0
    peak: int = 0
    retired: int = 0
    misses: int = 0
    registrations: int = 0
    retired_regions: int = 0
    allocations: int = 0
    allocated: int = 0
    spare: int = 0
    wanted: int = 0
    """Most bytes that consumers kept at one time of what is worth lending: what the pool would have to lend for all."""

    def moved(self, direction: Direction, rung: StagingRung) -> Moved:
        return self.rungs.get((direction, rung), Moved())

    @property
    def advised_mb(self) -> int:
        """``--tq-host-staging-mb`` with which everything would have been lent; 0 when there is nothing to advise."""
        return -(-self.wanted * 4 // (3 * 64 * MIB)) * 64 if self.capacity and self.wanted > self.peak else 0


class Tally:
    """Counts of rungs. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rungs: dict[tuple[Direction, StagingRung], Moved] = {}
        self.misses = 0

    def add(self, direction: Direction, rung: StagingRung, values: int, nbytes: int, *, missed: bool = False) -> None:
        with self._lock:
            before = self._rungs.get((direction, rung), Moved())
            self._rungs[direction, rung] = Moved(before.values + values, before.nbytes + nbytes)
            self.misses += values * missed

    def rungs(self) -> dict[tuple[Direction, StagingRung], Moved]:
        with self._lock:
            return dict(self._rungs)
