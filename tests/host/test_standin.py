"""The stand-in itself: without the plugin, what the other tests compare with."""

import pytest

from tests.host_jobs import ASYNC

pytestmark = [pytest.mark.host, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def job(run_host):
    """The older line on two data-parallel ranks: two puts a rollout, log-probs recomputed, TransferQueue's loader."""
    return run_host(*ASYNC[:3], "--global-batch-size", "4", "--tensor-model-parallel-size", "1", line="mid")


def test_a_job_trains_on_every_row_once(job):
    assert [step["samples"] for step in job.steps] == [list(range(8)), list(range(8, 16))]
    assert all(step["grad_norm"] > 0 for step in job.steps)
    assert len({step["loss"] for step in job.steps}) == len({step["pixel_digest"] for step in job.steps}) == 2


def test_it_runs_in_the_processes_of_the_host(job):
    ranks = [(process["role"], process["rank"]) for process in job.kind("process")]
    assert sorted(ranks) == [("actor", 0), ("actor", 1), ("actor_fwd", 0), ("rollout_manager", 0)]
    assert len({process["pid"] for process in job.kind("process")}) == len(ranks)


def test_the_processor_runs_for_every_member_of_a_group(job):
    first = job.kind("rollout")[0]
    assert first["attributes"] == []
    phase = "perf_detail/rollout/image_processor_time"
    assert first[f"{phase}/max"] >= first[f"{phase}/mean"] > 0


def test_without_the_launcher_there_is_no_plugin(job):
    assert "[dataplane]" not in job.output
