"""Start the data plane of a job: perform the state machine's effects through the port, under deadlines (design §5).

Each attempt at a rung has ``--tq-init-timeout-seconds`` for everything: probe, set-up, verification. Undoing it may use
what is left of that, and :data:`UNDO_SECONDS` more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from relax_tq_rdma.compat import HostFacts, warnings_after_fallback
from relax_tq_rdma.errors import StartError
from relax_tq_rdma.say import say
from relax_tq_rdma.section import JobSection
from relax_tq_rdma.settings import Settings
from relax_tq_rdma.summary import PREFIX, start_line
from relax_tq_rdma.transport import events as ev
from relax_tq_rdma.transport.bounded import if_longer
from relax_tq_rdma.transport.config import build_conf
from relax_tq_rdma.transport.decision import nodes_ok
from relax_tq_rdma.transport.machine import Phase, State, step
from relax_tq_rdma.transport.port import Port, Problem, Verification
from relax_tq_rdma.transport.report import Decision, Fallback
from relax_tq_rdma.version import __version__

UNDO_SECONDS = {ev.Clean: 4.0, ev.StopMaster: 5.0}
"""How long after the end of an attempt's time an undo step must be over."""

SHARES = {ev.Probe: 0.5, ev.LookAtController: 0.4}
"""Largest part of an attempt's time for a step that may wait for nothing: a node that is gone, a controller that never
finishes (it may also be a neighbour's that just starts, so this one is not short). Others may use all that is left."""

PROGRESS_SECONDS = 2.0
"""A step that takes longer says so."""


@dataclass(frozen=True)
class Started:
    """A data plane that is ready. ``probe``: nodes that passed and nodes asked, when there was a probe."""

    conf: Any
    decision: Decision
    verification: Verification | None
    probe: tuple[int, int] | None
    master: str
    line: str
    state: State


def start_job(
    settings: Settings,
    conf: Any,
    port: Port,
    *,
    job: str,
    host: HostFacts | None = None,
    clock: Callable[[], float] = time.monotonic,
    emit: Callable[[str], None] = say,
    on_fallback: Callable[[Fallback], None] = lambda fallback: None,
) -> Started:
    """Bring the data plane up, or leave nothing behind.

    Args:
        settings: what was asked for.
        conf: the caller's TransferQueue config, not changed.
        port: the effects.
        job: this job's random token.
        host: what the start line says of the host, if there is one.
        clock: seconds, monotonic.
        emit: takes one line for the user: progress, warnings, and at last the start line.
        on_fallback: called once for each step down the ladder.

    Raises:
        StartError: the job must not start; the message says what failed, where and what to do.
        BaseException: whatever interrupted the start (Ctrl-C, an error in the port), after an undo within seconds.
    """
    run = _Run(settings, conf, port, job, host, clock, emit, on_fallback)
    try:
        run.drive(ev.Begin())
        if run.state.phase is Phase.FAILED:
            raise StartError(run.state.message)
        return run.started()
    except BaseException as exc:
        if run.state.phase is not Phase.FAILED:
            reason = f"the start was interrupted by {type(exc).__name__}"
            event: ev.Event = ev.Close() if run.state.phase is Phase.READY else ev.Interrupted(reason)
            left = _wind_down(run.state, event, port, clock, clock()).message
            if left not in ("", reason):
                emit(f"{PREFIX} WARNING {left}")
        raise


def close_job(started: Started, port: Port, *, limit: float, clock: Callable[[], float] = time.monotonic) -> str:
    """Close a data plane that is ready, within ``limit`` seconds; returns what could not be removed, if anything."""
    ends = clock() + limit - max(UNDO_SECONDS.values())
    return _wind_down(started.state, ev.Close(), port, clock, ends).message


class _Run:
    """One start. ``state`` is set before an effect begins, so it knows of effects that never came back."""

    def __init__(
        self,
        settings: Settings,
        conf: Any,
        port: Port,
        job: str,
        host: HostFacts | None,
        clock: Callable[[], float],
        emit: Callable[[str], None],
        on_fallback: Callable[[Fallback], None],
    ) -> None:
        self.state = State(settings)
        self._conf, self._port, self._job, self._host = conf, port, job, host
        self._clock, self._emit, self._on_fallback = clock, emit, on_fallback
        self._nodes: dict[str, str] = {}
        self._reports: Sequence[object] = ()
        self._ends = 0.0

    def drive(self, event: ev.Event | None) -> None:
        """Run until no effect is pending."""
        while event is not None:
            attempt = self.state.attempt
            self.state, effects = step(self.state, event)
            if self.state.attempt != attempt:
                self._ends = self._clock() + self.state.settings.init_timeout_seconds
            event = None
            for effect in effects:
                event = self._perform(effect)

    def started(self) -> Started:
        """The result, with the start line printed, and before it what a fallback brings with it."""
        state, probe = self.state, None
        assert state.decision is not None
        if self._nodes:
            probe = nodes_ok(state.decision, state.settings, self._reports, self._nodes)
        if state.decision.backend == "SimpleStorage":
            for text in warnings_after_fallback(state.settings, self._host):
                self._emit(f"{PREFIX} WARNING {text}")
        line = start_line(state.settings, state.decision, probe=probe, verify=state.verification, host=self._host)
        self._emit(line)
        return Started(state.conf, state.decision, state.verification, probe, state.master, line, state)

    def _perform(self, effect: ev.Effect) -> ev.Event | None:
        if isinstance(effect, ev.Record):
            self._report(effect.fallback)
            return None
        if isinstance(effect, ev.Probe):
            self._nodes = self._port.nodes()
        what, limit = self._words(effect), self._limit(effect)
        if limit <= 0:
            seconds = self.state.settings.init_timeout_seconds
            return ev.Failed(Problem(reason=f"the {seconds:g} s of --tq-init-timeout-seconds were over before {what}"))
        with self._progress(f"{PREFIX} {what} ... (at most {limit:.0f} s)"):
            return self._call(effect, limit)

    def _call(self, effect: ev.Effect, limit: float) -> ev.Event:
        port = self._port
        match effect:
            case ev.Probe():
                self._reports = port.probe(limit)
                return ev.Probed(self._reports, self._nodes)
            case ev.StartMaster():
                master = port.start_master(limit)
                return ev.Failed(master) if isinstance(master, Problem) else ev.MasterStarted(master)
            case ev.Preflight(decision, master):
                return ev.PreflightDone(port.preflight(decision, master, limit))
            case ev.LookAtController():
                return ev.ControllerSeen(port.controller(limit))
            case ev.KillController():
                return ev.ControllerKilled(port.kill_controller(limit))
            case ev.Init(decision, master):
                conf = port.init(build_conf(self._conf, self._section(decision, master)), limit)
                return ev.Failed(conf) if isinstance(conf, Problem) else ev.Initialised(conf)
            case ev.Verify(decision, conf, master):
                return ev.Verified(port.verify(decision, conf, master, limit))
        return _undo(effect, port, limit)

    def _section(self, decision: Decision, master: str) -> JobSection:
        return JobSection(
            job=self._job,
            settings=self.state.settings,
            decision=decision,
            plugin_version=__version__,
            master=master,
            nodes=max(1, len(self._nodes)),
        )

    def _limit(self, effect: ev.Effect) -> float:
        left = self._ends - self._clock()
        if type(effect) in UNDO_SECONDS:
            return _undo_limit(effect, left)
        return min(left, SHARES.get(type(effect), 1.0) * self.state.settings.init_timeout_seconds)

    def _words(self, effect: ev.Effect) -> str:
        rung = self.state.decision.rung if self.state.decision else ""
        nodes = f"{len(self._nodes)} node{'s' * (len(self._nodes) != 1)}"
        return {
            ev.Probe: f"probing {nodes}",
            ev.StartMaster: "starting this job's mooncake_master",
            ev.Preflight: f"trying {rung} on {nodes}",
            ev.LookAtController: "looking for a leftover TransferQueueController",
            ev.KillController: "removing a leftover TransferQueueController",
            ev.Init: f"starting TransferQueue on {rung}",
            ev.Verify: f"moving test bytes over {rung}",
            ev.Clean: f"undoing the attempt at {rung}",
            ev.StopMaster: "stopping this job's mooncake_master",
        }[type(effect)]

    def _report(self, fallback: Fallback) -> None:
        where = ", ".join(
            f"{key} {value}" for key, value in (("node", fallback.node), ("check", fallback.check)) if value
        )
        self._emit(f"{PREFIX} WARNING {fallback.from_} -> {fallback.to}: {fallback.reason} ({where})")
        self._on_fallback(fallback)

    def _progress(self, line: str) -> AbstractContextManager[None]:
        return if_longer(PROGRESS_SECONDS, lambda: self._emit(line))


def _undo(effect: ev.Effect, port: Port, limit: float) -> ev.Event:
    if isinstance(effect, ev.Clean):
        return ev.Cleaned(port.clean(limit))
    port.stop_master(limit)
    return ev.MasterStopped()


def _undo_limit(effect: ev.Effect, left: float) -> float:
    """Always enough to try: what came before may have overrun."""
    return max(1.0, left + UNDO_SECONDS[type(effect)])


def _wind_down(state: State, event: ev.Event, port: Port, clock: Callable[[], float], ends: float) -> State:
    """Undo what is open. A step that raises, or a second Ctrl-C, does not keep the next one from being tried."""
    pending: ev.Event | None = event
    while pending is not None:
        state, effects = step(state, pending)
        pending = None
        for effect in effects:
            try:
                pending = _undo(effect, port, _undo_limit(effect, ends - clock()))
            except BaseException as exc:
                problem = Problem(reason=f"{type(exc).__name__} while cleaning up")
                pending = ev.Cleaned(problem) if isinstance(effect, ev.Clean) else ev.MasterStopped()
    return state
