"""What came back from a run: JUnit counts and counted packets, and what they mean for the exit status."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

WIRE_LOG = "wire.jsonl"
"""One line for each transfer whose packets a test has counted: rung, bytes, packets."""


@dataclass(frozen=True)
class Results:
    """Numbers of one run. ``problem``: why it does not count as passed, beyond what pytest says; empty: it does."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    grown: int = 0
    packets: int = 0
    problem: str = ""

    def __str__(self) -> str:
        return (
            f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped; "
            f"RDMA counters grew in {self.grown} transfers, by {self.packets} packets"
        )


def read(share: Path, rc: int | None, *, wire: bool) -> Results:
    """Results of a pytest run in a guest.

    Args:
        share: the folder the guest wrote to.
        rc: exit status of pytest in the guest, ``None`` when it did not end.
        wire: at least one counted transfer is expected.
    """
    try:
        suite = ElementTree.parse(share / "junit.xml").getroot().find("testsuite")
        assert suite is not None
        number = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    except (OSError, ElementTree.ParseError, AssertionError):
        return Results(problem="pytest left no results in the guest")
    failed = number["failures"] + number["errors"]
    passed = number["tests"] - failed - number["skipped"]
    transfers = _transfers(share / WIRE_LOG)
    grown = [packets for packets in transfers if packets > 0]
    if rc is None:
        problem = "pytest did not end in the guest"
    elif failed:
        problem = f"{failed} tests failed"
    elif rc != 0:
        problem = f"pytest ended with exit status {rc}"
    elif not passed:
        problem = "no test ran"
    elif wire and not grown:
        problem = "no RDMA counter grew, so nothing was proven"
    else:
        problem = ""
    return Results(passed, failed, number["skipped"], len(grown), sum(grown), problem)


def _transfers(path: Path) -> list[int]:
    """Packets of each transfer; a last line that was cut short is none."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            found.append(int(json.loads(line)["packets"]))
    return found
