"""What the guests need of this machine, and whose command this is."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

TOOLS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "ip": "iproute2",
    "rdma": "iproute2",
    "ibv_devinfo": "ibverbs-utils",
    "depmod": "kmod",
    "modprobe": "kmod",
    "cpio": "cpio",
}
"""Command -> Debian package that brings it; those for the guest too, which sees the files of this machine."""

GUEST_MEMORY_MIB = 4096
_SYSTEM_FOLDERS = ("/usr/sbin", "/sbin")  # not on every user's PATH
_TURN_SECONDS = 3600.0
_APT_SECONDS = 900.0


class Unavailable(Exception):
    """The guests cannot run on this machine; the message says why and what to do."""


def find(tool: str) -> str | None:
    """Full path of a command."""
    return shutil.which(tool) or shutil.which(tool, path=os.pathsep.join(_SYSTEM_FOLDERS))


@contextlib.contextmanager
def turn(cache: Path, say: Callable[[str], None]) -> Iterator[None]:
    """One command at a time in a clone: image and results are in one folder.

    Args:
        cache: that folder; made when absent.
        say: takes one line of progress.

    Raises:
        Unavailable: the folder cannot be written to, or the other command does not end.
    """
    ends = time.monotonic() + _TURN_SECONDS
    with contextlib.ExitStack() as stack:
        try:
            cache.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((cache / "lock").open("w"))
        except OSError as exc:
            raise Unavailable(f"the guest's folder cannot be written to: {exc}") from None
        waiting = False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > ends:
                    raise Unavailable(f"another run has held {cache} for an hour: end it") from None
            if not waiting:
                say("another run uses the guests of this folder: waiting for its end")
                waiting = True
            time.sleep(0.5)
        yield


def require(nodes: int) -> None:
    """Make sure that this machine can run so many guests; installs Debian packages where that is allowed.

    Raises:
        Unavailable: it cannot.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise Unavailable(f"the guest is an x86-64 Linux, this machine is {platform.system()} {platform.machine()}")
    need = nodes * GUEST_MEMORY_MIB + 512
    if available_memory_mib() < need:
        raise Unavailable(
            f"{nodes} guest(s) need {need} MiB of memory, {available_memory_mib()} MiB are available: end something"
        )
    missing = missing_packages()
    if missing:
        install_packages(missing)
        missing = missing_packages()
    if missing:
        raise Unavailable(
            f"these Debian packages are not installed and could not be: run "
            f"'sudo apt-get update && sudo apt-get install -y {' '.join(missing)}'"
        )


def missing_packages() -> list[str]:
    """Debian packages of the commands that are not there."""
    return sorted({package for tool, package in TOOLS.items() if find(tool) is None} | _missing_providers())


def install_packages(packages: list[str]) -> bool:
    """As the set-up does it (``install_packages`` of scripts/lib.sh); whether it worked."""
    script = 'source "$1/scripts/lib.sh"; shift; install_packages "$@"'
    return _succeeds(["bash", "-c", script, "softroce", str(ROOT), *packages])


def update_package_lists() -> bool:
    """Fetch apt's package lists where that is allowed; whether it worked."""
    as_root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    return _succeeds([*as_root, "apt-get", "-q", "update"])


def available_memory_mib() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) // 1024
    return 0


def command_processes() -> list[tuple[int, int]]:
    """The processes above this one that belong to the same command: ``make`` and the project's scripts.

    Each as pid and start time: when one of them is gone, somebody has ended the command.
    """
    found = []
    pid = os.getppid()
    while pid > 1:
        try:
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
            stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            break
        name = os.path.basename(arguments[0])
        is_script = any("scripts/" in one or os.path.basename(one) == "test.sh" for one in arguments[:3])
        if name not in ("make", "gmake") and not is_script:
            break
        found.append((pid, int(stat[19])))
        pid = int(stat[1])
    return found


def is_running(process: tuple[int, int]) -> bool:
    """Whether a process of :func:`command_processes` is still that one, and no zombie."""
    try:
        stat = Path(f"/proc/{process[0]}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return stat[0] not in ("Z", "X") and int(stat[19]) == process[1]


def _succeeds(command: list[str]) -> bool:
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, timeout=_APT_SECONDS).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _missing_providers() -> set[str]:
    """The userspace driver of soft-RoCE comes as a plugin of libibverbs, which no command shows."""
    folders = [Path(base) for base in ("/usr/lib", "/usr/lib64", "/lib")]
    patterns = ("*/libibverbs/librxe-rdmav*.so", "libibverbs/librxe-rdmav*.so")
    there = any(any(folder.glob(pattern)) for folder in folders for pattern in patterns)
    return set() if there else {"ibverbs-providers"}
