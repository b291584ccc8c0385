"""Starting a job through a fake port: order of effects, deadlines, cleaning, words (F10; FC-12, FC-13, FC-19)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from node_reports import good, names

from relax_tq_rdma.compat import HostFacts
from relax_tq_rdma.errors import StartError, UsageError
from relax_tq_rdma.section import read_section
from relax_tq_rdma.settings import Settings
from relax_tq_rdma.summary import parse_start_line
from relax_tq_rdma.transport import start
from relax_tq_rdma.transport.machine import FOREIGN, Phase
from relax_tq_rdma.transport.port import Controller, Problem, Verification
from relax_tq_rdma.transport.report import Decision, Fallback, NodeReport
from relax_tq_rdma.transport.start import Started, close_job, start_job

SIMPLE = Settings(accounting="summary")
TCP = Settings(storage_backend="mooncake", mooncake_auto_init="job-owned")
RDMA = msgspec.structs.replace(TCP, transport="rdma", rdma_mode="auto")
NO_FALLBACK = msgspec.structs.replace(TCP, fallback_backend="none")
REQUIRED = msgspec.structs.replace(RDMA, rdma_mode="required")
BUDGET = SIMPLE.init_timeout_seconds

HANG = "hang"
"""Scripted outcome of a call: it does not come back before its limit, and then reports a failure."""


class FakePort:
    """A world with one controller and one master. ``script`` maps a method to the outcomes of its next calls; a call
    without one succeeds. An exception is raised, ``HANG`` uses up the limit, a number takes that many seconds."""

    def __init__(self, found: Controller = Controller.ABSENT, /, **script: Sequence[Any]) -> None:
        self.state = found
        self.script = {name: deque(outcomes) for name, outcomes in script.items()}
        self.now = 1000.0
        self.calls: list[str] = []
        self.limits: list[tuple[str, float]] = []
        self.confs: list[Any] = []
        self.masters = 0
        self.running: str = ""

    def clock(self) -> float:
        return self.now

    def _enter(self, name: str, limit: float) -> Any:
        self.calls.append(name)
        self.limits.append((name, limit))
        assert limit > 0, f"{name} was called with no time left"
        outcome = self.script[name].popleft() if self.script.get(name) else None
        if isinstance(outcome, BaseException):
            raise outcome
        if outcome == HANG:
            self.now += limit
            return Problem(reason=f"{name} did not end within {limit:g} s")
        if isinstance(outcome, float):
            self.now += outcome
            return None
        return outcome

    def nodes(self) -> dict[str, str]:
        self.calls.append("nodes")
        return names(2)

    def probe(self, limit: float) -> Sequence[NodeReport]:
        outcome = self._enter("probe", limit)
        if isinstance(outcome, Problem):
            return [good(0)]  # node-1 did not answer
        return outcome or [good(0), good(1)]

    def controller(self, limit: float) -> Controller:
        outcome = self._enter("controller", limit)
        if isinstance(outcome, Controller):
            self.state = outcome
        return self.state

    def kill_controller(self, limit: float) -> Problem | None:
        outcome = self._enter("kill_controller", limit)
        assert self.state is not Controller.FOREIGN, "killed a stranger's controller"
        if outcome is None:
            self.state = Controller.ABSENT
        return None if outcome == "lies" else outcome

    def start_master(self, limit: float) -> str | Problem:
        outcome = self._enter("start_master", limit)
        assert not self.running, "a second master"
        self.masters += 1
        self.running = f"10.0.0.1:{4710 + self.masters}"
        return outcome or self.running

    def stop_master(self, limit: float) -> None:
        self._enter("stop_master", limit)
        self.running = ""

    def preflight(self, decision: Decision, master: str, limit: float) -> Sequence[Problem]:
        assert master
        outcome = self._enter("preflight", limit)
        return [outcome] if isinstance(outcome, Problem) else []

    def init(self, conf: Any, limit: float) -> Any:
        assert self.state is Controller.ABSENT, f"init on a {self.state.value} controller"
        self.confs.append(conf)
        self.state = Controller.UNFINISHED
        outcome = self._enter("init", limit)
        if outcome is None:
            self.state = Controller.OURS
        return outcome or conf

    def verify(self, decision: Decision, conf: Any, master: str, limit: float) -> Verification:
        outcome = self._enter("verify", limit)
        problems = (outcome,) if isinstance(outcome, Problem) else ()
        return Verification(passed=2 - len(problems), total=2, wire=decision.protocol, problems=problems)

    def clean(self, limit: float) -> Problem | None:
        outcome = self._enter("clean", limit)
        if outcome is None:
            self.state = Controller.ABSENT
        return outcome

    def begin(self, settings: Settings, conf: Any = None, host: HostFacts | None = None) -> Started:
        self.lines: list[str] = []
        self.fallbacks: list[Fallback] = []
        return start_job(
            settings,
            conf,
            self,
            job="f00d",
            host=host,
            clock=self.clock,
            emit=self.lines.append,
            on_fallback=self.fallbacks.append,
        )

    def assert_nothing_left(self) -> None:
        assert not self.running, "the master still runs"
        assert self.state is Controller.ABSENT, f"the controller is {self.state.value}"


class Unreachable(FakePort):
    """A port of a job that must not come to this."""

    def nodes(self) -> dict[str, str]:
        raise AssertionError("asked for the nodes")


# --- it works ---------------------------------------------------------------------------------------------------------


def test_accounting_on_simple_storage_only_guards_the_init() -> None:
    port = Unreachable()
    started = port.begin(SIMPLE, {"controller": {"polling_mode": True}})
    assert port.calls == ["controller", "init"]
    assert port.lines == [started.line]
    assert (started.probe, started.verification, started.master) == (None, None, "")
    assert started.conf.controller.polling_mode is True


def test_mooncake_start_carries_the_decision_to_every_process() -> None:
    port = FakePort()
    started = port.begin(TCP)
    assert port.calls == ["nodes", "probe", "start_master", "preflight", "controller", "init", "verify"]
    section, _ = read_section(started.conf.backend.MooncakeStore)
    assert section is not None
    assert (section.job, section.master, section.nodes) == ("f00d", "10.0.0.1:4711", 2)
    assert section.decision == started.decision == Decision(backend="MooncakeStore", protocol="tcp")
    pairs = parse_start_line(port.lines[-1])
    assert (pairs["probe"], pairs["verify"]) == ("2/2 nodes ok", "2/2 round trips, wire=tcp")
    assert pairs["fallback"] == "none"


def test_a_given_master_is_used_and_never_started_or_stopped() -> None:
    settings = msgspec.structs.replace(TCP, mooncake_auto_init="never", mooncake_master_address="10.0.0.9:50051")
    port = FakePort(preflight=[Problem(reason="no answer", check="master")])
    started = port.begin(settings)
    assert started.decision.backend == "SimpleStorage"
    assert not {"start_master", "stop_master"} & set(port.calls)
    assert FakePort().begin(settings).conf.backend.MooncakeStore.master_server_address == "10.0.0.9:50051"


def test_a_node_without_rdma_takes_the_whole_job_to_tcp() -> None:
    port = FakePort(probe=[[good(0), good(1, {"rdma_port": "port 1 of mlx5_0 is DOWN"})]])
    started = port.begin(RDMA)
    assert started.decision.rung == "MooncakeStore/tcp"
    assert port.lines[0] == (
        "[dataplane] WARNING MooncakeStore/rdma -> MooncakeStore/tcp: port 1 of mlx5_0 is DOWN: mend rdma_port "
        "(node node-1, check rdma_port)"
    )
    assert port.fallbacks == list(started.decision.fallbacks)
    assert parse_start_line(started.line)["fallback"] == "MooncakeStore/rdma>MooncakeStore/tcp@node-1:rdma_port"


def test_what_a_fallback_brings_with_it_is_said_before_the_start_line() -> None:
    settings = msgspec.structs.replace(TCP, per_rank_fetch="on", host_staging=True)
    host = HostFacts(tensor_parallel=4, num_data_storage_units=1, multimodal=True)
    undisturbed = FakePort()
    assert undisturbed.begin(settings, host=host).line == undisturbed.lines[-1]
    assert not any("WARNING" in line for line in undisturbed.lines)
    port = FakePort(preflight=[Problem(reason="no answer", check="master")])
    started = port.begin(settings, host=host)
    assert started.decision.backend == "SimpleStorage"
    assert port.lines[-2].startswith("[dataplane] WARNING per-rank fetch with fewer storage units than TP ranks")
    assert port.lines[-1] == started.line


# --- F10: the named controller ----------------------------------------------------------------------------------------

INIT_FAILS = Problem(reason="no storage unit was created")


@pytest.mark.parametrize("failures", [1, 2])
@pytest.mark.parametrize("cleaned_by", ["clean", "kill"])
def test_fallback_state_machine(failures: int, cleaned_by: str) -> None:
    """A failing init leaves a named controller that never gets its config. Before any other init it is killed, always,
    also when the clean-up says that it has removed it (F10)."""
    says_it_cleaned = [None] * failures if cleaned_by == "clean" else []
    port = FakePort(init=[INIT_FAILS] * failures, clean=says_it_cleaned)
    if cleaned_by == "kill":
        port.clean = lambda limit: port._enter("clean", limit)  # type: ignore[method-assign] # leaves the controller
    started = port.begin(RDMA)
    assert started.decision.rung == ["MooncakeStore/tcp", "SimpleStorage/zmq"][failures - 1]
    inits = [i for i, call in enumerate(port.calls) if call == "init"]
    assert len(inits) == failures + 1
    for earlier, later in pairwise(inits):
        between = port.calls[earlier + 1 : later]
        assert "kill_controller" in between
        assert between.index("clean") < between.index("kill_controller")
        assert between[-2:] == ["kill_controller", "controller"]  # and its disappearance is seen


@pytest.mark.parametrize("leftover", [Controller.UNFINISHED, Controller.DEAD, Controller.OURS])
@pytest.mark.parametrize("settings", [SIMPLE, TCP])
def test_an_unfinished_controller_is_killed_awaited_and_replaced(leftover: Controller, settings: Settings) -> None:
    port = FakePort(leftover)
    port.begin(settings)
    at = port.calls.index("kill_controller")
    assert port.calls[at - 1 : at + 3] == ["controller", "kill_controller", "controller", "init"]
    assert port.state is Controller.OURS
    assert port.fallbacks == []


@pytest.mark.parametrize("settings", [SIMPLE, TCP, RDMA, REQUIRED])
def test_a_healthy_controller_of_another_job_stops_the_start_and_is_left_alone(settings: Settings) -> None:
    port = FakePort(Controller.FOREIGN)
    with pytest.raises(StartError) as error:
        port.begin(settings)
    assert str(error.value) == FOREIGN
    assert port.state is Controller.FOREIGN
    assert not {"init", "kill_controller", "clean"} & set(port.calls)
    assert not port.running


def test_a_stranger_that_appears_after_our_failure_is_left_alone_too() -> None:
    port = FakePort(init=[INIT_FAILS], controller=[None, Controller.FOREIGN])
    with pytest.raises(StartError, match="not this job's"):
        port.begin(TCP)
    assert "kill_controller" not in port.calls


@pytest.mark.parametrize("outcome", [Problem(reason="its name is still taken after 12 s"), "lies", HANG])
def test_a_kill_that_does_not_free_the_name_stops_the_start(outcome: Any) -> None:
    port = FakePort(Controller.UNFINISHED, kill_controller=[outcome])
    with pytest.raises(StartError, match="leftover TransferQueueController could not be removed") as error:
        port.begin(TCP)
    assert "init" not in port.calls
    assert not port.running
    assert "restart Ray" in str(error.value)


# --- failures after the probe -----------------------------------------------------------------------------------------

NO_MASTER = Problem(reason="mooncake_master ended with code 1")
FAILURES = [
    ("start_master", NO_MASTER, "master"),
    ("preflight", Problem(reason="connection refused", node="node-1", check="master"), "master"),
    ("preflight", Problem(reason="set-up returned -1", node="node-1"), "preflight"),
    ("init", INIT_FAILS, "init"),
    ("verify", Problem(reason="bytes differ", node="node-1"), "verify"),
]


@pytest.mark.parametrize(("step", "problem", "check"), FAILURES)
def test_auto_falls_once_and_is_cleaned(step: str, problem: Problem, check: str) -> None:
    port = FakePort(**{step: [problem]})
    started = port.begin(TCP)
    assert started.decision.rung == "SimpleStorage/zmq"
    assert [(f.from_, f.to, f.reason, f.node, f.check) for f in port.fallbacks] == [
        ("MooncakeStore/tcp", "SimpleStorage/zmq", problem.reason, problem.node, check)
    ]
    assert sum("WARNING" in line for line in port.lines) == 1
    assert port.masters == 1
    assert not port.running
    assert port.calls[-1] == "verify"  # what it fell to is verified too
    assert port.calls.index("stop_master") < len(port.calls) - port.calls[::-1].index("controller")
    section, _ = read_section(started.conf.backend.SimpleStorage)
    assert section is not None
    assert section.master == ""


@pytest.mark.parametrize(("step", "problem", "check"), FAILURES)
@pytest.mark.parametrize("settings", [NO_FALLBACK, REQUIRED])
def test_where_nothing_less_will_do_the_start_fails_and_is_cleaned(
    settings: Settings, step: str, problem: Problem, check: str
) -> None:
    port = FakePort(**{step: [problem]})
    with pytest.raises(StartError) as error:
        port.begin(settings)
    for part in (problem.reason, problem.node, check, "cannot be used", "mend this, or use --tq-"):
        assert part in str(error.value)
    assert port.fallbacks == []
    assert port.masters == 1
    port.assert_nothing_left()


def test_required_without_rdma_never_gets_as_far_as_a_master() -> None:
    port = FakePort(probe=[[good(0, {"rdma_gid": "all zero"}), good(1, {"memlock": "64 KiB"})]])
    with pytest.raises(StartError) as error:
        port.begin(REQUIRED)
    for part in ("rdma_gid on node-0 (all zero", "memlock on node-1 (64 KiB", "--tq-rdma-mode auto"):
        assert part in str(error.value)
    assert port.calls == ["nodes", "probe"]


def test_every_rung_may_fail_and_each_attempt_gets_a_master_of_its_own() -> None:
    port = FakePort(verify=[Problem(reason="wire=tcp"), Problem(reason="bytes differ"), Problem(reason="bytes differ")])
    with pytest.raises(StartError, match="SimpleStorage could not be started: verify \\(bytes differ\\)"):
        port.begin(RDMA)
    assert [f.to for f in port.fallbacks] == ["MooncakeStore/tcp", "SimpleStorage/zmq"]
    assert port.masters == 2
    port.assert_nothing_left()


def test_simple_storage_that_does_not_start_is_cleaned() -> None:
    port = FakePort(init=[Problem(reason="Ray has 0 of 2 CPUs free")])
    with pytest.raises(StartError, match="0 of 2 CPUs free"):
        port.begin(SIMPLE)
    port.assert_nothing_left()


def test_an_attempt_that_cannot_be_cleaned_is_the_last() -> None:
    port = FakePort(init=[INIT_FAILS], clean=[Problem(reason="2 storage actors are still alive")])
    with pytest.raises(StartError, match="could not be removed: 2 storage actors are still alive"):
        port.begin(TCP)
    assert port.calls.count("init") == 1
    assert not port.running


# --- deadlines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["start_master", "preflight", "controller", "init", "verify", "clean", "stop_master"])
def test_what_hangs_ends_with_the_attempt(step: str) -> None:
    """Five seconds more than the time of the attempt, whatever hangs, even if cleaning up hangs as well."""
    script: dict[str, list[Any]] = {step: [HANG]}
    if step in ("clean", "stop_master"):
        script["init"] = [HANG]
    if step == "controller":
        script["controller"], script["kill_controller"] = [HANG, HANG], [HANG]
    port = FakePort(Controller.UNFINISHED if step == "controller" else Controller.ABSENT, **script)
    began = port.now
    with pytest.raises(StartError):
        port.begin(NO_FALLBACK)
    assert port.now - began <= BUDGET + 5
    assert not port.running


def test_nodes_that_do_not_answer_leave_time_for_the_rest() -> None:
    port = FakePort(probe=[HANG])
    began = port.now
    started = port.begin(TCP)
    assert [(f.node, f.check) for f in started.decision.fallbacks] == [("node-1", "report")]
    assert port.now - began == BUDGET / 2
    assert dict(port.limits)["init"] == BUDGET / 2


def test_all_steps_of_an_attempt_share_its_time_and_the_next_one_has_its_own() -> None:
    port = FakePort(probe=[4.0], start_master=[2.0], preflight=[10.0], init=[9.0], verify=[HANG])
    port.begin(TCP)
    limits = [limit for name, limit in port.limits if name in ("start_master", "preflight", "init", "verify")]
    assert limits == [26, 24, 14, 5, 30, 30]  # the last two: SimpleStorage


def test_no_step_begins_without_time() -> None:
    port = FakePort(init=[30.0])
    with pytest.raises(StartError, match="the 30 s of --tq-init-timeout-seconds were over before moving test bytes"):
        port.begin(NO_FALLBACK)
    port.assert_nothing_left()


# --- interruptions ----------------------------------------------------------------------------------------------------

STEPS = ["probe", "start_master", "preflight", "controller", "init", "verify"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143), RuntimeError("a bug")])
def test_whatever_interrupts_the_start_nothing_is_left(step: str, error: BaseException) -> None:
    port = FakePort(**{step: [error]})
    began = port.now
    with pytest.raises(type(error)) as caught:
        port.begin(RDMA)
    assert caught.value is error
    port.assert_nothing_left()
    assert ("clean" in port.calls) == (step in ("init", "verify"))
    assert ("stop_master" in port.calls) == (step != "probe")
    assert port.fallbacks == []
    assert all(limit <= 5 for name, limit in port.limits if name in ("clean", "stop_master"))
    assert port.now - began <= 5


@pytest.mark.parametrize("second", [KeyboardInterrupt(), RuntimeError("ray is gone"), HANG])
def test_a_second_interruption_does_not_keep_the_master_alive(second: Any) -> None:
    port = FakePort(verify=[KeyboardInterrupt()], clean=[second])
    with pytest.raises(KeyboardInterrupt):
        port.begin(TCP)
    assert not port.running
    assert "could not be removed" in port.lines[-1]


def test_an_interruption_while_cleaning_cleans_again() -> None:
    port = FakePort(init=[INIT_FAILS], clean=[KeyboardInterrupt()])
    with pytest.raises(KeyboardInterrupt):
        port.begin(TCP)
    assert port.calls[-3:] == ["clean", "clean", "stop_master"]
    port.assert_nothing_left()


def test_a_line_that_cannot_be_printed_closes_what_was_ready() -> None:
    port = FakePort()

    def broken(line: str) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        start_job(TCP, None, port, job="f00d", clock=port.clock, emit=broken)
    port.assert_nothing_left()


def test_a_wrong_size_in_the_environment_is_the_users_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RTQ_LOCAL_BUFFER_MB", "lots")
    port = FakePort()
    with pytest.raises(UsageError, match="RTQ_LOCAL_BUFFER_MB"):
        port.begin(TCP)
    port.assert_nothing_left()


# --- the end, and words on the way ------------------------------------------------------------------------------------


def test_close_removes_what_the_start_made() -> None:
    port = FakePort()
    started = port.begin(TCP)
    assert started.state.phase is Phase.READY
    assert close_job(started, port, limit=20, clock=port.clock) == ""
    port.assert_nothing_left()
    assert port.limits[-2:] == [("clean", 19.0), ("stop_master", 20.0)]


def test_close_says_what_it_could_not_remove() -> None:
    port = FakePort(clean=[Problem(reason="the segment is still mounted")])
    assert "the segment is still mounted" in close_job(port.begin(TCP), port, limit=20, clock=port.clock)
    assert not port.running


def test_a_step_that_takes_long_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "PROGRESS_SECONDS", 0.02)
    port = FakePort()
    port.preflight = lambda decision, master, limit: time.sleep(0.5) or []  # type: ignore[method-assign,func-returns-value]
    port.begin(TCP)
    assert "[dataplane] trying MooncakeStore/tcp on 2 nodes ... (at most 30 s)" in port.lines
