"""A real four-node Ray cluster on this machine; each node inspects a made-up system root of its own.

Three nodes are good, the fourth is different in one way at a time. In ``auto`` the whole job takes the same lower rung
and the record names node and check; in ``required`` the start is refused naming them (RFC §4.2.3, §4.8; FC-09).
"""

import os
import shutil
from pathlib import Path

import psutil
import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import relax_tq_rdma
from relax_tq_rdma import Settings, StartError
from relax_tq_rdma.summary import parse_start_line
from relax_tq_rdma.transport import controller
from relax_tq_rdma.transport.agents import Agents, alive_nodes, probe_cluster
from relax_tq_rdma.transport.decision import Refusal, decide
from relax_tq_rdma.transport.report import Decision
from tests.fake_tree import healthy

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

LIMIT = 60.0
FLAGS = [
    *("--tq-storage-backend", "mooncake", "--tq-mooncake-auto-init", "job-owned"),
    *("--tq-transport", "rdma", "--tq-rdma-device", "mlx5_0", "--tq-init-timeout-seconds", str(LIMIT)),
]
AUTO = Settings.from_flags([*FLAGS, "--tq-rdma-mode", "auto"])
REQUIRED = Settings.from_flags([*FLAGS, "--tq-rdma-mode", "required"])
RDMA, TCP, SIMPLE = "MooncakeStore/rdma", "MooncakeStore/tcp", "SimpleStorage/zmq"


class FourNodes:
    """The cluster. ``odd`` is the node whose root a test changes; ``site`` is first on its workers' PYTHONPATH."""

    def __init__(self, folder: Path, start) -> None:
        self.roots = [folder / f"root{i}" for i in range(4)]
        self.site = folder / "site"
        self.site.mkdir()
        for i in range(4):
            self.mend(i)
        environments = [{"RTQ_SYSTEM_ROOT": str(root), "RTQ_SEGMENT_MB": "64"} for root in self.roots]
        environments[3]["PYTHONPATH"] = f"{self.site}:{os.environ.get('PYTHONPATH', '')}"
        start(environments)
        self.nodes = alive_nodes()
        self.odd = next(i for i in self.nodes if self.root_of(i) == str(self.roots[3]))
        self.agents = Agents(self.nodes)

    def mend(self, index: int = 3):
        """A good tree again."""
        shutil.rmtree(self.roots[index], ignore_errors=True)
        tree = healthy(self.roots[index], ip=f"10.0.0.{index + 1}")
        tree.write("sys/class/net/eth0/operstate", "up")
        return tree

    def root_of(self, node_id: str) -> str:
        where = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
        read = ray.remote(num_cpus=0, scheduling_strategy=where)(lambda: os.environ.get("RTQ_SYSTEM_ROOT"))
        return ray.get(read.remote(), timeout=60)

    def decide(self, settings: Settings) -> Decision | Refusal:
        nodes, reports = probe_cluster(settings, LIMIT, self.agents)
        assert len(reports) == 4
        return decide(settings, reports, nodes)

    @property
    def odd_name(self) -> str:
        return self.nodes[self.odd].name


@pytest.fixture(scope="module")
def four_nodes(ray_cluster, tmp_path_factory):
    four = FourNodes(tmp_path_factory.mktemp("nodes"), ray_cluster)
    yield four
    four.agents.close()


@pytest.fixture
def tree(four_nodes):
    """The odd node's tree, good again when the test is over."""
    yield four_nodes.mend()
    for entry in four_nodes.site.iterdir():
        entry.unlink()
    four_nodes.mend()


def test_four_good_nodes_take_the_rung_that_was_asked_for(four_nodes):
    assert four_nodes.decide(AUTO) == Decision(backend="MooncakeStore", protocol="rdma", device="mlx5_0")


BROKEN = {
    "no RDMA": ("rdma_device", lambda tree: tree.without_rdma()),
    "port DOWN": ("rdma_port", lambda tree: tree.port_state("1: DOWN")),
    "all-zero GIDs": ("rdma_gid", lambda tree: tree.zero_gids()),
    "64 KiB memlock": ("memlock", lambda tree: tree.memlock(65536)),
    "named device missing": ("rdma_device", lambda tree: tree.without_rdma().hca("mlx5_7", ip="10.0.0.4")),
}


@pytest.mark.parametrize("name", BROKEN)
def test_one_node_without_rdma_takes_all_to_tcp_or_refuses(four_nodes, tree, name):
    check, damage = BROKEN[name]
    damage(tree)
    decision = four_nodes.decide(AUTO)
    assert isinstance(decision, Decision)
    assert decision.rung == TCP
    (step,) = decision.fallbacks
    assert (step.from_, step.to, step.node, step.check) == (RDMA, TCP, four_nodes.odd_name, check)

    refusal = four_nodes.decide(REQUIRED)
    assert isinstance(refusal, Refusal)
    assert four_nodes.odd_name in refusal.message
    assert check in refusal.message


def test_another_mooncake_version_takes_all_to_simple_storage(four_nodes, tree, mooncake_0310):
    for entry in mooncake_0310.iterdir():
        (four_nodes.site / entry.name).symlink_to(entry)
    decision = four_nodes.decide(AUTO)
    assert isinstance(decision, Decision)
    assert decision.rung == SIMPLE
    assert (decision.fallbacks[-1].node, decision.fallbacks[-1].check) == (four_nodes.odd_name, "mooncake")
    assert "0.3.10" in decision.fallbacks[-1].reason

    refusal = four_nodes.decide(REQUIRED)
    assert isinstance(refusal, Refusal)
    assert "mooncake" in refusal.message
    assert four_nodes.odd_name in refusal.message


# --- the whole start, on the same cluster -----------------------------------------------------------------------------


def own_masters() -> list[psutil.Process]:
    """Masters that this test session started."""
    token = os.environ["RTQ_TEST_SESSION"]
    masters = [p for p in psutil.process_iter(["name"]) if p.info["name"] == "mooncake_master"]
    return [p for p in masters if p.environ().get("RTQ_TEST_SESSION") == token]


@pytest.fixture
def no_job_left(four_nodes):
    """The test leaves no controller and no master behind."""
    yield
    relax_tq_rdma.uninstall()
    assert controller.find() is None
    assert own_masters() == []


def test_the_whole_job_runs_on_the_lower_rung_and_every_node_obeys(four_nodes, tree, no_job_left, capfd):
    import transfer_queue as tq

    def join():
        """Run in a fresh process of a node: what a worker of the job finds there."""
        import transfer_queue as tq

        import relax_tq_rdma

        relax_tq_rdma.install()
        tq.init()
        client = tq.get_client().storage_manager.storage_client
        section = client.config["relax_tq_rdma"]
        return {"decision": section["decision"], "protocol": client.protocol, "class": type(client).__name__}

    tree.port_state("1: DOWN")
    relax_tq_rdma.install(AUTO)
    tq.init(conf=None)
    try:
        line = next(line for line in capfd.readouterr().err.splitlines() if "(probe:" in line)
        shown = parse_start_line(line)
        assert (shown["backend"], shown["protocol"], shown["probe"]) == ("MooncakeStore", "tcp", "4/4 nodes ok")
        assert shown["verify"].startswith("4/4 round trips, wire=")
        assert f"{RDMA}>{TCP}@" in shown["fallback"]
        assert "rdma_port" in shown["fallback"]
        answers = [
            ray.remote(num_cpus=0, max_calls=1)(join)
            .options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=False))
            .remote()
            for node_id in (four_nodes.odd, next(i for i in four_nodes.nodes if i != four_nodes.odd))
        ]
        first, second = ray.get(answers, timeout=120)
        assert first == second
        assert first["protocol"] == "tcp"
        assert first["decision"]["fallbacks"][0]["check"] == "rdma_port"
    finally:
        tq.close()


def test_required_refuses_names_node_and_check_and_leaves_nothing(four_nodes, tree, no_job_left):
    import transfer_queue as tq

    tree.port_state("1: DOWN")
    relax_tq_rdma.install(REQUIRED)
    with pytest.raises(StartError) as refused:
        tq.init(conf=None)
    assert four_nodes.odd_name in str(refused.value)
    assert "rdma_port" in str(refused.value)
