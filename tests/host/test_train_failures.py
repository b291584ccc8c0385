"""What goes wrong in a job under way: it ends or goes on as the host would, nothing hangs, nothing is left behind."""

import os
import signal
import time

import psutil
import pytest

from tests.host.standin.faults import marker_env
from tests.host.test_train_layers import EVERY_LAYER
from tests.host_jobs import HYBRID, SMALL

pytestmark = [pytest.mark.host, pytest.mark.timeout(400)]

SLOW = ["--standin-token-seconds", "1.5"]
"""Seconds between two tokens: the ranks wait for rows meanwhile."""


@pytest.fixture(scope="module")
def undisturbed(run_host):
    return run_host(*HYBRID, line="new").steps


def test_a_rank_killed_while_it_fetches_ends_the_job(start_host, host_cluster):
    """And a second job is refused while the first one runs: both would use one TransferQueue."""
    job = start_host(*SMALL, *HYBRID, *SLOW, *EVERY_LAYER, plugin=True, address=host_cluster)
    rank = until(job, lambda record: record["kind"] == "process" and record.get("rank") == 1)
    second = start_host(*SMALL, *HYBRID, *EVERY_LAYER, plugin=True, address=host_cluster).wait()
    assert second.code == 1
    assert "TransferQueueController" in second.output
    assert "Traceback" not in second.output
    assert job.process.poll() is None, job.log.read_text()

    os.kill(rank["pid"], signal.SIGKILL)
    done = job.wait(60)
    assert done.code == 1
    assert [failure["role"] for failure in done.kind("failure")] == ["actor"]
    gone(done)


RANK = ["--custom-megatron-before-train-step-hook-path", "faults.kill_last_rank"]
PRODUCER = ["--rollout-function-path", "faults.dying_rollout"]


@pytest.mark.parametrize("fault", [RANK, pytest.param(PRODUCER, marks=pytest.mark.host_full)], ids=["rank", "producer"])
def test_a_global_restart_goes_on_with_the_same_bits(start_host, host_cluster, undisturbed, tmp_path, fault):
    """The constructor of the controller runs a second time in the driver, with a new Ray connection."""
    done = start_host(
        *SMALL,
        *HYBRID,
        *EVERY_LAYER,
        *fault,
        *("--use-fault-tolerance", "--save", str(tmp_path / "checkpoints")),
        plugin=True,
        address=host_cluster,
        env=marker_env(tmp_path),
    ).wait()
    assert done.code == 0, done.output[-4000:]
    assert len(done.kind("restart")) == 1
    last = {step["step"]: step for step in done.steps}  # a step after the checkpoint is taken again
    assert list(last.values()) == undisturbed
    assert done.output.count("[dataplane] backend=MooncakeStore") == 2
    gone(done)


def until(job, wanted, seconds=90):
    """The first record that fits."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        found = next((record for record in job.records() if wanted(record)), None)
        if found is not None:
            return found
        assert job.process.poll() is None, job.log.read_text()[-4000:]
        time.sleep(0.2)
    raise AssertionError(f"nothing of that kind within {seconds} s: {job.log.read_text()[-4000:]}")


def gone(done, seconds=20):
    """Every process that noted something has ended, and so has the job's Mooncake master."""
    pids = {record["pid"] for record in done.records}
    ends = time.monotonic() + seconds
    while pids and time.monotonic() < ends:
        pids = {pid for pid in pids if psutil.pid_exists(pid) and not _zombie(pid)}
        time.sleep(0.2)
    assert not pids
    token = os.environ["RTQ_TEST_SESSION"]
    assert not [p.pid for p in psutil.process_iter() if _is_master_of(p, token)]


def _zombie(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _is_master_of(process, token):
    try:
        return "mooncake_master" in process.name() and process.environ().get("RTQ_TEST_SESSION") == token
    except psutil.Error:
        return False
