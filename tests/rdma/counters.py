"""Packets as the RDMA devices of this node have counted them."""

from __future__ import annotations

import json
import os
from pathlib import Path

CLASS = Path("/sys/class/infiniband")
_COUNTERS = ("hw_counters/rcvd_pkts", "counters/port_rcv_packets")


def packets() -> int:
    """Packets received on all ports of all devices; soft-RoCE and hardware name the counter differently."""
    total = 0
    for port in sorted(CLASS.glob("*/ports/*")) if CLASS.is_dir() else ():
        counter = next((path for name in _COUNTERS if (path := port / name).exists()), None)
        total += int(counter.read_text()) if counter else 0
    return total


def record(rung: str, nbytes: int, grown: int) -> None:
    """Leave a line for the summary of the run: what was moved on which rung, and by how much the counters grew."""
    folder = os.environ.get("RTQ_RDMA_RESULTS")
    if folder:
        with open(Path(folder) / "wire.jsonl", "a", encoding="ascii") as log:
            log.write(json.dumps({"rung": rung, "bytes": nbytes, "packets": grown}) + "\n")
