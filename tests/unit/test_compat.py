"""Every row of the compatibility matrix, by the flags a user types (RFC §4.7 and design §4)."""

import pytest

from relax_tq_rdma import Settings, UsageError, compat
from relax_tq_rdma.compat import HostFacts
from relax_tq_rdma.flags import FLAGS

MOONCAKE = ["--tq-storage-backend", "mooncake", "--tq-mooncake-auto-init", "job-owned"]
RDMA = [*MOONCAKE, "--tq-transport", "rdma", "--tq-rdma-mode", "auto"]


def verdicts(argv, host=None, flags=None):
    found = compat.findings(Settings.from_flags(argv), host)
    return {f.verdict for f in found if flags is None or set(flags) <= set(f.flags)}


@pytest.mark.parametrize(
    ("argv", "flags"),
    [
        (["--tq-dedup-multimodal"], ("--tq-dedup-multimodal", "--tq-normalize-multimodal")),
        (["--tq-transport", "rdma"], ("--tq-transport", "--tq-storage-backend")),
        ([*MOONCAKE, "--tq-use-gdr"], ("--tq-use-gdr", "--tq-transport")),
        (["--tq-storage-backend", "mooncake"], ("--tq-storage-backend", "--tq-mooncake-master-address")),
        (
            [*MOONCAKE, "--tq-mooncake-master-address", "h:1"],
            ("--tq-mooncake-master-address", "--tq-mooncake-auto-init"),
        ),
        (["--tq-rdma-mode", "required"], ("--tq-rdma-mode", "--tq-storage-backend")),
        (
            [*MOONCAKE, "--tq-per-rank-fetch", "on"],
            ("--tq-per-rank-fetch", "--tq-host-staging", "--tq-allow-unstaged-per-rank-fetch"),
        ),
    ],
)
def test_reject_names_both_flags_and_the_way_out(argv, flags):
    assert "reject" in verdicts(argv, flags=flags)
    with pytest.raises(UsageError) as err:
        compat.check(Settings.from_flags(argv))
    text = str(err.value)
    assert all(flag in text for flag in flags)
    rules = [r for r in compat.RULES if r.verdict == "reject" and set(flags) <= set(r.flags)]
    assert any(r.message in text and r.way_out in text for r in rules)


@pytest.mark.parametrize(
    ("argv", "flags", "verdict"),
    [
        ([*RDMA, "--tq-use-gdr"], ("--tq-use-gdr", "--tq-normalize-multimodal"), "warn"),
        ([*MOONCAKE, "--tq-transport", "rdma"], ("--tq-rdma-mode", "--tq-transport"), "adjust"),
        ([*MOONCAKE, "--tq-rdma-mode", "auto"], ("--tq-rdma-mode", "--tq-transport"), "note"),
        (["--tq-rdma-mode", "auto"], ("--tq-rdma-mode", "--tq-storage-backend"), "adjust"),
        (["--tq-rdma-device", "mlx5_0"], ("--tq-rdma-device",), "adjust"),
        (["--tq-mooncake-auto-init", "job-owned"], ("--tq-mooncake-auto-init", "--tq-storage-backend"), "adjust"),
        (["--tq-mooncake-master-address", "h:1"], ("--tq-mooncake-master-address", "--tq-storage-backend"), "adjust"),
        (["--tq-mooncake-metadata-server", "h:1"], ("--tq-mooncake-metadata-server", "--tq-storage-backend"), "adjust"),
        (["--tq-fallback-backend", "none"], ("--tq-fallback-backend", "--tq-storage-backend"), "adjust"),
        (["--tq-batch-bytes-budget", "1"], ("--tq-batch-bytes-budget", "--tq-storage-backend"), "adjust"),
        ([*MOONCAKE, "--tq-host-staging-mb", "64"], ("--tq-host-staging-mb", "--tq-host-staging"), "adjust"),
        ([*MOONCAKE, "--tq-gdr-staging-mb", "64"], ("--tq-gdr-staging-mb", "--tq-use-gdr"), "adjust"),
        (["--tq-host-staging"], ("--tq-host-staging", "--tq-storage-backend"), "adjust"),
        (["--tq-batch-bytes-budget", "1"], ("--tq-batch-bytes-budget", "--tq-normalize-multimodal"), "warn"),
        (["--tq-dedup-share-view"], ("--tq-dedup-share-view", "--tq-dedup-multimodal"), "adjust"),
        (
            [*MOONCAKE, "--tq-per-rank-fetch", "on", "--tq-allow-unstaged-per-rank-fetch"],
            ("--tq-per-rank-fetch", "--tq-allow-unstaged-per-rank-fetch"),
            "warn",
        ),
        (
            ["--tq-normalize-multimodal", "--tq-dedup-multimodal", "--tq-per-rank-fetch", "on"],
            ("--tq-per-rank-fetch", "--tq-dedup-multimodal"),
            "note",
        ),
    ],
)
def test_rows_that_let_the_job_start(argv, flags, verdict):
    assert verdicts(argv, flags=flags) == {verdict}


@pytest.mark.parametrize(
    "argv",
    [
        [*MOONCAKE, "--tq-host-staging", "--tq-host-staging-mb", "64"],
        [*RDMA, "--tq-use-gdr", "--tq-gdr-staging-mb", "64"],
        [*MOONCAKE, "--tq-mooncake-metadata-server", "h:1", "--tq-fallback-backend", "none"],
        [*MOONCAKE, "--tq-normalize-multimodal", "--tq-batch-bytes-budget", "1"],
        ["--tq-normalize-multimodal", "--tq-dedup-multimodal", "--tq-dedup-share-view"],
        [*MOONCAKE, "--tq-per-rank-fetch", "on", "--tq-allow-unstaged-per-rank-fetch"],
    ],
)
def test_a_flag_that_tunes_what_is_on_is_not_called_idle(argv):
    assert not any("has no effect" in f.message for f in compat.findings(Settings.from_flags(argv)))


@pytest.mark.parametrize(
    "argv",
    [
        ["--tq-allow-unstaged-per-rank-fetch"],
        [*MOONCAKE, "--tq-allow-unstaged-per-rank-fetch", "--tq-per-rank-fetch", "off"],
        [*MOONCAKE, "--tq-allow-unstaged-per-rank-fetch", "--tq-host-staging"],
    ],
)
def test_a_confirmation_that_nothing_asks_for_is_said(argv):
    (finding,) = (f for f in compat.findings(Settings.from_flags(argv)) if "has no effect" in f.message)
    assert (finding.verdict, finding.way_out) == ("adjust", "drop it")


NEED_NOTHING = {
    "accounting",
    "storage_backend",
    "init_timeout_seconds",
    "per_rank_fetch",
    "normalize_multimodal",
    "group_share_processor",
}


@pytest.mark.parametrize(
    "flag", [flag for flag in FLAGS if flag.setting not in NEED_NOTHING], ids=lambda flag: flag.name
)
def test_a_flag_that_does_nothing_alone_says_so(flag):
    """Alone means with SimpleStorage and no layer on."""
    values = {"mooncake_master_address": "h:1", "mooncake_metadata_server": "h:1"}
    value = values.get(flag.setting) or next((c for c in flag.choices or () if c != flag.default), "7")
    found = compat.findings(Settings.from_flags([flag.name, *([value] if flag.kind == "value" else [])]))
    assert {f.verdict for f in found if flag.name in f.flags} & {"adjust", "reject"}


def test_a_job_that_fell_back_is_warned_like_one_that_asked_for_simple_storage():
    few_units = HostFacts(tensor_parallel=4, num_data_storage_units=2, multimodal=True)
    mooncake = ["--tq-storage-backend", "mooncake", "--tq-mooncake-auto-init", "job-owned", "--tq-host-staging"]
    on = Settings.from_flags([*mooncake, "--tq-per-rank-fetch", "on"])
    (said,) = compat.warnings_after_fallback(on, few_units)
    assert said.startswith("per-rank fetch with fewer storage units than TP ranks")
    assert compat.warnings_after_fallback(on, HostFacts(tensor_parallel=2, num_data_storage_units=2)) == []
    automatic = Settings.from_flags(mooncake)
    assert compat.warnings_after_fallback(automatic, few_units) == [], "it fetches by broadcast then"
    asked_for = Settings.from_flags(["--tq-per-rank-fetch", "on"])
    assert compat.warnings_after_fallback(asked_for, few_units) == [], "it was said before"


def test_rows_that_need_host_facts():
    on = ["--tq-per-rank-fetch", "on"]
    few_units = HostFacts(tensor_parallel=4, num_data_storage_units=2)
    assert "warn" in verdicts(on, few_units, ("--tq-per-rank-fetch", "--num-data-storage-units"))
    assert not verdicts(on, HostFacts(tensor_parallel=2, num_data_storage_units=2), ("--num-data-storage-units",))
    assert "adjust" in verdicts(on, HostFacts(rollout_routed_experts=True), ("--tq-per-rank-fetch",))
    accounting = ["--dataplane-accounting", "summary"]
    assert verdicts(accounting, HostFacts(fully_async=False, hybrid=False)) == {"adjust"}
    assert verdicts(accounting, HostFacts(fully_async=False, hybrid=True)) == set()
    assert verdicts([], HostFacts(fully_async=False, hybrid=False)) == set()


def test_defaults_and_plain_mooncake_are_clean():
    assert compat.check(Settings()) == []
    assert compat.check(Settings.from_flags(MOONCAKE)) == []
    assert compat.check(Settings.from_flags(RDMA)) == []


def test_every_reject_has_a_way_out_and_every_rule_a_reference():
    assert all(r.way_out for r in compat.RULES if r.verdict == "reject")
    assert all(r.reference and r.message for r in compat.RULES)
    undecided = [r for r in compat.RULES if r.applies is None]
    assert [r.verdict for r in undecided] == ["reject"]


def test_per_rank_wanted_follows_the_backend():
    staged = Settings.from_flags([*MOONCAKE, "--tq-host-staging"])
    assert compat.per_rank_wanted(staged, HostFacts(multimodal=True))
    assert not compat.per_rank_wanted(staged, HostFacts(multimodal=False))
    assert not compat.per_rank_wanted(Settings(), HostFacts(multimodal=True))
    assert compat.per_rank_wanted(Settings(), HostFacts(per_rank_fetch=True))
    assert not compat.per_rank_wanted(Settings(per_rank_fetch="off"), HostFacts(per_rank_fetch=True))
    assert compat.per_rank_wanted(Settings(per_rank_fetch="host"), HostFacts(per_rank_fetch=True))


def test_the_cohort_is_known_only_with_all_its_sizes():
    sizes = {"tensor_parallel": 2, "pipeline_parallel": 3}
    assert HostFacts(**sizes, context_parallel=4).cohort == 24
    assert HostFacts(**sizes).cohort is None


ASIDE = HostFacts(fully_async=True, own_data_plane=True)


def test_in_colocate_nothing_is_in_force_and_that_is_said():
    colocate = HostFacts(fully_async=False, hybrid=False)
    settings = Settings(accounting="summary", group_share_processor=True)
    assert compat.in_force(settings, colocate) == Settings()
    assert any("no-op" in f.text for f in compat.check(settings, colocate))
    assert not any("no-op" in f.text for f in compat.check(Settings(), colocate))
    hybrid = HostFacts(fully_async=True, hybrid=True)
    assert compat.in_force(settings, hybrid) == settings


def test_a_host_with_a_data_plane_of_its_own_keeps_its_flags_and_only_the_group_processor_is_ours():
    settings = Settings(rdma_mode="required", dedup_multimodal=True, accounting="summary", group_share_processor=True)
    [finding] = compat.check(settings, ASIDE)
    assert "stands aside" in finding.text
    assert compat.in_force(settings, ASIDE) == Settings(group_share_processor=True)


def test_a_host_that_shares_the_processor_s_output_itself():
    host = HostFacts(fully_async=True, own_group_processor=True)
    settings = Settings(accounting="summary", group_share_processor=True)
    assert compat.in_force(settings, host) == Settings(accounting="summary")
    assert any("by itself" in f.text for f in compat.check(settings, host))


@pytest.mark.parametrize("host", [HostFacts(custom_generate=True), HostFacts(samples_per_prompt=1)])
def test_the_group_processor_says_where_it_cannot_help(host):
    assert verdicts(["--rollout-group-share-processor"], host) == {"adjust"}
    assert verdicts(["--rollout-group-share-processor"], HostFacts(samples_per_prompt=8)) == set()
    assert verdicts([], host) == set()
