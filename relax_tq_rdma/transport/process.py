"""Exact identity of a process, and children that run one module of this package.

A pid alone may have been given to a stranger meanwhile, and a process' age as psutil tells it follows the wall clock.
The kernel's start time in clock ticks since boot, with the boot id, does neither: a record on disk names one process
for ever.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from relax_tq_rdma.transport.hazards import LOG_LEVEL

_POLL_SECONDS = 0.02


class ProcessId(msgspec.Struct, frozen=True, kw_only=True):
    """One process of one boot of one pid namespace."""

    pid: int
    start_ticks: int
    boot: str

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """Identity of a running process; ``None`` when there is none (a zombie has ended)."""
        ticks = _start_ticks(pid)
        return None if ticks is None else cls(pid=pid, start_ticks=ticks, boot=boot_scope())

    @property
    def of_this_boot(self) -> bool:
        """False for a record of another boot, or of a container whose pids mean nothing here."""
        return self.boot == boot_scope()

    def alive(self) -> bool:
        return self.of_this_boot and _start_ticks(self.pid) == self.start_ticks

    def end(self, grace_seconds: float) -> bool:
        """SIGTERM, then SIGKILL after ``grace_seconds``; exactly this process. Returns whether it is gone."""
        for signum, seconds in ((signal.SIGTERM, grace_seconds), (signal.SIGKILL, 2.0)):
            if not self.alive():
                return True
            try:
                os.kill(self.pid, signum)
            except ProcessLookupError:
                return True
            if self.wait(seconds):
                return True
        return not self.alive()

    def wait(self, seconds: float) -> bool:
        """Wait for a process that need not be a child. Returns whether it is gone."""
        ends = time.monotonic() + seconds
        while self.alive():
            if time.monotonic() >= ends:
                return False
            time.sleep(_POLL_SECONDS)
        return True


def own_id() -> ProcessId:
    """Identity of the calling process."""
    found = ProcessId.of(os.getpid())
    if found is None:
        raise RuntimeError("/proc is not mounted: a process cannot be told from another one of the same pid")
    return found


def boot_scope() -> str:
    """What pids are relative to: this boot and this pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}:{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return "unknown"


def module_command(module: str, *arguments: str) -> list[str]:
    """Command line that runs a module of this package with the interpreter of this process."""
    return [sys.executable, "-m", module, *arguments]


def module_environment() -> dict[str, str]:
    """Environment in which a child imports what this process would import.

    Ray puts working folders and packages of a job on ``sys.path`` of its workers only, so the path itself is handed on.
    Run the child with ``cwd="/"``: ``-m`` puts the working folder first on the path. The native log is not quietened
    there: what it says explains a child that hangs or dies.
    """
    paths = [os.path.abspath(path) for path in sys.path if path]
    environment = {name: value for name, value in os.environ.items() if name != LOG_LEVEL}
    return {**environment, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def _start_ticks(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field is the command in brackets and may hold anything; state and start time are fields 3 and 22.
    fields = stat[stat.rindex(")") + 2 :].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])
