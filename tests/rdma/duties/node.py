"""A process's own figures, and its node: devices, processes, commands."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path

from tests.rdma.counters import packets


def received_packets() -> int:
    """By all RDMA devices of this node, since they are there."""
    return packets()


def memory() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def shell(command: str, limit: float = 30.0) -> str:
    """Run a command on this node (tests of broken links and devices); returns its output.

    Raises:
        RuntimeError: it failed.
    """
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=limit)
    if done.returncode:
        raise RuntimeError(f"'{command}' failed: {done.stderr.strip()}")
    return done.stdout


def processes(words: list[str]) -> list[str]:
    """Command lines of this node's processes that hold one of the words."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                if any(word in line for word in words):
                    found.append(line)
    return found


def memory_regions() -> int:
    """Memory regions registered with the RDMA devices of this node, as the kernel counts them."""
    shown = subprocess.run(
        ["rdma", "-j", "resource", "show"], capture_output=True, text=True, timeout=20, check=True
    ).stdout
    return sum(int(device.get("mr", 0)) for device in json.loads(shown or "[]"))
