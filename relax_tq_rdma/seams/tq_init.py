"""Seam T1: guarded ``transfer_queue.init`` and ``close`` (design §2, §5).

The driver's ``init`` brings the data plane up by the state machine; a worker's joins the job whose section its config
carries; any other call goes to TransferQueue untouched. ``close`` ends exactly what this process has: the driver's the
data plane, a worker's its own client (upstream's kills the job's controller from anywhere, contract §13).
"""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import secrets
import signal
import threading
from dataclasses import dataclass
from typing import Any

from relax_tq_rdma.compat import HostFacts
from relax_tq_rdma.errors import SeamError, StartError
from relax_tq_rdma.say import say
from relax_tq_rdma.seams import tq_state
from relax_tq_rdma.seams.base import SeamReport, installed_transfer_queue, missing_parameters
from relax_tq_rdma.section import JobSection, read_section
from relax_tq_rdma.settings import Settings
from relax_tq_rdma.summary import PREFIX
from relax_tq_rdma.transport import attach
from relax_tq_rdma.transport.report import Decision

CLOSE_SECONDS = 30.0
"""TransferQueue itself gives its storage units 15 s to end."""

_STATE = ("_TQ_CLIENT", "_TQ_STORAGE", "_TQ_CONTROLLER")
_OURS = "_relax_tq_rdma_guard"


class TqInit:
    """See :class:`relax_tq_rdma.seams.base.Seam`.

    Args:
        settings: the job's, in its driver; ``None`` in a worker.
        blocked: why a process of a job that uses the plugin must not run here; empty when nothing is known against it.
        host: what is known of the host, in the driver of its job.
    """

    name = "T1 (transfer_queue.init and close)"
    _expected = (
        "init(conf=None) and close() of transfer_queue.interface, _init_from_existing() and three state variables"
    )

    def __init__(self, settings: Settings | None = None, blocked: str = "", host: HostFacts | None = None) -> None:
        self._settings, self._blocked, self._host = settings, blocked, host
        self._guard: Guard | None = None

    @property
    def is_running(self) -> bool:
        """Whether this process has a data plane, or is part of one."""
        return self._guard is not None and self._guard.is_running

    @property
    def decision(self) -> Decision | None:
        """What the data plane of this process runs on; ``None`` without one."""
        return self._guard.decision if self._guard is not None else None

    @property
    def start_line(self) -> str:
        """As this process printed it; empty where it has started no data plane."""
        return self._guard.start_line if self._guard is not None else ""

    def close(self) -> None:
        """End what this process has, as ``transfer_queue.close`` does."""
        if self._guard is not None:
            self._guard.close()

    def check(self) -> SeamReport:
        found = taken = ""
        try:
            package, interface = _modules()
            for function in (package.init, package.close, interface.init, interface.close):
                taken = taken or _stranger(function)
            missing = [name for name in (*_STATE, "_init_from_existing") if not hasattr(interface, name)]
            if missing:
                found = f"no {', '.join(missing)} in transfer_queue.interface"
            elif missing_parameters(interface.init, ("conf",)):
                found = "init without parameter conf"
        except Exception as exc:  # a broken TransferQueue must become a sentence, whatever it raises
            found = f"{type(exc).__name__}: {exc}"
        return SeamReport(
            name=self.name,
            ok=not found and not taken,
            installed=installed_transfer_queue(),
            expected=self._expected,
            found=found,
            taken_by=taken,
        )

    def apply(self) -> None:
        if self._guard is not None:
            return
        package, interface = _modules()
        self._guard = guard = Guard(
            self._settings, interface.init, interface.close, blocked=self._blocked, host=self._host
        )
        init = functools.wraps(interface.init)(lambda conf=None: guard.init(conf))
        close = functools.wraps(interface.close)(lambda: guard.close())
        for function in (init, close):
            setattr(function, _OURS, guard)
        for module in (package, interface):
            module.init, module.close = init, close

    def remove(self) -> None:
        guard = self._guard
        if guard is None:
            return
        self._guard = None
        for module in _modules():
            for name, before in (("init", guard.original_init), ("close", guard.original_close)):
                if _guard_of(getattr(module, name)) is guard:
                    setattr(module, name, before)
        guard.active = False  # whoever has wrapped or kept our function calls through it


@dataclass(frozen=True)
class _Running:
    """The data plane this process has started. ``port`` and ``started`` belong to the start path."""

    job: str
    port: Any
    started: Any


class Guard:
    """``init`` and ``close`` of one process, with what they must remember between the calls."""

    def __init__(
        self, settings: Settings | None, init: Any, close: Any, *, blocked: str = "", host: HostFacts | None = None
    ) -> None:
        self._settings, self._blocked, self._host = settings, blocked, host
        self.original_init, self.original_close = init, close
        self._lock = threading.RLock()  # a signal handler may close in the middle of an init
        self._running: _Running | None = None
        self._joined: JobSection | None = None
        self._owner = 0  # the process that has started or joined; a forked child of it has neither
        self._closing = False
        self.active = True

    @property
    def is_running(self) -> bool:
        return self._running is not None or self._joined is not None

    @property
    def decision(self) -> Decision | None:
        if self._running is not None:
            decision: Decision = self._running.started.decision
            return decision
        return self._joined.decision if self._joined is not None else None

    @property
    def start_line(self) -> str:
        return str(self._running.started.line) if self._running is not None else ""

    def init(self, conf: Any) -> Any:
        """What ``transfer_queue.init`` does in a process with the plugin; returns what it would.

        Raises:
            StartError: the data plane cannot be brought up, or this process cannot join it.
        """
        if not self.active:
            return self.original_init(conf)
        with self._lock:
            section = attach.section_of(conf)
            if self._settings is not None:
                # The driver may be handed the config of its own earlier start; only a running job is joined.
                if section is not None and attach.is_running(section.job):
                    return self._join(conf, section)
                return self._start(self._settings, conf)
            if section is None and conf is None:
                section = attach.running_section()
            return self.original_init(conf) if section is None else self._join(conf, section)

    def close(self) -> None:
        """What ``transfer_queue.close`` does: once for each init, in any state, also from a signal handler.

        Nothing in a forked child: the client and the data plane are its parent's (upstream's kills the controller).
        """
        if not self.active:
            self.original_close()
            return
        if self._owner not in (0, os.getpid()):
            return
        with self._lock:
            if self._closing:
                return
            self._closing = True
            try:
                self._close_what_is_there()
            finally:
                self._closing = False

    # --- driver -------------------------------------------------------------------------------------------------------

    def _start(self, settings: Settings, conf: Any) -> Any:
        import ray

        from relax_tq_rdma import accounting, coverage
        from relax_tq_rdma.transport.ray_port import RayPort
        from relax_tq_rdma.transport.start import start_job

        if not ray.is_initialized():
            ray.init()  # TransferQueue's first call would do the same
        if self._running is not None:
            if attach.is_running(self._running.job):
                return self._running.started.conf
            self._close_what_is_there()  # the host has restarted Ray without a word
        job = secrets.token_hex(8)
        accounting.configure(settings.accounting, job=job)
        port = RayPort(settings, job, self.original_init, self.original_close)
        coverage.starting(job)
        try:
            with port, tq_state.expected_bootstrap():
                started = start_job(
                    settings, conf, port, job=job, host=self._host, on_fallback=accounting.record_fallback
                )
        except BaseException:
            coverage.end(job)
            raise
        self._running, self._owner = _Running(job, port, started), os.getpid()
        section = attach.section_of(started.conf)
        if section is not None:
            coverage.begin(section, started.line)
        _put_signal_handlers_first()
        atexit.unregister(self._at_exit)
        atexit.register(self._at_exit)
        return started.conf

    def _at_exit(self) -> None:
        if self._running is not None:
            self.close()

    # --- worker -------------------------------------------------------------------------------------------------------

    def _join(self, conf: Any, section: JobSection) -> Any:
        if self._blocked:
            raise SeamError(self._blocked)
        if self._running is not None and self._running.job == section.job:
            return self._running.started.conf
        if _job_of_client() != section.job:
            self._leave()  # a client of an earlier job of this process
            attach.prove(section, section.settings.init_timeout_seconds)
            if not _modules()[1]._init_from_existing():
                raise StartError(
                    f"the controller of job {section.job} went away while this process joined: restart the job"
                )
            self._check_client(section)
        self._joined, self._owner = section, os.getpid()
        _put_signal_handlers_first()
        return conf

    def _check_client(self, section: JobSection) -> None:
        facts, decision = tq_state.client_facts(), section.decision
        wrong = ""
        if facts is None or _job_of_client() != section.job:
            wrong = "its TransferQueue client is not of this job"
        elif "_ManagerOfJob" not in facts.manager:
            wrong = (
                f"its storage manager is {facts.manager[0]}, not the plugin's: something has taken that name (seam T2)"
            )
        elif decision.backend == "MooncakeStore" and facts.protocol != decision.protocol:
            wrong = f"its storage client uses {facts.protocol or 'no protocol'}, not {decision.protocol}"
        if wrong:
            self._leave()
            raise StartError(f"this process cannot join job {section.job}: {wrong}")

    def _leave(self) -> None:
        """Close this process's client and nothing else; upstream's close would kill the controller of the job."""
        self._joined = None
        client = tq_state.storage_client()
        tq_state.detach_controller()
        self.original_close()
        tq_state.close_storage_client(client)

    # --- both ---------------------------------------------------------------------------------------------------------

    def _close_what_is_there(self) -> None:
        import ray

        from relax_tq_rdma import coverage
        from relax_tq_rdma.transport.start import close_job

        running, self._running = self._running, None
        if running is None:
            (self._leave if self._joined else self.original_close)()
        elif not ray.is_initialized():
            self._close_without_ray(running)
        else:
            left = close_job(running.started, running.port, limit=CLOSE_SECONDS)
            coverage.end(running.job)
            if left:
                say(f"{PREFIX} WARNING the data plane was not closed whole: {left}")

    def _close_without_ray(self, running: _Running) -> None:
        """Ray is gone, and with it the actors; any call to it would start a new one."""
        client = _modules()[1]._TQ_CLIENT
        tq_state.reset()
        if client is not None:
            client.close()
        running.port.stop_master(CLOSE_SECONDS)


def _put_signal_handlers_first() -> None:
    """Let Python's own signal handlers be the first again: Ray's and Mooncake's native ones pile up over them.

    Measured: a driver with a Mooncake client that gets SIGTERM ends in an abort, in the middle of its orderly exit.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        handler = signal.getsignal(number)
        if callable(handler):
            signal.signal(number, handler)


def _modules() -> tuple[Any, Any]:
    """The package, which re-exports ``init`` and ``close``, and the module they live in."""
    return importlib.import_module("transfer_queue"), importlib.import_module("transfer_queue.interface")


def _job_of_client() -> str:
    """Token of the job whose client this process has; empty without one."""
    client = _modules()[1]._TQ_CLIENT
    config = getattr(getattr(client, "storage_manager", None), "config", None)
    section = read_section(config)[0] if config is not None else None
    return section.job if section is not None else ""


def _guard_of(function: Any) -> Any:
    return getattr(function, _OURS, None)


def _stranger(function: Any) -> str:
    """The module of a function that is neither TransferQueue's nor ours; a wrapper keeps its own globals."""
    if _guard_of(function) is not None:
        return ""
    module = getattr(function, "__globals__", {}).get("__name__", type(function).__module__)
    return "" if module == "transfer_queue.interface" else str(module)
