"""Proof of coverage: every process with a storage manager of the plugin says so where driver and people can read it.

``relax-tq-rdma status`` shows it on a running job (``docs/reference/status.md``). Light to import; nothing here raises
into the data path.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from relax_tq_rdma.version import __version__

if TYPE_CHECKING:
    from relax_tq_rdma.coverage.process import Process
    from relax_tq_rdma.coverage.records import JobRecord
    from relax_tq_rdma.coverage.reporter import Reporter
    from relax_tq_rdma.section import JobSection

__all__ = [
    "begin",
    "check_at_start",
    "compare_at_start",
    "count",
    "end",
    "joined",
    "left",
    "note",
    "starting",
]

logger = logging.getLogger(__name__)

CHECK_SECONDS = 60.0

_lock = threading.RLock()
_process: Process | None = None
_reporter: Reporter | None = None
_job: JobRecord | None = None


def note(text: str) -> None:
    """Something that must not be overlooked in this process, one sentence. Repeating it changes nothing."""
    _this_process().note(text)
    if _reporter is not None:
        _reporter.wake()


def count(what: str, times: int = 1) -> None:
    """This process did something otherwise than asked, ``times`` times."""
    _this_process().count(what, times)


def joined(manager: Any, section: JobSection) -> None:
    """A storage manager of the plugin was made here: this process is on the board until the last one is closed."""
    global _reporter
    from relax_tq_rdma.coverage.reporter import Reporter

    try:
        with _lock:
            process = _this_process()
            process.joined(manager, section)
            if _reporter is None:
                _reporter = Reporter(process)
            else:
                _reporter.wake()
    except Exception as exc:  # no thread can start, /proc is not there: the job runs without
        logger.warning("this process cannot be listed by relax-tq-rdma status: %s", exc)


def left(manager: Any) -> None:
    """A storage manager was closed. Idempotent."""
    global _reporter
    with _lock:
        if _this_process().left(manager) and _reporter is not None:
            _reporter.stop()
            _reporter = None


def starting(job: str) -> None:
    """In the driver, before anything of the data plane is started. :func:`begin` or :func:`end` follows."""
    from relax_tq_rdma.coverage import board
    from relax_tq_rdma.coverage.process import here
    from relax_tq_rdma.coverage.records import StartRecord

    try:
        board.put(StartRecord(job=job, plugin=__version__, driver=here(), began=time.time()))
    except Exception as exc:
        logger.debug("relax-tq-rdma status will not say that this job is starting: %s", exc)


def begin(section: JobSection, start_line: str) -> None:
    """In the driver, when the data plane is ready: the job is on the board, and what earlier ones have left is not."""
    global _job
    from relax_tq_rdma.coverage import board
    from relax_tq_rdma.coverage.process import here
    from relax_tq_rdma.coverage.records import START, JobRecord

    _job = JobRecord(
        job=section.job,
        plugin=section.plugin_version,
        start_line=start_line,
        settings=section.settings.to_dict(),
        decision=section.decision,
        driver=here(),
        nodes=section.nodes,
        started=time.time(),
    )
    try:
        board.remove_others(section.job)  # one data plane a cluster: they are not running
        board.put(_job)
        board.remove(f"{section.job}/{START}")
    except Exception as exc:
        logger.warning("relax-tq-rdma status will not find this job: %s", exc)


def end(job: str) -> None:
    """In the driver, when the data plane is closed, or did not come up."""
    global _job
    from relax_tq_rdma.coverage import board

    _job = None
    try:
        board.remove_job(job)
    except Exception as exc:  # Ray is gone already, and the board with it
        logger.debug("the records of job %s stay: %s", job, exc)


def check_at_start(limit: float) -> Callable[[], None]:
    """What the driver does before the data system starts: see :func:`relax_tq_rdma.coverage.nodes.require_plugin`.

    Args:
        limit: seconds; at least :data:`CHECK_SECONDS` are given, because a busy node takes its time for a new worker.
    """

    def check() -> None:
        from relax_tq_rdma.coverage.nodes import require_plugin

        require_plugin(max(limit, CHECK_SECONDS))

    return check


def compare_at_start() -> None:
    """What the driver does when all services are up: say whether the processes that have joined so far are alike."""
    from relax_tq_rdma.coverage import board
    from relax_tq_rdma.coverage.compare import alike, differences
    from relax_tq_rdma.say import say
    from relax_tq_rdma.summary import PREFIX

    if _job is None:
        return
    try:
        found = board.read(_job.job)
        lines = [f"WARNING {text}" for text in (*found.problems, *differences(_job, found.processes))]
        lines = lines or [f"coverage: {alike(found.processes)}, all alike"]
    except Exception as exc:
        lines = [f"WARNING the processes of this job could not be compared: {exc}"]
    for line in lines:
        say(f"{PREFIX} {line}")


def _this_process() -> Process:
    global _process
    from relax_tq_rdma.coverage.process import Process

    with _lock:
        if _process is None:
            _process = Process()
        return _process


def _after_fork() -> None:
    """Threads and managers have stayed with the parent."""
    global _lock, _process, _reporter, _job
    _lock, _process, _reporter, _job = threading.RLock(), None, None, None


os.register_at_fork(after_in_child=_after_fork)
