"""The state machine holds its promises whatever fails, in whatever order (design §5; RFC §4.8, F10; FC-12, FC-13)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from node_reports import good, names

from relax_tq_rdma.settings import Settings
from relax_tq_rdma.transport import events as ev
from relax_tq_rdma.transport.machine import FOREIGN, Phase, State, step
from relax_tq_rdma.transport.port import Controller, Problem, Verification
from relax_tq_rdma.transport.report import CHECKS

OWNED = Settings(storage_backend="mooncake", transport="rdma", rdma_mode="auto", mooncake_auto_init="job-owned")
GIVEN = msgspec.structs.replace(OWNED, mooncake_auto_init="never", mooncake_master_address="10.0.0.9:50051")
ENDS = (Phase.READY, Phase.FAILED, Phase.CLOSED)
RUNGS = ["MooncakeStore/rdma+gdr", "MooncakeStore/rdma", "MooncakeStore/tcp", "SimpleStorage/zmq"]

PROBED = ev.Probed([good(0)], names(1))
NO_MOONCAKE = ev.Probed([good(0, {"mooncake": "not installed"})], names(1))
BROKEN = ev.Failed(Problem(reason="broken"))
PASSED = ev.Verified(Verification(passed=2, total=2, wire="local"))
ABSENT, UNFINISHED, DEAD, STRANGER, OURS = (ev.ControllerSeen(Controller(c)) for c in Controller)
KILLED, CLEANED, STOPPED = ev.ControllerKilled(None), ev.Cleaned(None), ev.MasterStopped()
STARTED, NO_PROBLEM, INIT_DONE = ev.MasterStarted("10.0.0.1:4711"), ev.PreflightDone([]), ev.Initialised({"conf": 1})


def play(chosen: Settings, *events: ev.Event) -> tuple[State, list[str]]:
    """The state after ``events``, and the effects asked for on the way; records as ``from>to@check``."""
    state, trace = State(chosen), list[str]()
    for event in (ev.Begin(), *events):
        state, effects = step(state, event)
        for effect in effects:
            fallback = effect.fallback if isinstance(effect, ev.Record) else None
            name = f"{fallback.from_}>{fallback.to}@{fallback.check}" if fallback else type(effect).__name__
            trace.append(name)
    return state, trace


# --- the ways through, one by one -------------------------------------------------------------------------------------


def test_simple_storage_takes_the_short_way() -> None:
    state, trace = play(Settings(accounting="summary"), ABSENT, INIT_DONE)
    assert (state.phase, trace) == (Phase.READY, ["LookAtController", "Init"])
    assert state.conf == {"conf": 1}


def test_mooncake_takes_the_whole_way() -> None:
    state, trace = play(OWNED, PROBED, STARTED, NO_PROBLEM, ABSENT, INIT_DONE, PASSED)
    assert trace == ["Probe", "StartMaster", "Preflight", "LookAtController", "Init", "Verify"]
    assert (state.phase, state.master) == (Phase.READY, "10.0.0.1:4711")


def test_a_given_master_is_neither_started_nor_stopped() -> None:
    state, trace = play(GIVEN, PROBED, BROKEN, BROKEN, ABSENT, BROKEN, CLEANED)
    assert (state.phase, state.decision.rung if state.decision else "") == (Phase.FAILED, "SimpleStorage/zmq")
    assert not {"StartMaster", "StopMaster"} & set(trace)
    state, _ = play(GIVEN, PROBED)
    assert isinstance(state.pending, ev.Preflight)
    assert state.pending.master == "10.0.0.9:50051"


def test_probe_that_rules_mooncake_out_starts_no_master() -> None:
    state, trace = play(OWNED, NO_MOONCAKE, ABSENT, INIT_DONE, PASSED)
    assert state.phase is Phase.READY
    assert trace == ["Probe", "MooncakeStore/rdma>SimpleStorage/zmq@mooncake", "LookAtController", "Init", "Verify"]


@pytest.mark.parametrize(
    ("failure", "check", "undone"),
    [
        ([BROKEN], "master", ["StopMaster"]),
        ([STARTED, ev.PreflightDone([Problem(reason="no", check="reachability")])], "reachability", ["StopMaster"]),
        ([STARTED, BROKEN], "preflight", ["StopMaster"]),
        ([STARTED, NO_PROBLEM, BROKEN], "controller", ["StopMaster"]),
        ([STARTED, NO_PROBLEM, ABSENT, BROKEN], "init", ["Clean", "StopMaster"]),
        ([STARTED, NO_PROBLEM, ABSENT, INIT_DONE, BROKEN], "verify", ["Clean", "StopMaster"]),
    ],
)
def test_each_failure_is_undone_then_recorded_then_followed_by_a_lower_rung(
    failure: list[ev.Event], check: str, undone: list[str]
) -> None:
    answers = {"Clean": CLEANED, "StopMaster": STOPPED}
    before, _ = play(OWNED, PROBED, *failure)
    state, trace = play(OWNED, PROBED, *failure, *(answers[name] for name in undone))
    lower = "SimpleStorage/zmq" if check == "master" else "MooncakeStore/tcp"
    following = "LookAtController" if check == "master" else "StartMaster"
    assert trace[-len(undone) - 2 :] == [*undone, f"MooncakeStore/rdma>{lower}@{check}", following]
    assert (before.phase, before.attempt) == (Phase.CLEANING, 1)
    assert state.attempt == 2
    assert not state.init_open


@pytest.mark.parametrize(
    ("verification", "reason"),
    [
        (Verification(passed=3, total=4, wire="rdma"), "3 of 4 round trips passed"),
        (Verification(passed=0, total=0, wire="rdma"), "0 of 0 round trips passed"),
        (Verification(passed=4, total=4, wire="tcp"), "bytes moved over tcp, not over rdma"),
        (Verification(passed=4, total=4, wire="rdma", problems=(Problem(reason="class is X"),)), "class is X"),
        (
            Verification(passed=1, total=4, wire="rdma", problems=(Problem(reason="a"), Problem(reason="b"))),
            "a (and 1 more)",
        ),
    ],
)
def test_a_verification_with_any_flaw_is_a_failure(verification: Verification, reason: str) -> None:
    state, _ = play(OWNED, PROBED, STARTED, NO_PROBLEM, ABSENT, INIT_DONE, ev.Verified(verification))
    assert state.phase is Phase.CLEANING
    assert not isinstance(state.then, str)
    assert state.then.fallbacks[-1].reason == reason


@pytest.mark.parametrize("leftover", [UNFINISHED, DEAD, OURS])
def test_a_leftover_controller_is_killed_and_looked_at_again_before_init(leftover: ev.Event) -> None:
    _, trace = play(Settings(accounting="summary"), leftover, KILLED, ABSENT)
    assert trace == ["LookAtController", "KillController", "LookAtController", "Init"]


@pytest.mark.parametrize("answers", [(UNFINISHED, KILLED, DEAD), (DEAD, ev.ControllerKilled(Problem(reason="stuck")))])
def test_a_controller_that_does_not_go_away_ends_the_start(answers: tuple[ev.Event, ...]) -> None:
    state, trace = play(Settings(accounting="summary"), *answers)
    assert state.phase is Phase.FAILED
    assert "could not be removed" in state.message
    assert "Init" not in trace


def test_a_healthy_controller_of_another_job_ends_the_start_and_is_left_alone() -> None:
    state, trace = play(OWNED, PROBED, STARTED, NO_PROBLEM, STRANGER, STOPPED)
    assert (state.phase, state.message) == (Phase.FAILED, FOREIGN)
    assert trace[-2:] == ["LookAtController", "StopMaster"]


def test_failing_init_the_kill_precedes_the_retry_even_if_nothing_is_seen() -> None:
    events = [
        PROBED,
        STARTED,
        NO_PROBLEM,
        ABSENT,
        BROKEN,
        CLEANED,
        STOPPED,
        STARTED,
        NO_PROBLEM,
        ABSENT,
        KILLED,
        ABSENT,
    ]
    _, trace = play(OWNED, *events)
    assert trace[-5:] == ["Preflight", "LookAtController", "KillController", "LookAtController", "Init"]


def test_the_kill_of_an_earlier_attempt_does_not_count() -> None:
    first_attempt = [PROBED, STARTED, NO_PROBLEM, UNFINISHED, KILLED, ABSENT, BROKEN, CLEANED, STOPPED]
    _, trace = play(OWNED, *first_attempt, STARTED, NO_PROBLEM, ABSENT)
    assert trace[-2:] == ["LookAtController", "KillController"]


def test_an_attempt_that_cannot_be_undone_is_the_last() -> None:
    dirty = ev.Cleaned(Problem(reason="controller still there"))
    state, trace = play(OWNED, PROBED, STARTED, NO_PROBLEM, ABSENT, BROKEN, dirty, STOPPED)
    assert state.phase is Phase.FAILED
    assert state.message == "broken; what it left behind could not be removed: controller still there"
    assert trace[-1] == "StopMaster"


def test_ready_leads_only_to_closed() -> None:
    ready, _ = play(OWNED, PROBED, STARTED, NO_PROBLEM, ABSENT, INIT_DONE, PASSED)
    for event in (BROKEN, ABSENT, ev.Interrupted("x"), ev.Begin(), PASSED):
        with pytest.raises(ValueError, match="cannot happen in phase ready"):
            step(ready, event)
    state, trace = play(OWNED, PROBED, STARTED, NO_PROBLEM, ABSENT, INIT_DONE, PASSED, ev.Close(), CLEANED, STOPPED)
    assert (state.phase, state.pending, state.message, trace[-2:]) == (Phase.CLOSED, None, "", ["Clean", "StopMaster"])


def test_an_answer_is_only_taken_for_the_effect_that_was_asked_for() -> None:
    state, _ = play(OWNED, PROBED)  # StartMaster is pending
    for event in (NO_PROBLEM, ABSENT, PROBED, CLEANED):
        with pytest.raises(ValueError, match=type(event).__name__):
            step(state, event)


# --- any order, any failure -------------------------------------------------------------------------------------------


@dataclass
class World:
    """A world that obeys the effects, badly. It knows the truth that the machine only hears about."""

    controller: Controller = Controller.ABSENT
    master: str = "none"
    trace: list[ev.Effect] = field(default_factory=list)

    def obey(self, effect: ev.Effect, draw: Any) -> ev.Event | None:
        self.trace.append(effect)
        if isinstance(effect, ev.Record):
            return None
        if isinstance(effect, ev.KillController):
            assert self.controller is not Controller.FOREIGN, "a stranger's controller was killed"
        if isinstance(effect, ev.Init):
            assert self.controller is Controller.ABSENT, f"init while the controller is {self.controller.value}"
        if isinstance(effect, ev.StartMaster):
            assert self.master != "up", "a second master was started"
            self.master = "up"  # also when it fails: it may be half up
        may_fail = (ev.StartMaster, ev.Preflight, ev.LookAtController, ev.KillController, ev.Init, ev.Verify)
        if isinstance(effect, may_fail) and draw(st.integers(0, 5)) == 0:
            if isinstance(effect, ev.Init):
                self.controller = draw(st.sampled_from([c for c in Controller if c is not Controller.FOREIGN]))
            return ev.Failed(draw(st.sampled_from([Problem(reason="broken"), Problem(reason="gone", check="master")])))
        return self.succeed(effect, draw)

    def succeed(self, effect: ev.Effect, draw: Any) -> ev.Event:
        problem = st.sampled_from([None, None, None, Problem(reason="no luck", node="node-0")])
        match effect:
            case ev.Probe():
                missing = draw(st.sets(st.sampled_from(CHECKS), max_size=1))
                return ev.Probed([good(0, dict.fromkeys(missing, "no"))], names(draw(st.integers(0, 1))))
            case ev.StartMaster():
                return STARTED
            case ev.Preflight():
                return ev.PreflightDone([p for p in (draw(problem), draw(problem)) if p])
            case ev.LookAtController():
                return ev.ControllerSeen(self.controller)
            case ev.KillController():
                failed = draw(problem)
                if failed is None and draw(st.integers(0, 4)):  # sometimes it only claims to be gone
                    self.controller = Controller.ABSENT
                return ev.ControllerKilled(failed)
            case ev.Init():
                self.controller = Controller.OURS
                return INIT_DONE
            case ev.Verify():
                wire, passed = draw(st.sampled_from(["zmq", "tcp", "rdma", "local", "local"])), draw(st.integers(1, 2))
                return ev.Verified(Verification(passed=passed, total=2, wire=wire))
            case ev.Clean():
                if draw(st.integers(0, 4)):  # sometimes it leaves the controller and says nothing
                    self.controller = Controller.ABSENT
                return ev.Cleaned(draw(problem))
        assert isinstance(effect, ev.StopMaster)
        self.master = "none"
        return STOPPED


ANY_EVENT = st.sampled_from(
    [ev.Begin(), PROBED, STARTED, NO_PROBLEM, ABSENT, STRANGER, KILLED, INIT_DONE, PASSED, BROKEN, CLEANED, STOPPED]
)
SETTINGS = st.builds(
    msgspec.structs.replace,
    st.sampled_from([OWNED, GIVEN, Settings(accounting="summary")]),
    use_gdr=st.booleans(),
    rdma_mode=st.sampled_from(["off", "auto", "required"]),
    fallback_backend=st.sampled_from(["simple", "none"]),
)


@settings(max_examples=400, deadline=None)
@given(SETTINGS, st.sampled_from(list(Controller)), st.data())
def test_promises_hold_whatever_happens(chosen: Settings, found: Controller, data: st.DataObject) -> None:
    world, state, event, stolen = World(found), State(chosen), ev.Begin(), False
    for _ in range(200):
        if state.phase is not Phase.CONFIGURED and data.draw(st.integers(0, 9)) == 0:
            refuse_what_does_not_belong(state, data.draw(ANY_EVENT))
        if state.phase not in (Phase.CONFIGURED, *ENDS) and not stolen and data.draw(st.integers(0, 24)) == 0:
            event, stolen = ev.Interrupted("Ctrl-C"), True
        before = state
        state, effects = step(state, event)
        assert state.attempt >= before.attempt
        assert [e for e in effects if not isinstance(e, ev.Record)] == ([state.pending] if state.pending else [])
        answers = [answer for answer in (world.obey(effect, data.draw) for effect in effects) if answer]
        if not answers:
            break
        event = answers[0]
    else:
        pytest.fail("the start does not end")
    check_the_end(chosen, state, world, stolen)


def refuse_what_does_not_belong(state: State, event: ev.Event) -> None:
    """An event that answers nothing pending, and is not a failure or an interruption, changes nothing."""
    if isinstance(event, (ev.Failed, ev.Interrupted)) or type(event) is getattr(state.pending, "answer", None):
        return
    with pytest.raises(ValueError, match="cannot happen"):
        step(state, event)


def check_the_end(chosen: Settings, state: State, world: World, stolen: bool) -> None:
    kinds = [type(effect) for effect in world.trace]
    records = [effect.fallback for effect in world.trace if isinstance(effect, ev.Record)]
    assert state.phase in (Phase.READY, Phase.FAILED)

    # The ladder strictly descends, and required never steps.
    path = [RUNGS.index(f.from_) for f in records] + [RUNGS.index(f.to) for f in records[-1:]]
    assert path == sorted(set(path))
    assert not records or (chosen.rdma_mode != "required" and chosen.wants_mooncake)
    assert state.attempt <= len(RUNGS)
    assert "SimpleStorage/zmq" not in [f.to for f in records] or chosen.fallback_backend == "simple"

    # Probe before the first init; a look that found nothing right before each; a kill between any two.
    inits = [i for i, kind in enumerate(kinds) if kind is ev.Init]
    if chosen.wants_mooncake and inits:
        assert kinds[0] is ev.Probe
    for earlier, later in zip([None, *inits], inits, strict=False):
        assert kinds[later - 1] is ev.LookAtController
        assert earlier is None or ev.KillController in kinds[earlier:later]

    # Masters: only when owned and for Mooncake; none is left unless the job runs on it.
    assert chosen.mooncake_auto_init == "job-owned" or ev.StartMaster not in kinds
    on_mooncake = state.decision is not None and state.decision.backend == "MooncakeStore"
    assert (world.master == "up") == (
        state.phase is Phase.READY and on_mooncake and chosen.mooncake_auto_init == "job-owned"
    )

    # FAILED: undone and explained. READY: on our controller.
    if state.phase is Phase.FAILED:
        assert state.message
        assert not state.init_open
        assert not state.master_open
        if inits:
            assert ev.Clean in kinds[inits[-1] :]
    else:
        assert not stolen
        assert world.controller is Controller.OURS
        assert not chosen.wants_mooncake or state.verification is not None


@pytest.mark.parametrize("phase", [Phase.FAILED, Phase.CLOSED])
def test_nothing_starts_again_after_the_end(phase: Phase) -> None:
    for event in (ev.Begin(), ev.Interrupted("x"), ev.Close(), BROKEN, ABSENT):
        with pytest.raises(ValueError, match="cannot happen"):
            step(replace(State(OWNED), phase=phase), event)
