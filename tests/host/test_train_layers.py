"""``relax-tq-rdma train`` on the stand-in: every layer alone and all together change no loss, gradient, reward, text or
pixel of a job, on both lines of the host and in each of its modes."""

import pytest

from relax_tq_rdma.summary import parse_start_line
from tests.host_jobs import ASYNC, COLOCATE, HYBRID

pytestmark = [pytest.mark.host, pytest.mark.timeout(400)]

PATIENT = ["--tq-init-timeout-seconds", "90"]
"""A slow machine is not what these tests are about."""

MOONCAKE = ["--tq-storage-backend", "mooncake", "--tq-mooncake-auto-init", "job-owned", *PATIENT]
COUNT = ["--dataplane-accounting", "summary"]
ROWS = ["--tq-normalize-multimodal"]
DEDUP = [*ROWS, "--tq-dedup-multimodal"]
SHARE = ["--rollout-group-share-processor"]
PER_RANK = ["--tq-per-rank-fetch", "on", "--tq-allow-unstaged-per-rank-fetch"]
POOL = ["--tq-host-staging", "--tq-host-staging-mb", "128", "--tq-batch-bytes-budget", "200000"]

EVERY_SIMPLE_LAYER = [*COUNT, *DEDUP, *SHARE, *PER_RANK]
EVERY_LAYER = [*MOONCAKE, *EVERY_SIMPLE_LAYER, *POOL]
TWO_SHARDS = ["--tensor-model-parallel-size", "1", "--global-batch-size", "4"]
RELOADING = ["--rollout-function-path", "faults.reloading_rollout"]

MODES = {"async": ASYNC, "hybrid": HYBRID, "colocate": COLOCATE}
LAYERS = {
    "L0": COUNT,
    "L1": MOONCAKE,
    "L2": ROWS,
    "L2-mooncake": [*MOONCAKE, *ROWS],
    "L3a": SHARE,
    "L3b": DEDUP,
    "L3b-mooncake": [*MOONCAKE, *DEDUP],
    "L4": PER_RANK,
    "L4-mooncake": [*MOONCAKE, *PER_RANK],
    "L5": [*MOONCAKE, *POOL],
    "all-simple": EVERY_SIMPLE_LAYER,
    "all": EVERY_LAYER,
}


@pytest.fixture(scope="module")
def reference(run_host):
    """The job without the plugin, once for each line and mode."""
    known = {}

    def of(line, mode):
        if (line, mode) not in known:
            known[line, mode] = run_host(*MODES[mode], line=line)
        return known[line, mode]

    return of


@pytest.fixture(scope="module")
def every_layer(run_host):
    """All layers on the newest line, and the rollout's module reloaded between two rollouts."""
    return run_host(*ASYNC, *EVERY_LAYER, *RELOADING, line="new", plugin=True)


def test_every_layer_at_once_changes_nothing_that_is_learned(every_layer, reference):
    assert every_layer.steps == reference("new", "async").steps


def test_the_start_line_says_what_runs(every_layer):
    said = parse_start_line(every_layer.start_line)
    assert (said["backend"], said["protocol"], said["fallback"]) == ("MooncakeStore", "tcp", "none")
    assert (said["normalize"], said["dedup"], said["staging"]) == ("on", "on", "on")
    assert said["per_rank_fetch"] == "on:x2"


def test_the_processor_runs_once_a_group_also_after_a_reload(every_layer, reference):
    """Four groups with pictures, then three. Of two members one waits, and reports no time."""
    shared, alone = every_layer.kind("rollout"), reference("new", "async").kind("rollout")
    assert [rollout["processor_calls"] for rollout in alone] == [8, 14]
    assert [rollout["processor_calls"] for rollout in shared] == [4, 7]
    phase = "perf_detail/rollout/image_processor_time"
    assert all(rollout[f"{phase}/mean"] <= rollout[f"{phase}/max"] / 2 + 1e-3 for rollout in shared)
    assert [rollout["attributes"] for rollout in shared] == [[], []]


def test_every_rank_fetched_for_itself(every_layer):
    perf = every_layer.kind("perf")
    assert all("perf/per_rank_fetch_time" in record for record in perf)
    assert not any("perf/tgd_bcast_tp_time" in record for record in perf)


def test_the_other_line_in_the_other_mode(run_host, reference):
    run = run_host(*HYBRID, *EVERY_SIMPLE_LAYER, line="mid", plugin=True)
    assert run.steps == reference("mid", "hybrid").steps
    assert parse_start_line(run.start_line)["per_rank_fetch"] == "on:x2"


def test_groups_split_over_data_parallel_ranks_and_puts(run_host, reference):
    """A row and the one it refers to are read by different ranks, log-probs are written back."""
    run = run_host(*ASYNC[:3], *TWO_SHARDS, *EVERY_LAYER, line="new", plugin=True)
    for ours, theirs in zip(run.steps, reference("new", "async").steps, strict=True):
        assert (ours["samples"], ours["pixel_digest"]) == (theirs["samples"], theirs["pixel_digest"])


@pytest.mark.host_full
def test_colocate_is_left_alone_and_says_so(run_host):
    run = run_host(*COLOCATE, *ROWS, "--num-rollout", "1", line="new", plugin=True)
    assert len(run.steps) == 1
    assert "colocate" in run.output
    assert parse_start_line(run.start_line)["normalize"] == "off"


@pytest.mark.host_full
@pytest.mark.parametrize("line", ["mid", "new"])
@pytest.mark.parametrize("mode", ["async", "hybrid"])
@pytest.mark.parametrize("layer", list(LAYERS))
def test_each_layer_alone(run_host, reference, line, mode, layer):
    run = run_host(*MODES[mode], *LAYERS[layer], line=line, plugin=True)
    assert run.steps == reference(line, mode).steps
    mooncake = MOONCAKE[0] in LAYERS[layer]
    assert parse_start_line(run.start_line)["backend"] == ("MooncakeStore" if mooncake else "SimpleStorage")
