"""The accounting of this process: one ledger and its outlets, whatever happens to the module (FC-48).

The one instance hangs on an entry of ``sys.modules``, so a reload, an import under a second name or a second plugin
instance finds it instead of starting a rival. A forked child starts at zero, with a file of its own.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import socket
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Literal, cast

from relax_tq_rdma.accounting import snapshot
from relax_tq_rdma.accounting.journal import Journal
from relax_tq_rdma.accounting.ledger import Ledger
from relax_tq_rdma.accounting.lines import step_line
from relax_tq_rdma.accounting.notes import say_once
from relax_tq_rdma.accounting.paths import slow_path
from relax_tq_rdma.accounting.publisher import Publisher
from relax_tq_rdma.accounting.records import StepSummary
from relax_tq_rdma.env import ACCOUNTING_DIR, METRICS_PORT
from relax_tq_rdma.errors import StartError
from relax_tq_rdma.transport.process import own_id
from relax_tq_rdma.transport.rundir import run_dir

Mode = Literal["off", "summary", "verbose"]
Sink = Callable[[str], None]
_ANCHOR = "relax_tq_rdma.accounting.__process__"


class Accounting:
    """Ledger, step lines, JSON lines and metrics of one process with accounting on.

    The outlets start with the first record, so that a process (or a forked child) that moves nothing leaves nothing.
    """

    def __init__(self, mode: Mode, job: str, node: str, sink: Sink) -> None:
        self.mode = mode
        self.job = job
        self.node = node
        self.ledger = Ledger()
        self.sink = sink
        self._pid = os.getpid()
        self._start_lock = threading.Lock()
        self._started = False
        self._publisher: Publisher | None = None
        self._journal: Journal | None = None
        self._backend: tuple[str, str, str, str] | None = None
        self.expects_fast_path = False

    @property
    def content(self) -> bool:
        """Whether copies are told by content: ``verbose`` pays for reading every byte put."""
        return self.mode == "verbose"

    def tick(self) -> None:
        """After each record: start the outlets once, print the lines of steps that ended. Never raises."""
        if not self._started:
            self._start()
        if self.ledger.has_due:
            for summary in self.ledger.take_due():
                self._emit(summary)

    def set_backend(self, labels: tuple[str, str, str, str]) -> None:
        self._backend = labels
        self.tick()
        if self._publisher is not None:
            self._publisher.backend = labels

    def flush(self) -> None:
        """Print the lines of all steps with news and publish the totals."""
        if os.getpid() != self._pid:
            return
        for summary in self.ledger.drain():
            self._emit(summary)
        if self._publisher is not None:
            self._publisher.publish()

    def close(self) -> None:
        """Flush and stop the outlets."""
        self.flush()
        if self._publisher is not None:
            self._publisher.close()

    def same_as(self, mode: Mode, job: str, node: str) -> bool:
        return (self.mode, self.job, self.node) == (mode, job, node)

    def in_child(self) -> Accounting:
        """The accounting of a child that was just forked."""
        if self._publisher is not None:
            self._publisher.abandon()
        child = Accounting(self.mode, self.job, self.node, self.sink)
        child._backend = self._backend
        child.expects_fast_path = self.expects_fast_path
        return child

    def _start(self) -> None:
        with self._start_lock:
            if self._started:
                return
            self._started = True
            _HOLDER.publishers += 1
            try:
                if self.mode == "verbose":
                    name = f"{self.node}-{self._pid}-{own_id().start_ticks}.jsonl"
                    self._journal = Journal(Path(ACCOUNTING_DIR.read()).absolute() / name)
                self._publisher = Publisher(
                    run_dir(snapshot.FOLDER),
                    job=self.job,
                    node=self.node,
                    serial=_HOLDER.publishers,
                    ledger=self.ledger,
                    address=METRICS_PORT.read(),
                )
                self._publisher.backend = self._backend
                self._publisher.start()
            except (StartError, OSError, RuntimeError) as exc:  # no working folder, no thread, no /proc
                say_once("publisher", f"metrics of this process are not published: {exc}")
            if multiprocessing.parent_process() is not None:
                # A forked child of multiprocessing ends by os._exit: atexit never runs there, finalizers do.
                from multiprocessing.util import Finalize

                Finalize(None, flush, exitpriority=0)

    def _emit(self, summary: StepSummary) -> None:
        try:
            self.sink(step_line(summary, node=self.node, pid=self._pid))
        except Exception as exc:  # a closed stream or a caller's sink must not end the job
            say_once("sink", f"step lines are not printed: {exc}")
        if self._journal is not None:
            self._journal.write(summary)
        problem = slow_path(summary) if self.expects_fast_path and self.mode == "verbose" else None
        if problem is not None:
            logging.getLogger(__name__).warning("%s", problem)


class _Holder(types.ModuleType):
    active: Accounting | None = None
    publishers: int = 0  # how many this process has had: each has a file of its own, so that no sum ever shrinks


def _holder() -> _Holder:
    found = sys.modules.get(_ANCHOR)
    if found is None:
        found = sys.modules[_ANCHOR] = _Holder(_ANCHOR)
        os.register_at_fork(after_in_child=_after_fork)
        atexit.register(flush)
    return cast(_Holder, found)


def _after_fork() -> None:
    holder = _holder()
    if holder.active is not None:
        holder.active = holder.active.in_child()


def current() -> Accounting | None:
    """The accounting of this process; ``None`` when it is off."""
    return _HOLDER.active


def configure(mode: Mode, *, job: str = "", node: str = "", sink: Sink | None = None) -> None:
    """Switch accounting on or off for this process. Repeating a call changes nothing, but takes a new ``sink``.

    Args:
        mode: ``off``; ``summary``: one line a step; ``verbose``: JSON lines per field too, unique bytes by content.
        job: the job's token; processes of a node with the same token share one endpoint. Empty: this process alone.
        node: short name of this node for the lines; empty: its host name.
        sink: takes each step line; default: standard error.
    """
    before = _HOLDER.active
    if mode == "off":
        _HOLDER.active = None
    else:
        job = job or f"solo-{os.getpid()}-{own_id().start_ticks}"
        node = node or socket.gethostname().partition(".")[0] or "localhost"
        if before is not None and before.same_as(mode, job, node):
            before.sink = sink or before.sink
            return
        _HOLDER.active = Accounting(mode, job, node, sink or _to_stderr)
    if before is not None:
        before.close()


def expect_fast_path() -> None:
    """From now on ``verbose`` checks each step: its largest field must take the fast path, or a warning says so."""
    if _HOLDER.active is not None:
        _HOLDER.active.expects_fast_path = True


def flush() -> None:
    """Print the lines of all steps with news and publish this process's totals now."""
    active = _HOLDER.active
    if active is not None:
        active.flush()


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


_HOLDER = _holder()
