"""One light Ray actor on every node of a job: the hands of the start path where the data plane will run.

Limits, devices and environment belong to a process of a node, so a Ray worker must look at them, on every alive node,
also on a head without GPUs: the driver and Serve hold clients there (contract §13.17). The actors take no CPU, import
neither torch nor TransferQueue, and are killed at the end, always. No call is waited for longer than its limit: a
node that does not answer is missing, one that joins later is not waited for.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from relax_tq_rdma import env
from relax_tq_rdma.settings import Settings
from relax_tq_rdma.transport import reach
from relax_tq_rdma.transport.failures import describe
from relax_tq_rdma.transport.findings import unique_names
from relax_tq_rdma.transport.native import PeerRequest, PeerResult
from relax_tq_rdma.transport.probe import ProbeRequest, with_check
from relax_tq_rdma.transport.report import Check, NodeReport

_MARGIN_SECONDS = 1.0
"""A call on a node gets this much less than its caller waits."""

_DIAL_SECONDS = 3.0

_Self = TypeVar("_Self", bound="NodeAgents")


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One alive node: its name for people (unique in the job) and Ray's address of it."""

    name: str
    address: str


def alive_nodes() -> dict[str, Node]:
    """Alive nodes of the cluster this driver is connected to: Ray node id to node.

    Connects first where nobody has: the first call of ``transfer_queue.init`` would do the same.
    """
    if not ray.is_initialized():
        ray.init()
    alive = {str(node["NodeID"]): node for node in ray.nodes() if node["Alive"]}
    names = unique_names({node_id: str(node["NodeManagerHostname"]) for node_id, node in alive.items()})
    return {i: Node(name=names[i], address=str(node["NodeManagerAddress"])) for i, node in alive.items()}


class NodeAgent:
    """Runs on a node. Requests and answers are plain builtins: the other side may have another version."""

    def __init__(self) -> None:
        self._listener: reach.Listener | None = None

    def probe(self, settings: dict[str, Any], node: str, node_id: str, request: dict[str, Any]) -> dict[str, Any]:
        """The report of this node (:func:`relax_tq_rdma.transport.probe.probe_node`)."""
        from relax_tq_rdma.transport.probe import probe_node

        report = probe_node(
            Settings.from_dict(settings)[0], node=node, node_id=node_id, request=msgspec.convert(request, ProbeRequest)
        )
        plain: dict[str, Any] = msgspec.to_builtins(report)
        return plain

    def listen(self, host: str) -> dict[str, Any]:
        """Listen on the address this node announces, until the agent ends."""
        self._listener = reach.Listener(env.LOCAL_HOSTNAME.read() or host)
        plain: dict[str, Any] = msgspec.to_builtins(self._listener.listening)
        return plain

    def dial(self, targets: dict[str, dict[str, Any]], seconds: float) -> dict[str, str]:
        """Connect to other nodes' listeners; reasons of :func:`reach.dial`."""
        return reach.dial({i: msgspec.convert(target, reach.Listening) for i, target in targets.items()}, seconds)

    def peers(self, requests: list[dict[str, Any]], limit: float) -> list[dict[str, Any]]:
        """Run native clients in children of this node, all at once (:func:`relax_tq_rdma.transport.peer.run_peer`)."""
        from relax_tq_rdma.transport.peer import run_peer

        wanted = [_localised(msgspec.convert(request, PeerRequest)) for request in requests]
        with ThreadPoolExecutor(len(wanted)) as pool:
            return [_plain(result) for result in pool.map(lambda request: run_peer(request, limit), wanted)]


class NodeAgents(ABC):
    """One agent on each of ``nodes``. A context manager; :meth:`close` ends them, always."""

    nodes: dict[str, Node]

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @abstractmethod
    def call(self, method: str, arguments: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
        """Begin a call of :class:`NodeAgent` on each node that has arguments; node id to reference, for
        :meth:`gather`."""

    @abstractmethod
    def gather(self, refs: Mapping[str, Any], limit: float) -> dict[str, Any]:
        """Wait at most ``limit`` seconds. Returns the answer of each node, or the exception its call ended with.

        A node that did not answer in time is not in the result.
        """

    @abstractmethod
    def close(self) -> None:
        """End the agents. Idempotent."""

    def run_peers(self, requests: Mapping[str, Sequence[PeerRequest]], limit: float) -> dict[str, list[PeerResult]]:
        """Native clients on each node, all at once. A node that does not answer in time gets a result that says so."""
        inner = max(0.5, limit - _MARGIN_SECONDS)
        refs = self.call("peers", {i: ([_plain(r) for r in asked], inner) for i, asked in requests.items()})
        answers = self.gather(refs, limit)
        results = {}
        for node_id, asked in requests.items():
            answer = answers.get(node_id, f"the node did not answer within {limit:.0f} s")
            if isinstance(answer, str):
                results[node_id] = [PeerResult(reason=answer, check="report") for _ in asked]
            elif isinstance(answer, Exception):
                results[node_id] = [PeerResult(reason=describe(answer), check="report") for _ in asked]
            else:
                results[node_id] = msgspec.convert(answer, list[PeerResult])
        return results


class Agents(NodeAgents):
    """The agents of nodes of a Ray cluster: light actors."""

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self.nodes = dict(nodes)
        remote = ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0, max_concurrency=4)(NodeAgent)
        self._handles = {
            node_id: remote.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
            ).remote()
            for node_id in self.nodes
        }

    def call(self, method: str, arguments: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
        return {i: getattr(self._handles[i], method).remote(*args) for i, args in arguments.items()}

    def gather(self, refs: Mapping[str, Any], limit: float) -> dict[str, Any]:
        answers: dict[str, Any] = {}
        if not refs:
            return answers
        ready, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=max(0.0, limit))
        done = set(ready)
        for node_id, ref in refs.items():
            if ref in done:
                try:
                    answers[node_id] = ray.get(ref, timeout=1.0)
                except Exception as exc:
                    answers[node_id] = exc
        return answers

    def close(self) -> None:
        handles, self._handles = self._handles, {}
        for handle in handles.values():
            with contextlib.suppress(Exception):  # Ray may be gone already; then so are they
                ray.kill(handle)


def probe_cluster(
    settings: Settings, limit: float, agents: NodeAgents | None = None
) -> tuple[dict[str, str], list[NodeReport]]:
    """Probe every alive node and let the nodes dial one another.

    Args:
        settings: the job's settings.
        limit: seconds for all of it.
        agents: agents to use and leave running; by default new ones, killed at the end.

    Returns:
        The alive nodes (Ray node id to name), and one report for each node that answered in time. A node whose agent
        died is missing; one whose agent could not start or failed has a report that says why.
    """
    if agents is None:
        with Agents(alive_nodes()) as own:
            return probe_cluster(settings, limit, own)
    ends = time.monotonic() + limit
    nodes = agents.nodes
    request = ProbeRequest(hosts=len(nodes), limit_seconds=max(1.0, limit - 2 * _MARGIN_SECONDS))
    probes = agents.call(
        "probe",
        {
            i: (settings.to_dict(), node.name, i, _plain(msgspec.structs.replace(request, announce=node.address)))
            for i, node in nodes.items()
        },
    )
    checks = _dial_one_another(agents, ends) if settings.wants_mooncake and len(nodes) > 1 else {}
    reports = []
    for node_id, answer in agents.gather(probes, ends - time.monotonic()).items():
        report = _read_report(node_id, nodes[node_id].name, answer)
        if report is not None:
            reports.append(_with_reach(report, checks.get(node_id)))
    return {node_id: node.name for node_id, node in nodes.items()}, reports


def _dial_one_another(agents: NodeAgents, ends: float) -> dict[str, Check]:
    """Let every node listen and others dial it. One that does not listen in time is left out: it has other worries."""
    listening = {
        i: answer
        for i, answer in agents.gather(
            agents.call("listen", {i: (node.address,) for i, node in agents.nodes.items()}),
            (ends - time.monotonic()) * 0.6,
        ).items()
        if not isinstance(answer, Exception)
    }
    order = sorted(listening)
    seconds = max(0.5, min(_DIAL_SECONDS, (ends - time.monotonic()) / 2))
    targets = {
        node_id: {order[j]: listening[order[j]] for j in reach.partners(i, len(order))}
        for i, node_id in enumerate(order)
    }
    dials = agents.gather(
        agents.call("dial", {i: (wanted, seconds) for i, wanted in targets.items() if wanted}),
        min(seconds + 2 * _MARGIN_SECONDS, ends - time.monotonic()),
    )
    names = {node_id: node.name for node_id, node in agents.nodes.items()}
    return reach.judge(names, {i: found for i, found in dials.items() if not isinstance(found, Exception)})


def _read_report(node_id: str, name: str, answer: Any) -> NodeReport | None:
    if isinstance(answer, RayActorError) and "creation task" not in str(answer):
        return None  # it died: nobody knows anything about this node
    if isinstance(answer, Exception):
        why = describe(answer)
    else:
        try:
            return msgspec.convert(answer, NodeReport)
        except msgspec.ValidationError as exc:
            why = f"its report cannot be read ({exc})"
    failed = Check(
        name="mooncake",
        status="missing",
        evidence=f"the probe failed: {why}",
        fix="install the same relax-tq-rdma on every node, in the Python that Ray runs there",
    )
    return NodeReport(node=name, node_id=node_id, checks=(failed,))


def _with_reach(report: NodeReport, dialled: Check | None) -> NodeReport:
    """The address a node announces is judged by the node itself; whether it works, by those that dialled it."""
    announced = report.check("reachability")
    if dialled is None or announced is None or announced.status == "missing":
        return report
    return with_check(report, dialled)


def _localised(request: PeerRequest) -> PeerRequest:
    """With what only the node itself knows: where its counters are."""
    return msgspec.structs.replace(request, root=env.SYSTEM_ROOT.read())


def _plain(value: Any) -> Any:
    return msgspec.to_builtins(value)
