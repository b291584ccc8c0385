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

from relax_tq_rdma.accounting.lines import parse_step_line
from relax_tq_rdma.summary import parse_start_line

pytestmark = [pytest.mark.integration, pytest.mark.timeout(360)]

SMALL = ["--steps", "2", "--prompts", "8", "--samples-per-prompt", "2", "--image-max-tokens", "24"]
"""Eight prompts: seven with a picture, one text only."""


PATIENT = ["--tq-init-timeout-seconds", "90"]
"""A slow machine is not what these tests are about."""

MOONCAKE = ["--tq-storage-backend", "mooncake", "--tq-mooncake-auto-init", "job-owned", *PATIENT]
ROWS = ["--tq-normalize-multimodal", "--tq-dedup-multimodal"]
POOL = ["--tq-host-staging", "--tq-host-staging-mb", "128", "--tq-batch-bytes-budget", "200000"]
SHARED = ["--rollout-group-share-processor", "--tq-dedup-share-view"]
EVERY_LAYER = [*MOONCAKE, *ROWS, *SHARED, *POOL, "--dataplane-accounting", "verbose"]


def command(*argv):
    return [sys.executable, "-m", "relax_tq_rdma.cli", "demo", *argv]


def run(*argv, env=None, code=0):
    done = subprocess.run(
        command(*argv), capture_output=True, text=True, timeout=300, check=False, env={**os.environ, **(env or {})}
    )
    assert done.returncode == code, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    return done


def document(*argv, env=None):
    return json.loads(run(*SMALL, "--json", *argv, env=env).stdout)


def payload(doc):
    return doc["losses"], [step["payload_digest"] for step in doc["steps"]], doc["payload_digest"]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Today's path against every layer: document, what was said on stderr, folder of JSON lines."""
    lines = tmp_path_factory.mktemp("accounting")
    done = run(*SMALL, "--compare", "--json", *EVERY_LAYER, env={"RTQ_ACCOUNTING_DIR": str(lines)})
    return json.loads(done.stdout), done.stderr, lines


@pytest.fixture(scope="module")
def plain(compared):
    """The run without a flag of the plugin: broadcasts, SimpleStorage, the demo's own Ray."""
    return compared[0]["today"]


@pytest.fixture(scope="module")
def cluster(ray_cluster):
    return ray_cluster([{}], cpus=3)


def test_the_document_has_what_it_promises(plain):
    assert plain["schema"] == "relax-tq-rdma/demo/1"
    assert plain["summary_line"].startswith("[dataplane] backend=SimpleStorage protocol=zmq")
    assert plain["decision"]["backend"] == "SimpleStorage"
    assert plain["decision"]["fallbacks"] == []
    assert len(plain["losses"]) == len(plain["steps"]) == 2
    assert len(set(plain["losses"])) == 2
    for number, step in enumerate(plain["steps"]):
        assert step["step"] == number
        assert step["rows"] == 16
        # 14 rows with a picture, two answers a picture: a little more than half the bytes are new
        assert step["bytes_total"] > 14 * 16 * 1176 * 4
        assert 0.5 <= step["bytes_unique"] / step["bytes_total"] < 0.52
        assert min(step["put_s"], step["get_s"], step["fanout_s"]) > 0
        assert step["step_s"] > step["get_s"] + step["fanout_s"]


def test_every_layer_on_mooncake_changes_no_bit_and_counts_what_the_job_counts(compared):
    doc, stderr, folder = compared
    assert doc["identical"] is True
    assert doc["differences"] == []
    assert payload(doc["today"]) == payload(doc["chosen"])
    line = parse_start_line(doc["chosen"]["summary_line"])
    assert (line["backend"], line["protocol"], line["verify"]) == (
        "MooncakeStore",
        "tcp",
        "1/1 round trips, wire=local",
    )
    assert (line["normalize"], line["dedup"], line["staging"], line["fallback"]) == ("on", "on", "on", "none")
    assert doc["chosen"]["decision"]["backend"] == "MooncakeStore"

    puts, gets = (
        [pairs for pairs in map(step_pairs, stderr.splitlines()) if f"{way}_bytes" in pairs] for way in ("put", "get")
    )
    for step, put, got in zip(doc["chosen"]["steps"], puts, gets, strict=True):
        assert put["step"] == got["step"] == f"train_{step['step']}"
        assert int(put["put_bytes"]) == int(got["get_bytes"]) == step["bytes_total"]
        assert int(put["unique_bytes"]) == step["bytes_unique"]
        # Two answers share a picture: the second one's payload does not travel, and nothing is pickled.
        copies = step["bytes_total"] - step["bytes_unique"]
        assert 0.9 * copies < int(put["put_saved_bytes"]) <= copies
        assert int(put["put_slow_bytes"]) == int(got["get_slow_bytes"]) == 0
        assert "raw_rows" not in put
    assert "per-rank fetch on, multimodal data on Mooncake with host staging" in stderr
    assert len(list(folder.glob("*.jsonl"))) == 3, "the producer's and each rank's"


def step_pairs(line):
    return parse_step_line(line) if line.startswith("[dataplane] step=train_") else {}


def test_rows_on_simple_storage_and_every_rank_for_itself_on_a_borrowed_cluster(plain, cluster):
    done = run(*SMALL, "--json", *ROWS, *PATIENT, "--per-rank-fetch", "--ray-address", cluster.address)
    assert "per-rank fetch on, the host's --per-rank-fetch is set" in done.stderr
    doc = json.loads(done.stdout)
    line = parse_start_line(doc["summary_line"])
    assert (line["backend"], line["normalize"], line["dedup"]) == ("SimpleStorage", "on", "on")
    assert payload(doc) == payload(plain)
    assert living_actors() == []


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


def test_too_few_cpus_are_a_sentence(cluster):
    done = run(*SMALL, "--ray-address", cluster.address, "--num-data-storage-units", "9", code=1)
    assert "TransferQueue needs 10 free CPUs" in done.stderr


def test_transfer_queue_0_1_10_on_plain_mooncake_and_data_parallel_cohorts_train_on_the_same_rows(plain, tq_0110):
    doc = document("--tp", "1", "--dp", "2", *MOONCAKE, env={"PYTHONPATH": str(tq_0110)})  # and no tests/fast_start
    assert doc["decision"]["backend"] == "MooncakeStore"
    assert doc["decision"]["protocol"] == "tcp"
    assert "verify: 1/1 round trips, wire=local" in doc["summary_line"]
    assert doc["payload_digest"] == plain["payload_digest"]
    # TP splits a sum that DP does not split: equal but for the last bits
    assert doc["losses"] == pytest.approx(plain["losses"], rel=1e-3)


@pytest.mark.parametrize(
    ("phase", "number", "whom", "flags"),
    [
        ("starting a local Ray", signal.SIGTERM, "group", []),
        ("starting TransferQueue", signal.SIGINT, "group", MOONCAKE),
        ("step 2/", signal.SIGTERM, "group", [*MOONCAKE, *ROWS, *POOL]),
        ("starting the rollout", signal.SIGKILL, "driver", MOONCAKE),
    ],
    ids=["start-of-ray", "start-of-mooncake", "step-on-mooncake", "killed"],
)
def test_a_stopped_demo_leaves_nothing(phase, number, whom, flags):
    """``group``: as a terminal's Ctrl-C or ``timeout`` do it; ``driver``: the process that holds Ray and the master."""
    front = subprocess.Popen(
        command("--steps", "1000", "--image-max-tokens", "24", "--tp", "1", *flags),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": "/tmp"},
    )
    try:
        said = wait_for(front, phase)
        time.sleep(1.5)
        (driver,) = psutil.Process(front.pid).children()
        family = [driver, *driver.children(recursive=True)]
        if whom == "group":
            os.killpg(front.pid, number)
        else:
            driver.send_signal(number)
        said += front.stdout.read()
        code = front.wait(timeout=30)
    finally:
        front.kill()
        front.wait()
    _, alive = psutil.wait_procs(family, timeout=15)
    assert [process.cmdline() for process in alive] == []
    assert "Traceback" not in said
    if number == signal.SIGKILL:
        assert code == 1
        assert "the job's driver was ended by SIGKILL" in said
        return  # nobody was left to remove its folder: the next start does (see test_demo_cluster.py)
    assert code == 128 + number
    assert list(Path("/tmp").glob(f"rtq-ray-{driver.pid}-*")) == []


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
