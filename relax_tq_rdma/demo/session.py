"""A job in a session of its own.

A shell's Ctrl-C, ``timeout`` and many a CI runner signal the whole process group. Ray's daemons are in the driver's
group and end at once on SIGTERM: the driver could then close nothing, and Ray aborts a process that has lost them. So
the job runs in a session of its own, and this process hands signals to its driver alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import psutil

from relax_tq_rdma.demo import signals
from relax_tq_rdma.demo.options import DRIVER
from relax_tq_rdma.errors import TransferError
from relax_tq_rdma.transport.hazards import LOG_LEVEL

STOP_SECONDS = 90.0
"""For the driver's clean-up; each of its steps has a deadline of its own."""

_MEMBERS_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1


def run_driver(argv: Sequence[str], *, capture: bool = False) -> tuple[int, bytes]:
    """Run ``demo argv`` in a session of its own and wait for it.

    Returns:
        Its exit code, and its standard output if ``capture``.

    Raises:
        KeyboardInterrupt: this process got Ctrl-C or SIGTERM; the driver has cleaned up and is gone.
        TransferError: the driver was killed.
    """
    command = [sys.executable, "-m", "relax_tq_rdma.cli", "demo", *argv, DRIVER]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE if capture else None,
        env={**_quiet_libraries(), **os.environ},
        start_new_session=True,
        preexec_fn=_die_with_parent,
    ) as driver:
        try:
            output, _ = driver.communicate()
        except KeyboardInterrupt:
            _stop(driver)
            raise
        finally:
            _end_session(driver.pid)
    if driver.returncode < 0:
        raise TransferError(f"the job's driver was ended by {signal.Signals(-driver.returncode).name}")
    return driver.returncode, output or b""


def _quiet_libraries() -> dict[str, str]:
    """Defaults that keep the libraries' chatter out of the output; the user's own settings win."""
    return {
        LOG_LEVEL: "ERROR",  # Mooncake reads it when its library is loaded, so it must be there from the start
        "TQ_NUM_THREADS": str(min(8, psutil.cpu_count(logical=False) or 1)),  # TransferQueue warns above that
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def _stop(driver: subprocess.Popen[bytes]) -> None:
    with signals.ignored():
        driver.send_signal(signal.SIGTERM if signals.was_terminated() else signal.SIGINT)
        try:
            driver.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            driver.kill()


def _end_session(session: int) -> None:
    """End what a driver that was killed could not: Ray's agents live on for a minute to report to a Ray that is gone.

    The session's id is the driver's pid, which is given to no other process while the session has members.
    """
    members = [process for process in psutil.process_iter() if _session_of(process.pid) == session]
    _, alive = psutil.wait_procs(members, timeout=_MEMBERS_SECONDS)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1


def _die_with_parent() -> None:
    """In the child: get SIGTERM, and so clean up, when this process is killed outright."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
