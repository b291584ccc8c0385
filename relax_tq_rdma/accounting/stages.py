"""Stage timers. With accounting off they cost one attribute look-up: no lock, no clock, no allocation."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

from relax_tq_rdma.accounting.names import FANOUT_MODES, STAGES, FanoutMode, StageName
from relax_tq_rdma.accounting.notes import say_once
from relax_tq_rdma.accounting.process import Accounting, current

_OFF: AbstractContextManager[None] = nullcontext()


def stage(name: StageName, step: str | None = None) -> AbstractContextManager[None]:
    """Time a block as one stage (RFC §3.4); a block that raises is not counted.

    ``step`` is the partition id; without it the time goes to the newest step this process has seen.
    """
    accounting = current()
    if accounting is None:
        return _OFF
    if name not in STAGES:
        say_once(f"stage {name}", f"stage {name!r} is not timed: the stages are {', '.join(STAGES)}")
        return _OFF
    return _Timer(accounting, lambda ns: accounting.ledger.stage(name, ns, step))


def fanout(mode: FanoutMode, step: str | None = None) -> AbstractContextManager[None]:
    """Time the way of one batch to all ranks of a cohort: ``rank0`` (one fetch and broadcasts) or ``per_rank``."""
    accounting = current()
    if accounting is None:
        return _OFF
    if mode not in FANOUT_MODES:
        say_once(f"fanout {mode}", f"fan-out mode {mode!r} is not timed: the modes are {', '.join(FANOUT_MODES)}")
        return _OFF
    return _Timer(accounting, lambda ns: accounting.ledger.fanout(mode, ns, step))


class _Timer(AbstractContextManager[None]):
    def __init__(self, accounting: Accounting, record: Callable[[int], None]) -> None:
        self._accounting, self._record = accounting, record

    def __enter__(self) -> None:
        self._start = time.perf_counter_ns()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self._record(time.perf_counter_ns() - self._start)
            self._accounting.tick()
