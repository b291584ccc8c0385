"""``relax-tq-rdma doctor --cluster`` on a real four-node Ray cluster whose nodes have made-up hardware."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import StartCluster
from tests.fake_tree import healthy

pytestmark = pytest.mark.integration

MOONCAKE = ["--tq-storage-backend", "mooncake", "--tq-mooncake-auto-init", "job-owned"]
AUTO = [*MOONCAKE, "--tq-transport", "rdma", "--tq-rdma-mode", "auto"]


@pytest.fixture(scope="module")
def address(ray_cluster: StartCluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two good nodes, one with its port down, one with 64 KiB of lockable memory."""
    folder = tmp_path_factory.mktemp("roots")
    trees = [healthy(folder / str(number), ip=f"10.0.0.{number + 1}") for number in range(4)]
    trees[1].port_state("1: DOWN")
    trees[3].memlock(65536)
    cluster = ray_cluster([{"RTQ_SYSTEM_ROOT": str(tree.root)} for tree in trees])
    return str(cluster.address)


def doctor(address: str, *argv: str) -> tuple[int, dict[str, Any], str]:
    done = subprocess.run(
        [sys.executable, "-m", "relax_tq_rdma.cli", "doctor", "--json", "--cluster", *argv],
        env={**os.environ, "RAY_ADDRESS": address},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


def test_every_node_is_looked_at_and_the_worst_one_decides(address: str) -> None:
    code, out, err = doctor(address, *AUTO)
    assert code == 0, err
    assert len({node["node"] for node in out["nodes"]}) == 4
    assert [seam["ok"] for seam in out["seams"]] == [True, True]
    found = [{c["name"]: c["status"] for c in node["checks"]} for node in out["nodes"]]
    assert sorted(f["rdma_port"] for f in found) == ["missing", "ok", "ok", "ok"]
    assert sorted(f["memlock"] for f in found) == ["missing", "ok", "ok", "ok"]
    assert {f["reachability"] for f in found} == {"ok"}, [n["checks"] for n in out["nodes"]]
    (step,) = out["decision"]["fallbacks"]
    assert (step["from"], step["to"]) == ("MooncakeStore/rdma", "MooncakeStore/tcp")
    blamed = next(node for node in out["nodes"] if node["node"] == step["node"])
    assert {c["name"]: c["status"] for c in blamed["checks"]}[step["check"]] == "missing"


def test_required_names_all_failing_nodes(address: str) -> None:
    code, out, _ = doctor(address, *AUTO, "--tq-rdma-mode", "required")
    assert code == 1
    bad = [n["node"] for n in out["nodes"] if any(c["status"] == "missing" for c in n["checks"])]
    assert len(bad) == 2
    assert all(name in out["refusal"] for name in bad)


def test_a_job_that_asks_for_nothing(address: str) -> None:
    code, out, _ = doctor(address)
    assert code == 0
    assert len(out["nodes"]) == len(out["capabilities"]) == 4
    assert {c["status"] for node in out["nodes"] for c in node["checks"]} == {"skipped"}


def test_no_cluster_is_one_sentence_and_soon(tmp_path: Path) -> None:
    start = time.monotonic()
    code, _, err = doctor("127.0.0.1:1", *AUTO)
    assert code == 1
    assert time.monotonic() - start < 30
    assert err == (
        "relax-tq-rdma: error: RAY_ADDRESS names no running Ray cluster: 127.0.0.1:1: connection refused; "
        "start one (ray start --head), or correct RAY_ADDRESS\n"
    )
