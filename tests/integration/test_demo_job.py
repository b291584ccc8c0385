"""The demo as a user runs it: whole jobs in processes of their own, on real Ray and real TransferQueue."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

SMALL = ["--steps", "2", "--prompts", "8", "--samples-per-prompt", "2", "--image-max-tokens", "24"]
"""Eight prompts: seven with a picture, one text only."""


def command(*argv):
    return [sys.executable, "-m", "relax_tq_rdma.cli", "demo", *argv]


def run(*argv, env=None, code=0):
    done = subprocess.run(
        command(*argv), capture_output=True, text=True, timeout=200, check=False, env={**os.environ, **(env or {})}
    )
    assert done.returncode == code, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    return done


def document(*argv, env=None):
    return json.loads(run(*SMALL, "--json", *argv, env=env).stdout)


def payload(doc):
    return doc["losses"], [step["payload_digest"] for step in doc["steps"]], doc["payload_digest"]


@pytest.fixture(scope="module")
def plain():
    """Today's path with broadcasts, on the demo's own Ray: result and everything said on stderr."""
    done = run(*SMALL, "--json")
    return json.loads(done.stdout), done.stderr


@pytest.fixture(scope="module")
def cluster(ray_cluster):
    return ray_cluster([{}], cpus=3)


def test_the_document_is_the_only_thing_on_stdout(plain):
    doc, stderr = plain
    assert doc["schema"] == "relax-tq-rdma/demo/1"
    assert doc["summary_line"].startswith("[dataplane] backend=SimpleStorage protocol=zmq")
    assert doc["decision"]["backend"] == "SimpleStorage"
    assert doc["decision"]["fallbacks"] == []
    assert len(doc["losses"]) == len(doc["steps"]) == 2
    assert len(set(doc["losses"])) == 2
    for number, step in enumerate(doc["steps"]):
        assert step["step"] == number
        assert step["rows"] == 16
        # 14 rows with a picture, two answers a picture: a little more than half the bytes are new
        assert step["bytes_total"] > 14 * 16 * 1176 * 4
        assert 0.5 <= step["bytes_unique"] / step["bytes_total"] < 0.52
        assert min(step["put_s"], step["get_s"], step["fanout_s"]) > 0
        assert step["step_s"] > step["get_s"] + step["fanout_s"]
    assert "training 2 steps" in stderr
    assert "step 2/2" in stderr


def test_every_rank_for_itself_trains_the_same_on_a_borrowed_cluster(plain, cluster):
    doc = document("--per-rank-fetch", "--ray-address", cluster.address)
    assert "per_rank_fetch=on" in doc["summary_line"]
    assert payload(doc) == payload(plain[0])
    assert living_actors() == []


def test_data_parallel_cohorts_train_on_the_same_rows(plain, cluster):
    doc = document("--tp", "1", "--dp", "2", "--max-staleness", "1", "--ray-address", cluster.address)
    assert doc["payload_digest"] == plain[0]["payload_digest"]
    assert doc["losses"] == pytest.approx(plain[0]["losses"], rel=1e-3)


def test_a_healthy_foreign_controller_is_refused_and_left_alone(cluster):
    import ray

    @ray.remote(num_cpus=0)
    class Stranger:
        def alive(self):
            return True

    stranger = Stranger.options(name="TransferQueueController", namespace="transfer_queue").remote()
    assert ray.get(stranger.alive.remote(), timeout=30)
    done = run(*SMALL, "--ray-address", cluster.address, code=1)
    assert "already runs a TransferQueue" in done.stderr
    assert ray.get(stranger.alive.remote(), timeout=30)
    ray.kill(stranger)


def test_too_few_cpus_and_dead_addresses_are_sentences(cluster):
    done = run(*SMALL, "--ray-address", cluster.address, "--num-data-storage-units", "9", code=1)
    assert "TransferQueue needs 10 free CPUs" in done.stderr
    done = run(*SMALL, "--ray-address", "127.0.0.1:1", code=1)
    assert "no Ray cluster answers at 127.0.0.1:1 (Connection refused)" in done.stderr


def test_the_demo_runs_on_transfer_queue_0_1_10(plain, tq_0110):
    doc = document(env={"PYTHONPATH": str(tq_0110)})
    assert payload(doc) == payload(plain[0])


@pytest.mark.parametrize(
    ("phase", "number", "to_group"),
    [
        ("starting a local Ray", signal.SIGTERM, False),
        ("connecting the rollout", signal.SIGINT, True),
        ("step 2/", signal.SIGINT, True),
        ("step 2/", signal.SIGKILL, False),
    ],
)
def test_a_stopped_demo_leaves_nothing(phase, number, to_group):
    child = subprocess.Popen(
        command("--steps", "1000", "--image-max-tokens", "24"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # Ctrl-C in a terminal reaches the whole group
        env={**os.environ, "TMPDIR": "/tmp"},
    )
    try:
        said = wait_for(child, phase)
        time.sleep(1.0)
        family = [psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)]
        (os.killpg if to_group else os.kill)(child.pid, number)
        said += child.stdout.read()
        code = child.wait(timeout=30)
    finally:
        child.kill()
        child.wait()
    _, alive = psutil.wait_procs(family, timeout=15)
    assert [process.cmdline() for process in alive] == []
    assert "Traceback" not in said
    if number == signal.SIGKILL:
        return  # nobody is left to remove the folder: the next start does (see test_demo_cluster.py)
    # CPython itself ends by SIGINT when the signal fell into an eval() of some import.
    assert code in ({130, -signal.SIGINT} if number == signal.SIGINT else {143})
    assert list(Path("/tmp").glob(f"rtq-ray-{child.pid}-*")) == []


def wait_for(child, phase):
    said = ""
    for line in child.stdout:
        said += line
        if phase in line:
            return said
    pytest.fail(f"the demo ended before {phase!r}:\n{said[-3000:]}")


def living_actors():
    from ray.util import list_named_actors

    return list_named_actors(all_namespaces=True)
