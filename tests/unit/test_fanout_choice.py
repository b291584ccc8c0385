"""--tq-per-rank-fetch against the host's bare switch (RFC §4.5, §4.7)."""

import pytest

from relax_tq_rdma.fanout.choice import resolve_per_rank_fetch
from relax_tq_rdma.settings import Settings
from relax_tq_rdma.summary import UNTOUCHED

SIMPLE = Settings()
STAGED = Settings(storage_backend="mooncake", host_staging=True)
UNSTAGED = Settings(storage_backend="mooncake")


@pytest.mark.parametrize(
    ("settings", "host", "multimodal", "on", "why"),
    [
        (SIMPLE, False, True, False, "the host's --per-rank-fetch is not set"),
        (SIMPLE, True, True, True, "the host's --per-rank-fetch is set"),
        (STAGED, False, True, True, "multimodal data on Mooncake with host staging"),
        (STAGED, False, False, False, "no multimodal data on Mooncake, and the host's --per-rank-fetch is not set"),
        (STAGED, True, False, True, "the host's --per-rank-fetch is set"),
        (UNSTAGED, False, True, False, "no host staging on Mooncake, and the host's --per-rank-fetch is not set"),
        (UNSTAGED, True, True, True, "the host's --per-rank-fetch is set"),
    ],
)
def test_auto_follows_the_backend(settings, host, multimodal, on, why):
    choice = resolve_per_rank_fetch(settings, host_switch=host, multimodal=multimodal)
    assert (choice.on, choice.why) == (on, why)


@pytest.mark.parametrize("host", [True, False])
def test_host_means_the_host_also_with_staging(host):
    settings = Settings(storage_backend="mooncake", host_staging=True, per_rank_fetch="host")
    assert resolve_per_rank_fetch(settings, host_switch=host, multimodal=True).on is host


@pytest.mark.parametrize("said", ["on", "off"])
@pytest.mark.parametrize("host", [True, False])
def test_on_and_off_win_over_the_host(said, host):
    choice = resolve_per_rank_fetch(Settings(per_rank_fetch=said), host_switch=host, multimodal=False)
    assert (choice.on, choice.why) == (said == "on", f"--tq-per-rank-fetch {said}")


def test_routed_experts_always_win():
    for settings in (Settings(per_rank_fetch="on"), STAGED, SIMPLE):
        choice = resolve_per_rank_fetch(settings, host_switch=True, multimodal=True, routed_experts=True)
        assert not choice.on
        assert "rollout_routed_experts" in choice.why


def test_a_job_that_fell_back_to_simple_storage_follows_its_rule():
    assert resolve_per_rank_fetch(STAGED, host_switch=False, multimodal=True).on
    fell_back = resolve_per_rank_fetch(STAGED, host_switch=False, multimodal=True, decision=UNTOUCHED)
    assert (fell_back.on, fell_back.why) == (False, "the host's --per-rank-fetch is not set")
