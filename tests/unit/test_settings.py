"""Flags, Settings and the section that carries them to every process."""

import argparse

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from relax_tq_rdma import Settings, StartError, UsageError
from relax_tq_rdma.flags import FLAGS, add_arguments
from relax_tq_rdma.section import KEY, SCHEMA, JobSection, read_section
from relax_tq_rdma.transport.report import Decision, Fallback

SECTION = JobSection(
    job="0" * 32,
    settings=Settings(storage_backend="mooncake", rdma_device="mlx5_0"),
    decision=Decision(
        backend="MooncakeStore",
        protocol="tcp",
        fallbacks=(Fallback(from_="MooncakeStore/rdma", to="MooncakeStore/tcp", reason="port DOWN", node="n2"),),
    ),
    plugin_version="0.1.0",
    master="127.0.0.1:20001",
    nodes=4,
)


def test_flag_names_and_defaults_are_those_of_the_rfc():
    defaults = {f.name: f.default for f in FLAGS}
    assert defaults == {
        "--dataplane-accounting": "off",
        "--tq-storage-backend": "simple",
        "--tq-transport": "tcp",
        "--tq-rdma-mode": "off",
        "--tq-rdma-device": "",
        "--tq-use-gdr": False,
        "--tq-gdr-staging-mb": 1024,
        "--tq-mooncake-metadata-server": "P2PHANDSHAKE",
        "--tq-mooncake-master-address": "",
        "--tq-mooncake-auto-init": "never",
        "--tq-fallback-backend": "simple",
        "--tq-init-timeout-seconds": 30.0,
        "--tq-normalize-multimodal": False,
        "--rollout-group-share-processor": False,
        "--tq-dedup-multimodal": False,
        "--tq-dedup-share-view": False,
        "--tq-host-staging": False,
        "--tq-host-staging-mb": 1024,
        "--tq-batch-bytes-budget": 0,
        "--tq-per-rank-fetch": "auto",
        "--tq-allow-unstaged-per-rank-fetch": False,
    }


def test_every_flag_fills_a_setting_with_the_same_default():
    assert {f.setting for f in FLAGS} == {f.name for f in msgspec.structs.fields(Settings)}
    assert Settings.from_flags([]) == Settings()
    assert Settings().touches_nothing


def test_flags_are_parsed_into_typed_settings():
    settings = Settings.from_flags(
        ["--tq-use-gdr", "--tq-gdr-staging-mb", "64", "--tq-init-timeout-seconds", "2.5", "--tq-host-staging"]
    )
    assert settings.use_gdr is True
    assert settings.gdr_staging_mb == 64
    assert settings.init_timeout_seconds == 2.5
    assert settings.host_staging is True
    assert Settings.from_flags(["--tq-use-gdr", "--no-tq-use-gdr"]).use_gdr is False


@pytest.mark.parametrize(
    "argv",
    [
        ["--tq-storage-backend", "moon"],
        ["--tq-gdr-staging-mb", "0"],
        ["--tq-gdr-staging-mb", "many"],
        ["--tq-batch-bytes-budget", "-1"],
        ["--tq-gdr-staging-mb", "9" * 30],
        ["--tq-batch-bytes-budget", "9" * 30],
        ["--tq-mooncake-master-address", "garbage"],
        ["--tq-mooncake-master-address", "host:0"],
        ["--tq-mooncake-master-address", "::1:50051"],
        ["--tq-init-timeout-seconds", "0"],
        ["--tq-init-timeout-seconds", "nan"],
        ["--tq-init-timeout-seconds", "inf"],
        ["--tq-rdma-mod", "auto"],
        ["--tq-no-such-flag"],
    ],
)
def test_bad_flags_raise_and_name_the_flag(argv):
    with pytest.raises(UsageError, match=argv[0]):
        Settings.from_flags(argv)


def test_a_host_flag_of_the_same_name_is_adopted_and_its_value_checked():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tq-rdma-mode", default="off")
    add_arguments(parser)
    assert Settings.from_args(parser.parse_args(["--tq-rdma-mode", "auto"])).rdma_mode == "auto"
    with pytest.raises(UsageError, match="--tq-rdma-mode: 'maybe'"):
        Settings.from_args(parser.parse_args(["--tq-rdma-mode", "maybe"]))


def test_device_names_are_trimmed_and_unique():
    assert Settings(rdma_device="mlx5_0, mlx5_1,,mlx5_0 ").rdma_devices == ("mlx5_0", "mlx5_1")
    assert Settings(rdma_device=" , ").rdma_devices == ()


def test_settings_are_frozen():
    with pytest.raises(AttributeError):
        Settings().accounting = "verbose"  # type: ignore[misc]


@given(
    st.builds(
        Settings,
        accounting=st.sampled_from(["off", "summary", "verbose"]),
        rdma_device=st.text(max_size=20),
        gdr_staging_mb=st.integers(1, 1 << 40),
        init_timeout_seconds=st.floats(0.1, 1e4),
        use_gdr=st.booleans(),
        per_rank_fetch=st.sampled_from(["auto", "host", "on", "off"]),
    )
)
def test_settings_round_trip_through_a_plain_dict(settings):
    assert Settings.from_dict(settings.to_dict()) == (settings, [])


def test_unknown_keys_of_a_newer_version_are_ignored_with_a_note():
    settings, notes = Settings.from_dict({**Settings().to_dict(), "warp_drive": True})
    assert settings == Settings()
    assert len(notes) == 1
    assert "warp_drive" in notes[0]
    with pytest.raises(UsageError, match="cannot be read"):
        Settings.from_dict({"rdma_mode": "sideways"})


@pytest.mark.parametrize("wrap", [dict, OmegaConf.create])
def test_section_rides_in_a_backend_config(wrap):
    config = wrap({"protocol": "tcp", KEY: SECTION.to_dict()})
    assert read_section(config) == (SECTION, [])


def test_section_absent_damaged_or_newer():
    assert read_section({"protocol": "tcp"}) == (None, [])
    assert read_section(OmegaConf.create({})) == (None, [])
    with pytest.raises(StartError, match="not a mapping"):
        read_section({KEY: "yes"})
    with pytest.raises(StartError, match="cannot be read"):
        read_section({KEY: {"job": 3}})
    with pytest.raises(StartError, match=f"reads up to {SCHEMA}"):
        read_section({KEY: {**SECTION.to_dict(), "schema": SCHEMA + 1}})
    newer = {**SECTION.to_dict(), "settings": {**SECTION.settings.to_dict(), "x": 1}, "y": 2}
    section, notes = read_section({KEY: newer})
    assert section == SECTION
    assert len(notes) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tq_init_timeout_seconds", -3),
        ("tq_init_timeout_seconds", float("nan")),
        ("tq_gdr_staging_mb", 0),
        ("tq_batch_bytes_budget", -1),
        ("tq_mooncake_master_address", "10.0.0.1"),
    ],
)
def test_a_namespace_of_the_host_is_held_to_the_ranges_of_the_flags(name, value):
    with pytest.raises(UsageError, match="--" + name.replace("_", "-")):
        Settings.from_args(argparse.Namespace(**{name: value}))


def test_a_damaged_section_is_a_usage_error():
    for damaged in ("text", ["list"], 7):
        with pytest.raises(UsageError, match="instead of a mapping"):
            Settings.from_dict(damaged)
    assert len(Settings.from_dict({1: 2, "later": 3})[1]) == 2


@pytest.mark.parametrize("text", ["", "zzz", "host:", "http://", "etcd://host", "host:99999"])
def test_a_metadata_server_that_is_none_is_refused(text):
    with pytest.raises(UsageError, match="--tq-mooncake-metadata-server"):
        Settings.from_flags(["--tq-mooncake-metadata-server", text])


@pytest.mark.parametrize("text", ["p2phandshake", "host:8080", "http://host:8080/metadata", "etcd://host:2379"])
def test_metadata_servers_of_every_kind(text):
    read = Settings.from_flags(["--tq-mooncake-metadata-server", text]).mooncake_metadata_server
    assert read == ("P2PHANDSHAKE" if text.startswith("p2p") else text)
