"""Entry and exit of the plugin in a process."""

from __future__ import annotations

import argparse
import logging
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relax_tq_rdma import compat
from relax_tq_rdma.compat import HostFacts
from relax_tq_rdma.errors import StartError, UsageError
from relax_tq_rdma.settings import Settings
from relax_tq_rdma.summary import PREFIX, UNTOUCHED, start_line
from relax_tq_rdma.transport.hazards import quiet_native_log

if TYPE_CHECKING:
    from relax_tq_rdma.seams.on_import import AfterImport
    from relax_tq_rdma.seams.tq_init import TqInit
    from relax_tq_rdma.seams.tq_registry import TqRegistry
    from relax_tq_rdma.transport.report import Decision

logger = logging.getLogger(__name__)


@dataclass
class _Installed:
    settings: Settings | None
    waiting: AfterImport | None = None
    init: TqInit | None = None
    registry: TqRegistry | None = None


_lock = threading.RLock()
_installed: _Installed | None = None


def install(settings: Settings | argparse.Namespace | None = None, *, host: HostFacts | None = None) -> None:
    """Make the plugin ready in this process, before its first ``transfer_queue.init``. Repeating it changes nothing.

    Args:
        settings: in the job's driver what the user asked for (or the host's parsed arguments). In a worker ``None``:
            the config that ``transfer_queue.init`` is given then says whether its job uses the plugin, and a process
            that never imports TransferQueue pays nothing.
        host: facts about the host for the compatibility rules.

    With settings that switch nothing on, nothing is touched: only the start line is printed.

    Raises:
        UsageError: a combination of flags that cannot work, or other settings than those installed before.
        SeamError: the installed TransferQueue does not fit.
    """
    global _installed
    if isinstance(settings, argparse.Namespace):
        settings = Settings.from_args(settings)
    if settings is not None and not isinstance(settings, Settings):
        raise UsageError(
            f"relax_tq_rdma.install takes Settings or parsed arguments, not {type(settings).__name__}: "
            "use Settings.from_flags([...])"
        )
    with _lock:
        if _installed is not None:
            if settings is None or settings == _installed.settings:
                return
            if _installed.settings is not None:
                raise UsageError(
                    "relax_tq_rdma.install was called before with other settings: one process belongs to one job; "
                    "call relax_tq_rdma.uninstall() first"
                )
            uninstall()  # it was made ready as a worker, and is a driver
        if settings is None:
            _installed = _ready_as_worker()
            return
        for finding in compat.check(settings, host):
            word = "WARNING" if finding.verdict == "warn" else "NOTE"
            print(f"{PREFIX} {word} {finding.text}", file=sys.stderr, flush=True)
        if settings.touches_nothing:
            print(start_line(settings), file=sys.stderr, flush=True)
            _installed = _Installed(settings)
        else:
            _installed = _ready_as_driver(settings)


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
    if installed is None or installed.settings is None:
        return ""
    if installed.settings.touches_nothing:
        return start_line(installed.settings)
    return installed.init.start_line if installed.init is not None else ""


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
        for seam in (_installed.init, _installed.registry):
            if seam is not None:
                seam.remove()
        _installed = None


def _ready_as_driver(settings: Settings) -> _Installed:
    if settings.wants_mooncake:
        quiet_native_log()
    from relax_tq_rdma.seams.base import require
    from relax_tq_rdma.seams.tq_init import TqInit
    from relax_tq_rdma.seams.tq_registry import TqRegistry

    init, registry = TqInit(settings), TqRegistry()
    require((init, registry))
    registry.apply()
    init.apply()
    return _Installed(settings, init=init, registry=registry)


def _ready_as_worker() -> _Installed:
    quiet_native_log()
    installed = _Installed(None)
    if "transfer_queue" in sys.modules:
        _take_seams_of_worker(installed)
    else:
        from relax_tq_rdma.seams.on_import import AfterImport

        installed.waiting = AfterImport("transfer_queue", lambda: _take_seams_of_worker(installed))
    return installed


def _take_seams_of_worker(installed: _Installed) -> None:
    """Never raises: whether this job needs the plugin at all is not known yet. If it does, joining it will fail."""
    from relax_tq_rdma.seams.tq_init import TqInit
    from relax_tq_rdma.seams.tq_registry import TqRegistry

    registry = TqRegistry()
    report = registry.check()
    init = TqInit(blocked="" if report.ok else report.text)
    if not init.check().ok:
        logger.warning("%s", init.check().text)
        return
    init.apply()
    installed.init = init
    if report.ok:
        registry.apply()
        installed.registry = registry
    else:
        logger.warning("%s", report.text)
