"""The stand-in itself: it trains, in every mode of both lines, and a run repeats bit by bit."""

import pytest

from tests.host_jobs import ASYNC, COLOCATE, HYBRID

pytestmark = [pytest.mark.host, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def asynchronous(run_host):
    return run_host(*ASYNC, line="new")


def test_a_job_trains_on_pictures_and_text(asynchronous):
    steps = asynchronous.steps
    assert [step["samples"] for step in steps] == [list(range(8)), list(range(8, 16))]
    assert all(step["grad_norm"] > 0 for step in steps)
    assert len({step["pixel_digest"] for step in steps}) == 2
    phases = asynchronous.kind("rollout")[0]
    assert phases["perf_detail/rollout/image_processor_time/mean"] > 0


def test_the_other_line_trains_on_the_same_rows(run_host, asynchronous):
    """Other sampler, other columns, other micro-batches: the same pixels, losses and gradients."""
    other = run_host(*ASYNC, line="mid")
    assert [_learned(step) for step in other.steps] == [_learned(step) for step in asynchronous.steps]


@pytest.mark.parametrize(("line", "mode"), [("mid", HYBRID), ("new", COLOCATE)], ids=["hybrid", "colocate"])
def test_the_other_modes_train(run_host, asynchronous, line, mode):
    run = run_host(*mode, line=line)
    assert [step["samples"] for step in run.steps] == [step["samples"] for step in asynchronous.steps]
    assert run.steps[0]["pixel_digest"] == asynchronous.steps[0]["pixel_digest"]


def test_several_puts_a_rollout_and_recomputed_log_probs(run_host, asynchronous):
    """Two data-parallel ranks, whose groups are split over them, and TransferQueue's own streaming loader."""
    run = run_host(*ASYNC[:3], "--global-batch-size", "4", "--tensor-model-parallel-size", "1", line="new")
    assert [step["samples"] for step in run.steps] == [step["samples"] for step in asynchronous.steps]
    assert [step["pixel_digest"] for step in run.steps] == [step["pixel_digest"] for step in asynchronous.steps]


def _learned(step):
    return {name: step[name] for name in ("loss", "grad_norm", "reward", "pixel_digest")}
