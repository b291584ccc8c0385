"""The port between the pure state machine and the world (design §5). Tests drive the machine through a fake of it.

Every method takes ``limit``, the seconds it may take at most; none may block beyond it. A method that fails for a
reason the machine must act on returns :class:`Problem` values instead of raising.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Protocol

import msgspec

from relax_tq_rdma.transport.report import Decision, NodeReport


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Why a step failed, in words for the user; ``node`` and ``check`` when one is to blame."""

    reason: str
    node: str = ""
    check: str = ""


class Controller(Enum):
    """State of the named actor ``TransferQueueController`` in namespace ``transfer_queue`` (FC-12, FC-13)."""

    ABSENT = "absent"
    UNFINISHED = "unfinished"  # alive, but its config never came within the grace time
    DEAD = "dead"  # the name is still found, calls fail
    FOREIGN = "foreign"  # healthy, and not of this job: never touched
    OURS = "ours"  # healthy, carries this job's token


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the byte round trips. ``wire``: ``zmq``, ``local`` (all peers on one host), ``tcp`` or ``rdma``."""

    passed: int
    total: int
    wire: str
    problems: tuple[Problem, ...] = ()


class Port(Protocol):
    """Effects of the start path."""

    def nodes(self) -> dict[str, str]:
        """Alive nodes of the job: Ray node id to short name. A CPU-only head counts."""
        ...

    def probe(self, limit: float) -> Sequence[NodeReport]:
        """One report per node that answered in time; nodes that did not are simply not in the result."""
        ...

    def controller(self, limit: float) -> Controller:
        """Look at the named controller; waits at most ``limit`` for an unfinished one to finish."""
        ...

    def kill_controller(self, limit: float) -> Problem | None:
        """Kill the unfinished or dead controller and wait until its name is free."""
        ...

    def start_master(self, limit: float) -> str | Problem:
        """Start the job-owned master; returns ``host:port``."""
        ...

    def stop_master(self, limit: float) -> None:
        """Stop exactly the master this job started; nothing when there is none."""
        ...

    def preflight(self, decision: Decision, master: str, limit: float) -> Sequence[Problem]:
        """On every node: reach the master with a plain socket, then set up a native client in a killable process."""
        ...

    def init(self, conf: Any, limit: float) -> Any | Problem:
        """The real ``transfer_queue.init``; returns the stored config."""
        ...

    def verify(self, decision: Decision, conf: Any, master: str, limit: float) -> Verification:
        """Stored config, real manager class and protocol, byte round trips between nodes both ways, wire proof."""
        ...

    def clean(self, limit: float) -> Problem | None:
        """Undo ``init``: client, segment, storage actors, controller; confirmed gone before it returns."""
        ...
