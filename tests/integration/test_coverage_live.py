"""The worker hook and the check of every node on a real Ray of two nodes, one of which has no usable plugin."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from relax_tq_rdma import StartError, __version__
from relax_tq_rdma.coverage.nodes import require_plugin
from relax_tq_rdma.seams.worker_hook import HOOK, WorkerHook

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

SECONDS = 60.0


@pytest.fixture(scope="module")
def address(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two nodes; on the second another package of that name comes first when a worker starts."""
    folder = tmp_path_factory.mktemp("broken") / "relax_tq_rdma"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise ImportError('this node was forgotten')\n")
    broken = os.pathsep.join([str(folder.parent), os.environ.get("PYTHONPATH", "")])
    return str(ray_cluster([{"ON_NODE": "good"}, {"ON_NODE": "forgotten", "PYTHONPATH": broken}]).address)


@pytest.fixture(scope="module")
def hooked(address: str) -> Iterator[None]:
    """The driver is connected once more, as a job of the plugin is, which had a hook of its own."""
    ray.shutdown()
    seam = WorkerHook({"RTQ_SEGMENT_MB": "7"})
    seam.apply()
    try:
        ray.init(address, log_to_driver=False, runtime_env={HOOK: _their_hook(), "env_vars": {"OF_THE_JOB": "1"}})
        yield
    finally:
        seam.remove()


def _their_hook() -> Any:
    def hook() -> None:
        import os

        os.environ["THEIR_HOOK_RAN"] = "1"

    return hook


def _environment() -> Any:
    def look() -> dict[str, str]:
        import os

        names = ("ON_NODE", "RTQ_SEGMENT_MB", "OF_THE_JOB", "THEIR_HOOK_RAN")
        return {name: os.environ.get(name, "") for name in names}

    return look


def test_without_a_hook_the_start_is_refused_with_the_reason(address: str) -> None:
    with pytest.raises(StartError) as refused:
        require_plugin(SECONDS)
    said = str(refused.value)
    assert said.startswith("the workers of 2 of 2 nodes have no relax-tq-rdma: ")
    assert "call relax_tq_rdma.install(args) before ray.init" in said


def test_with_the_hook_only_the_node_without_the_plugin_is_named_and_its_workers_live(hooked: None) -> None:
    with pytest.raises(StartError) as refused:
        require_plugin(SECONDS)
    said = str(refused.value)
    assert said.startswith("the workers of 1 of 2 nodes have no relax-tq-rdma: ")
    assert f"ImportError: this node was forgotten; install relax-tq-rdma {__version__} there" in said


def test_every_worker_gets_the_variables_and_both_hooks(hooked: None) -> None:
    look = ray.remote(num_cpus=0)(_environment())
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    refs = [
        look.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
            runtime_env={"env_vars": {"OF_THE_ACTOR": "1"}},  # as the host sets it for each of its actors
        ).remote()
        for node in nodes
    ]
    seen = {found["ON_NODE"]: found for found in ray.get(refs, timeout=SECONDS)}
    assert set(seen) == {"good", "forgotten"}
    for found in seen.values():
        assert (found["RTQ_SEGMENT_MB"], found["OF_THE_JOB"], found["THEIR_HOOK_RAN"]) == ("7", "1", "1")
