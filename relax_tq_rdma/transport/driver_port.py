"""The effects of the start path in the driver, apart from what runs the job's actors.

Probe, preflight, init, verification and cleanup are the same whatever starts processes on the nodes; a subclass says
how that is done: :class:`relax_tq_rdma.transport.ray_port.RayPort` on Ray.

Nothing here waits longer than its limit. What may block in native code runs elsewhere first (a child process on each
node), and in this process under a last resort that ends it: with the GIL held there is no other way (design §5).
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from relax_tq_rdma.accounting.names import VERIFY_PREFIX
from relax_tq_rdma.errors import StartError
from relax_tq_rdma.seams import tq_state
from relax_tq_rdma.settings import Settings
from relax_tq_rdma.transport.agents import Node, NodeAgents, probe_cluster
from relax_tq_rdma.transport.bounded import Background, last_resort
from relax_tq_rdma.transport.controller import STORAGE_PREFIX, View
from relax_tq_rdma.transport.failures import describe
from relax_tq_rdma.transport.master import Master
from relax_tq_rdma.transport.native import PeerRequest, Ring, metadata_url
from relax_tq_rdma.transport.peer import CLOSE_SECONDS, HOLDING, Peer
from relax_tq_rdma.transport.port import Controller, Problem, Verification
from relax_tq_rdma.transport.report import Decision, NodeReport
from relax_tq_rdma.transport.verdict import judge_ring

logger = logging.getLogger(__name__)

_UNWIND_SECONDS = 2.0
_LOOK_SECONDS = 5.0
_Self = TypeVar("_Self", bound="DriverPort")

_MANAGERS = {"MooncakeStore": "MooncakeStorageManager", "SimpleStorage": "AsyncSimpleStorageManager"}


class DriverPort(ABC):
    """Effects of one job's start and end, in its driver (:class:`relax_tq_rdma.transport.port.Port`).

    Args:
        settings: the job's settings.
        job: the job's token.
        original_init: ``transfer_queue.init`` as it is without the plugin.
        original_close: ``transfer_queue.close`` likewise.
    """

    runner = "the job's runner"
    """Name of what runs the actors, for messages."""

    def __init__(
        self,
        settings: Settings,
        job: str,
        original_init: Callable[[Any], Any],
        original_close: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._job = job
        self._init = original_init
        self._close = original_close
        self._nodes: dict[str, Node] = {}
        self._reports: dict[str, NodeReport] = {}
        self._agents: NodeAgents | None = None
        self._master: Master | None = None
        self._initialising: Background | None = None
        self._storage_before: set[str] = set()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release_agents()

    # --- what runs the job's actors -----------------------------------------------------------------------------------

    @abstractmethod
    def alive_nodes(self) -> dict[str, Node]:
        """Alive nodes of the job by id."""

    @abstractmethod
    def own_node(self) -> str:
        """Id of this driver's node."""

    @abstractmethod
    def open_agents(self, nodes: Mapping[str, Node]) -> NodeAgents:
        """One agent on each node."""

    @abstractmethod
    def look(self, limit: float) -> View:
        """See :func:`relax_tq_rdma.transport.controller.look`."""

    @abstractmethod
    def kill_controller(self, limit: float) -> Problem | None:
        """Kill the controller and wait until its name is free."""

    @abstractmethod
    def named_actors(self) -> set[str]:
        """Names of this driver's own living actors, storage units among them."""

    @abstractmethod
    def kill_named(self, names: set[str], limit: float) -> Problem | None:
        """Kill some of :meth:`named_actors` and wait until their names are free."""

    def why_silent(self) -> str:
        """Why the actors cannot be called any more; empty when they can."""
        return ""

    def shortage(self) -> str:
        """Which actors have found no place, in words; empty when all have one."""
        return ""

    # --- nodes --------------------------------------------------------------------------------------------------------

    def nodes(self) -> dict[str, str]:
        self._nodes = self.alive_nodes()
        return {node_id: node.name for node_id, node in self._nodes.items()}

    def probe(self, limit: float) -> Sequence[NodeReport]:
        self.release_agents()
        self._agents = self.open_agents(self._nodes or self.alive_nodes())
        _, reports = probe_cluster(self._settings, limit, self._agents)
        self._reports = {report.node_id: report for report in reports}
        return reports

    def release_agents(self) -> None:
        """Kill the agents. Idempotent; the port stays usable."""
        agents, self._agents = self._agents, None
        if agents is not None:
            agents.close()

    # --- controller ---------------------------------------------------------------------------------------------------

    def controller(self, limit: float) -> Controller:
        seen = self.look(limit)
        if seen.state not in (Controller.ABSENT, Controller.OURS):
            logger.warning("%s", seen.reason)
        return seen.state

    # --- master -------------------------------------------------------------------------------------------------------

    def start_master(self, limit: float) -> str | Problem:
        self.stop_master(limit)
        try:
            self._master = Master(self._job, self._own_address() if len(self._nodes) > 1 else "127.0.0.1")
            return self._master.start(limit)
        except StartError as exc:
            return Problem(reason=str(exc), check="master")

    def stop_master(self, limit: float) -> None:
        master, self._master = self._master, None
        if master is not None:
            master.stop(limit)

    def master_failure(self) -> str:
        """Why the job-owned master is gone; empty while it runs, and when there is none."""
        return self._master.failure() if self._master is not None else ""

    # --- transport ----------------------------------------------------------------------------------------------------

    def preflight(self, decision: Decision, master: str, limit: float) -> Sequence[Problem]:
        if decision.backend != "MooncakeStore":
            return ()
        agents = self._ensure_agents()
        requests = {node_id: [self._request(node_id, decision, master)] for node_id in agents.nodes}
        results = agents.run_peers(requests, limit)
        return [
            Problem(reason=result.reason, node=agents.nodes[node_id].name, check=result.check)
            for node_id, (result,) in results.items()
            if result.reason
        ]

    def init(self, conf: Any, limit: float) -> Any | Problem:
        if self._initialising is not None and self._initialising.running:
            return Problem(reason="an earlier transfer_queue.init of this process still blocks: start a new process")
        self._storage_before = self.named_actors()
        native = conf["backend"]["storage_backend"] == "MooncakeStore"
        with last_resort(limit) if native else contextlib.nullcontext():
            # Armed before the call begins: once it has the GIL, nothing of this process runs any more.
            run = self._initialising = Background(lambda: self._init(conf), "transfer-queue-init")
            if not run.wait(limit):
                short = self.shortage()
                self._unblock_init(_UNWIND_SECONDS)
                why = f": {short}" if short else ""
                return Problem(reason=f"transfer_queue.init did not finish within {limit:.0f} s{why}")
        if run.error is not None:
            return Problem(reason=f"transfer_queue.init failed: {describe(run.error)}")
        return run.result

    def verify(self, decision: Decision, conf: Any, master: str, limit: float) -> Verification:
        ends = time.monotonic() + limit
        mooncake = decision.backend == "MooncakeStore"
        problems = [*self._verify_config(decision, limit), *self._verify_client(decision)]
        if not problems:
            problems += self._verify_on_mooncake(decision, master, ends) if mooncake else self._verify_round_trip(ends)
        if problems or not mooncake:
            passed = int(not problems)
            return Verification(passed=passed, total=1, wire="tcp" if mooncake else "zmq", problems=tuple(problems))
        return self._verify_ring(decision, master, ends - time.monotonic())

    def clean(self, limit: float) -> Problem | None:
        silent = self.why_silent()
        if silent:
            return self._clean_without_actors(silent, limit)
        # What runs the actors may also fall silent on the way, and its calls have no deadline.
        cleaning = Background(lambda: self._clean(limit), "transfer-queue-clean")
        if not cleaning.wait(limit + _UNWIND_SECONDS):
            return Problem(reason=f"{self.runner} did not answer within {limit:.0f} s")
        if cleaning.error is not None:
            raise cleaning.error
        problem: Problem | None = cleaning.result
        return problem

    # --- inside -------------------------------------------------------------------------------------------------------

    def _clean(self, limit: float) -> Problem | None:
        ends = time.monotonic() + limit
        if not self._unblock_init(min(_UNWIND_SECONDS, limit / 2)):
            return Problem(reason="transfer_queue.init of this process still blocks in native code: end this process")
        # An init that lost a race attached to somebody else's controller; TransferQueue's close would kill that one.
        foreign = self.look(min(0.5, limit / 4)).state is Controller.FOREIGN
        if foreign:
            tq_state.detach_controller()
        with last_resort(limit):
            closing = Background(self._close_all, "transfer-queue-close")
            closed = closing.wait(max(0.5, ends - time.monotonic() - 1.0))
        left = max(0.5, ends - time.monotonic())
        problem = None if foreign else self.kill_controller(left)
        problem = problem or self.kill_named(self._new_storage_actors(), left)
        # With the actors gone, what it may have waited for has ended.
        if problem is None and not closed and not closing.wait(0.5):
            problem = Problem(reason=f"transfer_queue.close did not finish within {limit:.0f} s")
        tq_state.reset()
        return problem

    def _clean_without_actors(self, why: str, limit: float) -> Problem:
        """Close this process's own client. The actors cannot be called any more; they end with what runs them."""
        tq_state.forget_actors()
        with last_resort(limit):
            closed = Background(self._close_all, "transfer-queue-close").wait(limit)
        tq_state.reset()
        left = "" if closed else f", and transfer_queue.close did not finish within {limit:.0f} s"
        return Problem(
            reason=f"{self.runner}'s control service is gone ({why}): TransferQueue's actors end with it{left}"
        )

    def _ensure_agents(self) -> NodeAgents:
        if self._agents is None:
            self._nodes = self._nodes or self.alive_nodes()
            self._agents = self.open_agents(self._nodes)
        return self._agents

    def _announced(self, node_id: str) -> str:
        """The address a node announces to its peers: as its own probe found it, else its runner's."""
        report = self._reports.get(node_id)
        return report.address if report is not None and report.address else self._nodes[node_id].address

    def _own_address(self) -> str:
        return self._announced(self.own_node())

    def _request(self, node_id: str, decision: Decision, master: str) -> PeerRequest:
        report, wanted = self._reports.get(node_id), [name for name in decision.device.split(",") if name]
        devices = report.devices if report is not None else ()
        return PeerRequest(
            mode="handshake",
            master=master,
            hostname=self._announced(node_id),
            metadata_server=metadata_url(self._settings.mooncake_metadata_server),
            protocol="rdma" if decision.protocol == "rdma" else "tcp",
            device=decision.device,
            devices=tuple(device for device in devices if not wanted or device.name in wanted),
        )

    def _verify_config(self, decision: Decision, limit: float) -> list[Problem]:
        """On attach, init returns the caller's config: only the controller's own copy counts (contract §13.3)."""
        seen = self.look(min(limit, _LOOK_SECONDS))
        if seen.state is not Controller.OURS:
            return [Problem(reason=f"the stored config is not this job's: {seen.reason}", check="verify")]
        backend = seen.config["backend"]["storage_backend"]
        if backend != decision.backend:
            return [Problem(reason=f"the stored config says {backend}, not {decision.backend}", check="verify")]
        return []

    def _verify_client(self, decision: Decision) -> list[Problem]:
        facts = tq_state.client_facts()
        if facts is None:
            return [Problem(reason="this process has no TransferQueue client after init", check="verify")]
        wrong = []
        if _MANAGERS[decision.backend] not in facts.manager:
            wrong.append(f"the storage manager is {facts.manager[0]}, not a {_MANAGERS[decision.backend]}")
        if decision.backend == "MooncakeStore" and facts.protocol != decision.protocol:
            wrong.append(f"the storage client uses {facts.protocol or 'no protocol'}, not {decision.protocol}")
        return [Problem(reason=reason, check="verify") for reason in wrong]

    def _verify_on_mooncake(self, decision: Decision, master: str, ends: float) -> list[Problem]:
        """The round trip, with a small segment in the store that goes away with it: without one this driver would have
        to mount its own, and take a share of all payload from then on."""
        own = self.own_node()
        request = msgspec.structs.replace(self._request(own, decision, master), mode="hold")
        with Peer(request, ends - time.monotonic()) as holder:
            if not holder.reached(HOLDING):
                failed = holder.finish()
                return [Problem(reason=failed.reason, node=self._nodes[own].name, check=failed.check)]
            problems = self._verify_round_trip(ends - CLOSE_SECONDS)
            holder.finish()
        return problems

    def _verify_round_trip(self, ends: float) -> list[Problem]:
        trip = Background(lambda: tq_state.round_trip(f"{VERIFY_PREFIX}{self._job}", ends), "transfer-queue-verify")
        if not trip.wait(max(0.1, ends - time.monotonic())):
            reason = "a put and get through TransferQueue did not come back in time"
        elif trip.error is not None:
            reason = f"a put and get through TransferQueue failed: {describe(trip.error)}"
        else:
            reason = trip.result
        return [Problem(reason=reason, check="verify")] if reason else []

    def _verify_ring(self, decision: Decision, master: str, limit: float) -> Verification:
        agents = self._ensure_agents()
        members = sorted(agents.nodes)
        # One node: two processes of it. That proves the path between processes, and says so (wire=local).
        seats = members if len(members) > 1 else members * 2
        token = secrets.token_hex(8)
        requests: dict[str, list[PeerRequest]] = {}
        for index, node_id in enumerate(seats):
            place = Ring(token=token, index=index, size=len(seats))
            plain = self._request(node_id, decision, master)
            requests.setdefault(node_id, []).append(msgspec.structs.replace(plain, mode="ring", ring=place))
        answers = {node_id: iter(found) for node_id, found in agents.run_peers(requests, limit).items()}
        results = [next(answers[node_id]) for node_id in seats]
        local = len({node.address for node in agents.nodes.values()}) == 1
        return judge_ring([agents.nodes[node_id].name for node_id in seats], results, decision.protocol, local)

    def _unblock_init(self, limit: float) -> bool:
        """Make an init that still runs fail: it waits for actors, so those are killed. Returns whether it ended."""
        run = self._initialising
        if run is None or not run.running:
            return True
        ends = time.monotonic() + limit
        while run.running and time.monotonic() < ends:
            if self.look(0.0).state is not Controller.FOREIGN:
                self.kill_controller(0.5)
            self.kill_named(self._new_storage_actors(), 0.5)
            run.wait(0.1)
        return not run.running

    def _new_storage_actors(self) -> set[str]:
        """Storage units that were not there before this job's init: its own."""
        now = self.named_actors() - self._storage_before
        return {name for name in now if name.startswith(STORAGE_PREFIX)}

    def _close_all(self) -> None:
        # A store whose master does not answer blocks in close, holding the GIL (10 s when it is dead, more when it is
        # frozen). There is nothing to hand back to such a master: the client is left to the end of the process.
        asked = Background(tq_state.store_answers, "mooncake-alive")
        if not asked.wait(_LOOK_SECONDS / 5) or not asked.result:
            tq_state.abandon_store()
        # TransferQueue's close first: it still needs the store, and leaves the storage client with its segment open.
        client = tq_state.storage_client()
        self._close()
        tq_state.close_storage_client(client)
