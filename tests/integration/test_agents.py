"""Agents on the nodes of a real Ray cluster: each sees its own node, none is waited for, all are gone in the end."""

import importlib
import sys
import time

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from relax_tq_rdma.settings import Settings
from relax_tq_rdma.transport import agents as module
from relax_tq_rdma.transport.agents import Agents, NodeAgent, alive_nodes, probe_cluster
from relax_tq_rdma.transport.native import PeerRequest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

MOONCAKE = Settings(storage_backend="mooncake", mooncake_auto_init="job-owned")
LIMIT = 40.0
ELSEWHERE = "198.51.100.1"
"""The node that announces it dials out and cannot be dialled: an address that nobody has (RFC 5737). Whatever a network
does with it, no peer greets from there."""


@pytest.fixture(scope="module")
def cluster(ray_cluster):
    # A small segment, so that the check of free memory passes on any machine.
    small = {"RTQ_SEGMENT_MB": "64"}
    return ray_cluster([small, {**small, "RTQ_LOCAL_HOSTNAME": ELSEWHERE}, small])


def living_agents():
    from ray._private import state

    alive = [actor for actor in state.actors().values() if actor["State"] != "DEAD"]
    return [actor for actor in alive if actor["ActorClassName"] == NodeAgent.__name__]


def wait_for_agents(seconds=20.0):
    """Ray's table of actors runs a little behind."""
    deadline = time.monotonic() + seconds
    while not (found := living_agents()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def wait_until_gone(seconds=10.0):
    deadline = time.monotonic() + seconds
    while (left := living_agents()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


@pytest.fixture(scope="module")
def probed(cluster):
    return probe_cluster(MOONCAKE, LIMIT)


def test_every_node_reports_under_its_own_name(probed):
    nodes, reports = probed
    assert len(nodes) == 3
    assert {report.node_id: report.node for report in reports} == nodes
    assert len(set(nodes.values())) == 3


def test_a_node_reachable_one_way_only_is_the_one_to_blame(probed):
    _, reports = probed
    checks = {report.address: report.check("reachability") for report in reports}
    odd = checks.pop(ELSEWHERE)
    assert odd.status == "missing"
    assert "cannot reach it" in odd.evidence
    assert "RTQ_LOCAL_HOSTNAME" in odd.fix
    assert {check.status for check in checks.values()} == {"ok"}


def test_no_agent_is_left(probed):
    assert wait_until_gone() == []


def test_no_agent_is_left_after_an_interruption(cluster, monkeypatch):
    def interrupt(*_):
        assert wait_for_agents()
        raise KeyboardInterrupt

    monkeypatch.setattr(module.Agents, "gather", interrupt)
    with pytest.raises(KeyboardInterrupt):
        probe_cluster(MOONCAKE, LIMIT)
    assert wait_until_gone() == []


def test_an_agent_is_light(cluster):
    class Spy(NodeAgent):
        def heavy(self):
            return [name for name in ("torch", "transfer_queue", "mooncake", "tensordict") if name in sys.modules]

    node_id = ray.get_runtime_context().get_node_id()
    here = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)  # its announce address is not overridden
    spy = ray.remote(num_cpus=0, scheduling_strategy=here)(Spy).remote()
    request = {"hosts": 1, "limit_seconds": 20.0}
    report = ray.get(spy.probe.remote(MOONCAKE.to_dict(), "here", node_id, request), timeout=LIMIT)
    assert report["node"] == "here"
    assert ray.get(spy.listen.remote("127.0.0.1"), timeout=LIMIT)["host"] == "127.0.0.1"
    assert ray.get(spy.heavy.remote(), timeout=LIMIT) == []
    ray.kill(spy)


def test_a_node_that_joins_later_is_not_waited_for(cluster):
    first_two = dict(list(alive_nodes().items())[:2])
    with Agents(first_two) as early:
        nodes, reports = probe_cluster(MOONCAKE, LIMIT, early)
    assert set(nodes) == {report.node_id for report in reports} == set(first_two)


def test_a_node_where_the_plugin_is_not_installed_says_so(cluster, monkeypatch, tmp_path):
    """The agent's class lives in a module that only the driver can import."""
    (tmp_path / "only_on_the_driver.py").write_text(
        "from relax_tq_rdma.transport import agents\nclass Agent(agents.NodeAgent): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(module, "NodeAgent", importlib.import_module("only_on_the_driver").Agent)
    nodes, reports = probe_cluster(MOONCAKE, LIMIT)
    assert len(nodes) == len(reports) == 3
    check = reports[0].check("mooncake")
    assert check.status == "missing"
    assert "ModuleNotFoundError: No module named 'only_on_the_driver'" in check.evidence
    assert "install the same relax-tq-rdma" in check.fix


def test_nodes_that_do_not_answer_are_missing_in_time(cluster, monkeypatch):
    class Hangs(NodeAgent):
        def probe(self, *_):
            time.sleep(60)

    monkeypatch.setattr(module, "NodeAgent", Hangs)
    since = time.monotonic()
    nodes, reports = probe_cluster(MOONCAKE, 6.0)
    assert time.monotonic() - since < 6 + 2
    assert (len(nodes), reports) == (3, [])


def test_a_node_that_dies_on_the_way_is_missing_and_the_others_are_not(cluster):
    """Last: it takes a node away."""
    with Agents(alive_nodes()) as agents:
        _, before = probe_cluster(MOONCAKE, LIMIT, agents)
        doomed = cluster.list_all_nodes()[-1]
        cluster.remove_node(doomed, allow_graceful=False)
        since = time.monotonic()
        nodes, reports = probe_cluster(MOONCAKE, 8.0, agents)
        assert time.monotonic() - since < 8 + 2
        (lost,) = set(nodes) - {report.node_id for report in reports}
        assert lost == doomed.node_id
        assert len(before) == 3
        request = PeerRequest(mode="handshake", master="127.0.0.1:1", hostname="127.0.0.1")
        results = agents.run_peers({node_id: [request] for node_id in nodes}, 20.0)
    assert {node_id: result[0].check for node_id, result in results.items()} == {
        node_id: "report" if node_id == lost else "master" for node_id in nodes
    }
    deadline = time.monotonic() + 20
    while len(alive_nodes()) == 3 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert lost not in alive_nodes()
