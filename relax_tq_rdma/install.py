"""Entry and exit of the plugin in a process."""

from __future__ import annotations

import argparse
import logging
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from relax_tq_rdma import compat, env
from relax_tq_rdma.compat import HostFacts
from relax_tq_rdma.errors import StartError, UsageError
from relax_tq_rdma.say import say
from relax_tq_rdma.settings import Settings
from relax_tq_rdma.summary import PREFIX, UNTOUCHED, start_line
from relax_tq_rdma.transport.hazards import quiet_native_log

if TYPE_CHECKING:
    from relax_tq_rdma.seams.on_import import AfterImport
    from relax_tq_rdma.seams.taken import State, TakenSeams
    from relax_tq_rdma.seams.tq_init import TqInit
    from relax_tq_rdma.transport.report import Decision

logger = logging.getLogger(__name__)


@dataclass
class _Installed:
    settings: Settings | None
    waiting: AfterImport | None = None
    init: TqInit | None = None
    seams: TakenSeams | None = None
    line: str = ""
    """The start line of a driver that starts nothing."""


_lock = threading.RLock()
_installed: _Installed | None = None


def install(settings: Settings | argparse.Namespace | None = None, *, host: HostFacts | None = None) -> None:
    """Make the plugin ready in this process, before its first ``transfer_queue.init``. Repeating it changes nothing.

    Args:
        settings: in the job's driver what the user asked for. With the parsed arguments of Relax, before its ``main``
            and before ``ray.init``: the whole job is made ready, its workers and its controller included. In a worker
            ``None``: the config that ``transfer_queue.init`` is given then says whether its job uses the plugin, and a
            process that never imports TransferQueue pays nothing.
        host: facts about the host for the compatibility rules; by default what its arguments and its code say.

    With settings that switch nothing on, or that have no effect in this host, nothing is touched: only the start line
    is printed, and what has no effect.

    Raises:
        UsageError: a combination of flags that cannot work, an ``RTQ_*`` variable whose value is none, or other
            settings than those installed before.
        SeamError: the installed TransferQueue, Ray or Relax does not fit.
    """
    global _installed
    args = settings if isinstance(settings, argparse.Namespace) else None
    if args is not None:
        settings = Settings.from_args(args)
    if settings is not None and not isinstance(settings, Settings):
        raise UsageError(
            f"relax_tq_rdma.install takes Settings or parsed arguments, not {type(settings).__name__}: "
            "use Settings.from_flags([...])"
        )
    with _lock:
        if settings is None:
            if _installed is None:
                _installed = _ready_as_worker()
            return
        if args is not None and host is None:
            host = _look_at_host(args, settings)
        effective = compat.in_force(settings, host or HostFacts())
        if _installed is not None:
            if effective == _installed.settings:
                _keep_settings(args, effective)  # these may be parsed anew
                return
            if _installed.settings is not None:
                raise UsageError(
                    "relax_tq_rdma.install was called before with other settings: one process belongs to one job; "
                    "call relax_tq_rdma.uninstall() first"
                )
            uninstall()  # it was made ready as a worker, and is a driver
        for finding in compat.check(settings, host):
            word = "WARNING" if finding.verdict == "warn" else "NOTE"
            say(f"{PREFIX} {word} {finding.text}")
        _keep_settings(args, effective)
        if effective.touches_nothing:
            # What a job with a data plane of the host's runs on is the host's to say.
            line = "" if host is not None and host.own_data_plane else start_line(effective, host=host)
            if line:
                say(line)
            _installed = _Installed(effective, line=line)
        else:
            _installed = _ready_as_driver(effective, host, of_host=args is not None)


def is_ready() -> bool:
    """Whether :func:`install` was called in this process."""
    return _installed is not None


def taken_seams() -> Mapping[str, State]:
    """The seams of this process by short name (``T2``, ``R3``) with their state; empty without :func:`install`."""
    installed = _installed
    return installed.seams.states if installed is not None and installed.seams is not None else {}


def current_decision() -> Decision | None:
    """What the job of this process runs on, once ``transfer_queue.init`` has returned: the same in driver and workers.

    ``None`` before that, after ``transfer_queue.close``, and in a worker whose job does not use the plugin.
    """
    installed = _installed
    if installed is None:
        return None
    if installed.settings is not None and installed.settings.touches_nothing:
        return UNTOUCHED
    return installed.init.decision if installed.init is not None else None


def current_start_line() -> str:
    """The start line (``docs/reference/start-line.md``) as this driver printed it; empty before, and in a worker."""
    installed = _installed
    if installed is None:
        return ""
    return installed.init.start_line if installed.init is not None else installed.line


def uninstall() -> None:
    """Undo :func:`install`: every registry and function is as it was. Without an install, nothing happens.

    Raises:
        StartError: this process has a data plane that was not closed.
    """
    global _installed
    with _lock:
        if _installed is None:
            return
        if _installed.init is not None and _installed.init.is_running:
            raise StartError("the data plane of this process is running: call transfer_queue.close() first")
        if _installed.waiting is not None:
            _installed.waiting.cancel()
        if _installed.seams is not None:
            _installed.seams.give_back()
        _installed = None


def _look_at_host(args: argparse.Namespace, settings: Settings) -> HostFacts:
    from relax_tq_rdma.seams.host_code import has_host
    from relax_tq_rdma.seams.relax_args import host_facts

    facts = host_facts(args)
    if settings == Settings() or not has_host():  # flags that switch nothing on may be the host's own
        return facts
    from relax_tq_rdma.seams.relax_controller import RelaxController
    from relax_tq_rdma.seams.relax_rollout import RelaxRollout

    return replace(
        facts,
        own_data_plane=bool(RelaxController().check().aside),
        own_group_processor=bool(RelaxRollout().check().aside),
    )


def _keep_settings(args: argparse.Namespace | None, effective: Settings) -> None:
    if args is not None:
        from relax_tq_rdma.seams.relax_args import keep_settings

        keep_settings(args, effective)


def _ready_as_driver(settings: Settings, host: HostFacts | None, *, of_host: bool) -> _Installed:
    env.check()
    if settings.wants_mooncake:
        quiet_native_log()
    from relax_tq_rdma.seams import driver
    from relax_tq_rdma.seams.host_code import has_host
    from relax_tq_rdma.seams.taken import TakenSeams

    seams = TakenSeams()
    try:
        init = driver.take(seams, settings, host, of_host=of_host and has_host())
    except BaseException:
        seams.give_back()
        raise
    return _Installed(settings, init=init, seams=seams)


def _ready_as_worker() -> _Installed:
    quiet_native_log()
    from relax_tq_rdma.seams.on_import import AfterImport
    from relax_tq_rdma.seams.relax_consumer import RelaxConsumer
    from relax_tq_rdma.seams.relax_rollout import RelaxRollout
    from relax_tq_rdma.seams.taken import TakenSeams

    seams = TakenSeams()
    installed = _Installed(None, seams=seams)
    if "transfer_queue" in sys.modules:
        _take_transfer_queue(installed, seams)
    else:
        installed.waiting = AfterImport("transfer_queue", lambda: _take_transfer_queue(installed, seams))
    # Whether there is a host is not asked: at the start of a worker its path may not be complete yet.
    seams.take_when_imported(RelaxRollout())
    seams.take_when_imported(RelaxConsumer())
    return installed


def _take_transfer_queue(installed: _Installed, seams: TakenSeams) -> None:
    """Never raises: whether this job needs the plugin at all is not known yet. If it does, joining it will fail."""
    from relax_tq_rdma.seams.tq_init import TqInit
    from relax_tq_rdma.seams.tq_registry import TqRegistry

    if installed.waiting is not None:
        installed.waiting.cancel()
    registry = TqRegistry()
    report = registry.check()
    init = TqInit(blocked="" if report.ok else report.text)
    if not init.check().ok:
        seams.failed(init)
        logger.warning("%s", init.check().text)
        return
    seams.take(init)
    installed.init = init
    if report.ok:
        seams.take(registry)
    else:
        seams.failed(registry)
        logger.warning("%s", report.text)
