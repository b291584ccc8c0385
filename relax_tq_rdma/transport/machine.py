"""The start of a job as a pure state machine (design §5; RFC §4.2.2, §4.8, F10; FC-12, FC-13, FC-19).

:func:`step` takes a state and what just happened, and returns the next state and what to do now. It never waits, reads
no clock and touches nothing; ``start.py`` performs the effects. What it guarantees, whatever fails:

- ``Init`` is asked for only right after a look that found no controller; any later ``Init`` also only after a kill.
- A healthy controller of another job ends the start: it is neither killed nor used.
- A failure leads down the ladder or to ``FAILED``, and only after the failed attempt is undone.
- A master is started only for a Mooncake rung of a job that owns it, and is stopped when the attempt fails.
- From ``READY`` the only way leads to ``CLOSED``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import msgspec

from relax_tq_rdma.settings import Settings
from relax_tq_rdma.transport import events as ev
from relax_tq_rdma.transport.decision import Refusal, decide, next_rung
from relax_tq_rdma.transport.port import Controller, Problem, Verification
from relax_tq_rdma.transport.report import Decision


class Phase(Enum):
    CONFIGURED = "configured"
    PROBING = "probing"
    DECIDED = "decided"  # a rung is chosen; its master and its native set-up are tried
    REAPING = "reaping"  # the named controller is looked at, and removed if it is a leftover
    INITIALISING = "initialising"
    VERIFYING = "verifying"
    READY = "ready"
    CLEANING = "cleaning"  # the failed attempt is undone
    FAILED = "failed"
    CLOSED = "closed"


@dataclass(frozen=True)
class State:
    """All the machine knows. ``attempt`` counts the rungs tried, from 1; each has a time budget of its own."""

    settings: Settings
    phase: Phase = Phase.CONFIGURED
    pending: ev.Effect | None = None  # the effect whose answer comes next
    attempt: int = 0
    decision: Decision | None = None
    master: str = ""  # host:port, once known
    conf: Any = None  # the config TransferQueue stored
    verification: Verification | None = None
    master_open: bool = False  # StartMaster was asked for, and StopMaster is not yet done
    init_open: bool = False  # Init was asked for, and Clean is not yet done
    init_before: bool = False  # an earlier attempt got as far as Init
    killed: bool = False  # the controller was killed in this attempt
    then: Decision | str = ""  # where CLEANING leads: the next rung, or FAILED with this message
    message: str = ""  # why the start failed, or what could not be closed


Step = tuple[State, tuple[ev.Effect, ...]]

WIRES = {"zmq": ("zmq", "local"), "tcp": ("tcp", "local"), "rdma": ("rdma", "local")}
"""What verification may find on the wire, by decided protocol; ``local``: all peers are on one host."""

FOREIGN = (
    "a TransferQueueController that is not this job's runs on this Ray cluster (actor 'TransferQueueController', "
    "namespace 'transfer_queue'): it is left alone and not used; end its job, or start this one on its own Ray cluster"
)


def step(state: State, event: ev.Event) -> Step:
    """One transition.

    Returns:
        The next state, and the effects to perform in order; only the last of them has an answer.

    Raises:
        ValueError: the event cannot happen now, which is a mistake of the caller; nothing has changed.
    """
    transition = _TRANSITIONS.get((state.phase, type(event)))
    if transition is None or (type(event) in _ANSWERS and type(event) is not getattr(state.pending, "answer", None)):
        raise ValueError(f"{type(event).__name__} cannot happen in phase {state.phase.value}")
    after, effects = transition(state, event)
    return replace(after, pending=effects[-1] if effects and effects[-1].answer else None), effects


# --- forward ----------------------------------------------------------------------------------------------------------


def _begin(state: State, event: ev.Begin) -> Step:
    state = replace(state, attempt=1)
    if state.settings.wants_mooncake:
        return replace(state, phase=Phase.PROBING), (ev.Probe(),)
    return _decided(state, decide(state.settings, (), {}))


def _probed(state: State, event: ev.Probed) -> Step:
    return _decided(state, decide(state.settings, event.reports, event.nodes))


def _decided(state: State, outcome: Decision | Refusal) -> Step:
    records = tuple(ev.Record(fallback) for fallback in outcome.fallbacks)
    after, effects = _give_up(state, outcome.message) if isinstance(outcome, Refusal) else _attempt(state, outcome)
    return after, (*records, *effects)


def _attempt(state: State, decision: Decision) -> Step:
    """Begin at a rung. Nothing of an earlier attempt is left at this point."""
    state = replace(state, phase=Phase.DECIDED, decision=decision, master="", conf=None, killed=False, then="")
    if decision.backend == "SimpleStorage":
        return _look(state)
    if state.settings.mooncake_auto_init == "job-owned":
        return replace(state, master_open=True), (ev.StartMaster(),)
    return _master_started(state, ev.MasterStarted(state.settings.mooncake_master_address))


def _master_started(state: State, event: ev.MasterStarted) -> Step:
    return replace(state, master=event.master), (ev.Preflight(_rung(state), event.master),)


def _preflight_done(state: State, event: ev.PreflightDone) -> Step:
    return _step_down(state, _merge(event.problems), "preflight") if event.problems else _look(state)


def _look(state: State) -> Step:
    """As late as possible, so that hardly any time is left for a controller to appear before ``Init``."""
    return replace(state, phase=Phase.REAPING), (ev.LookAtController(),)


def _controller_seen(state: State, event: ev.ControllerSeen) -> Step:
    if event.controller is Controller.FOREIGN:
        return _give_up(state, FOREIGN)
    if event.controller is Controller.ABSENT and (state.killed or not state.init_before):
        opened = replace(state, phase=Phase.INITIALISING, init_open=True, init_before=True)
        return opened, (ev.Init(_rung(state), state.master),)
    if state.killed:
        return _give_up(state, _not_removed(f"it was killed and is still {event.controller.value}"))
    return replace(state, killed=True), (ev.KillController(),)


def _controller_killed(state: State, event: ev.ControllerKilled) -> Step:
    return _give_up(state, _not_removed(event.problem.reason)) if event.problem else _look(state)


def _initialised(state: State, event: ev.Initialised) -> Step:
    state = replace(state, conf=event.conf)
    if not state.settings.wants_mooncake:  # SimpleStorage as asked for: as without the plugin, no test bytes are moved
        return replace(state, phase=Phase.READY), ()
    return replace(state, phase=Phase.VERIFYING), (ev.Verify(_rung(state), event.conf, state.master),)


def _verified(state: State, event: ev.Verified) -> Step:
    result, protocol = event.verification, _rung(state).protocol
    if result.problems:
        return _step_down(state, _merge(result.problems), "verify")
    if not 0 < result.passed == result.total:
        return _step_down(state, Problem(reason=f"{result.passed} of {result.total} round trips passed"), "verify")
    if result.wire not in WIRES[protocol]:
        return _step_down(state, Problem(reason=f"bytes moved over {result.wire}, not over {protocol}"), "verify")
    return replace(state, phase=Phase.READY, verification=result), ()


# --- failure ----------------------------------------------------------------------------------------------------------


def _failed(state: State, event: ev.Failed) -> Step:
    if isinstance(state.pending, ev.StartMaster):
        return _step_down(state, msgspec.structs.replace(event.problem, check="master"), "master")
    default = {Phase.DECIDED: "preflight", Phase.REAPING: "controller", Phase.INITIALISING: "init"}
    return _step_down(state, event.problem, default.get(state.phase, "verify"))


def _step_down(state: State, problem: Problem, check: str) -> Step:
    """``check`` is the step that failed; it names the record unless the problem names a check itself."""
    problem = msgspec.structs.replace(problem, check=problem.check or check)
    outcome = next_rung(_rung(state), state.settings, problem)
    return _undo(
        replace(state, phase=Phase.CLEANING, then=outcome.message if isinstance(outcome, Refusal) else outcome)
    )


def _give_up(state: State, message: str) -> Step:
    return _undo(replace(state, phase=Phase.CLEANING, then=message))


def _interrupted(state: State, event: ev.Interrupted) -> Step:
    return _give_up(state, event.reason)


def _close(state: State, event: ev.Close) -> Step:
    return _undo(replace(state, phase=Phase.CLOSED))


def _undo(state: State) -> Step:
    """Undo what is open, newest first; then stay closed, go to the next rung, or end."""
    if state.init_open:
        return state, (ev.Clean(),)
    if state.master_open:
        return state, (ev.StopMaster(),)
    if isinstance(state.then, str):
        phase = Phase.CLOSED if state.phase is Phase.CLOSED else Phase.FAILED
        return replace(state, phase=phase, message=state.then, then=""), ()
    after, effects = _attempt(replace(state, attempt=state.attempt + 1), state.then)
    return after, (ev.Record(state.then.fallbacks[-1]), *effects)


def _cleaned(state: State, event: ev.Cleaned) -> Step:
    """An attempt that cannot be undone ends the start: two half-alive data planes are worse than none."""
    if event.problem:
        why = state.then if isinstance(state.then, str) else state.then.fallbacks[-1].reason
        left = f"what it left behind could not be removed: {event.problem.reason}"
        state = replace(state, then=f"{why}; {left}" if why else left)
    return _undo(replace(state, init_open=False))


def _master_stopped(state: State, event: ev.MasterStopped) -> Step:
    return _undo(replace(state, master_open=False))


def _rung(state: State) -> Decision:
    assert state.decision is not None, "every phase after PROBING has a decision"
    return state.decision


def _merge(problems: Sequence[Problem]) -> Problem:
    first, more = problems[0], len(problems) - 1
    return msgspec.structs.replace(first, reason=f"{first.reason} (and {more} more)") if more else first


def _not_removed(reason: str) -> str:
    return (
        f"a leftover TransferQueueController could not be removed: {reason}; kill the actor 'TransferQueueController' "
        "in Ray namespace 'transfer_queue', or restart Ray"
    )


_TRANSITIONS: dict[tuple[Phase, type[ev.Event]], Callable[[State, Any], Step]] = {
    (Phase.CONFIGURED, ev.Begin): _begin,
    (Phase.PROBING, ev.Probed): _probed,
    (Phase.DECIDED, ev.MasterStarted): _master_started,
    (Phase.DECIDED, ev.PreflightDone): _preflight_done,
    (Phase.DECIDED, ev.Failed): _failed,
    (Phase.REAPING, ev.ControllerSeen): _controller_seen,
    (Phase.REAPING, ev.ControllerKilled): _controller_killed,
    (Phase.REAPING, ev.Failed): _failed,
    (Phase.INITIALISING, ev.Initialised): _initialised,
    (Phase.INITIALISING, ev.Failed): _failed,
    (Phase.VERIFYING, ev.Verified): _verified,
    (Phase.VERIFYING, ev.Failed): _failed,
    (Phase.CLEANING, ev.Cleaned): _cleaned,
    (Phase.CLEANING, ev.MasterStopped): _master_stopped,
    (Phase.READY, ev.Close): _close,
    (Phase.CLOSED, ev.Cleaned): _cleaned,
    (Phase.CLOSED, ev.MasterStopped): _master_stopped,
    **{(phase, ev.Interrupted): _interrupted for phase in Phase if phase.value not in ("ready", "failed", "closed")},
}
"""Every transition there is. What is not here cannot happen."""

_ANSWERS = {effect.answer for effect in ev.Effect.__args__ if effect.answer}
"""Events that answer an effect: they are only taken while exactly that effect is pending."""
