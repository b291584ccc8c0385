"""What the state machine is told (events) and what it asks for (effects): plain data, see ``machine.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from relax_tq_rdma.transport.port import Controller, Problem, Verification
from relax_tq_rdma.transport.report import Decision, Fallback

# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Begin:
    """The first event of a start."""


@dataclass(frozen=True)
class Probed:
    """``nodes`` is the list of nodes the reports are held against: node id to short name."""

    reports: Sequence[object]
    nodes: Mapping[str, str]


@dataclass(frozen=True)
class MasterStarted:
    """``master`` is ``host:port``."""

    master: str


@dataclass(frozen=True)
class PreflightDone:
    problems: Sequence[Problem]


@dataclass(frozen=True)
class ControllerSeen:
    controller: Controller


@dataclass(frozen=True)
class ControllerKilled:
    """Without a problem its name is free again."""

    problem: Problem | None


@dataclass(frozen=True)
class Initialised:
    """``conf`` is the config that TransferQueue stored."""

    conf: Any


@dataclass(frozen=True)
class Verified:
    verification: Verification


@dataclass(frozen=True)
class Failed:
    """The effect in progress failed, or there was no time left for it."""

    problem: Problem


@dataclass(frozen=True)
class Cleaned:
    problem: Problem | None


@dataclass(frozen=True)
class MasterStopped:
    pass


@dataclass(frozen=True)
class Interrupted:
    """The start is abandoned from outside: by a signal, or by an error nobody expected."""

    reason: str


@dataclass(frozen=True)
class Close:
    """The job ends in an orderly way."""


Event = (
    Begin
    | Probed
    | MasterStarted
    | PreflightDone
    | ControllerSeen
    | ControllerKilled
    | Initialised
    | Verified
    | Failed
    | Cleaned
    | MasterStopped
    | Interrupted
    | Close
)


# --- effects: ``answer`` is the event that reports success ----------------------------------------------------------


@dataclass(frozen=True)
class Probe:
    answer: ClassVar = Probed


@dataclass(frozen=True)
class StartMaster:
    answer: ClassVar = MasterStarted


@dataclass(frozen=True)
class Preflight:
    answer: ClassVar = PreflightDone
    decision: Decision
    master: str


@dataclass(frozen=True)
class LookAtController:
    answer: ClassVar = ControllerSeen


@dataclass(frozen=True)
class KillController:
    """Kill it, and wait until its name is free."""

    answer: ClassVar = ControllerKilled


@dataclass(frozen=True)
class Init:
    answer: ClassVar = Initialised
    decision: Decision
    master: str


@dataclass(frozen=True)
class Verify:
    answer: ClassVar = Verified
    decision: Decision
    conf: Any
    master: str


@dataclass(frozen=True)
class Clean:
    """Undo an ``Init`` that was begun or done."""

    answer: ClassVar = Cleaned


@dataclass(frozen=True)
class StopMaster:
    answer: ClassVar = MasterStopped


@dataclass(frozen=True)
class Record:
    """Tell the user and the metrics about one step down the ladder."""

    answer: ClassVar = None
    fallback: Fallback


Effect = (
    Probe | StartMaster | Preflight | LookAtController | KillController | Init | Verify | Clean | StopMaster | Record
)
