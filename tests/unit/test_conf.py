"""The config handed to TransferQueue: the caller's own, untouched, plus the decision."""

from __future__ import annotations

import copy
import pickle
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from relax_tq_rdma.section import JobSection, read_section
from relax_tq_rdma.settings import Settings
from relax_tq_rdma.transport.config import build_conf
from relax_tq_rdma.transport.report import Decision, Fallback

MIB = 1024 * 1024
MOONCAKE = Settings(
    storage_backend="mooncake",
    transport="rdma",
    rdma_mode="auto",
    rdma_device="mlx5_0",
    use_gdr=True,
    gdr_staging_mb=512,
    mooncake_metadata_server="10.0.0.8:8080",
    mooncake_auto_init="job-owned",
)
FELL = Fallback(from_="MooncakeStore/rdma", to="MooncakeStore/tcp", reason="port DOWN", node="n2", check="rdma_port")
RDMA = Decision(backend="MooncakeStore", protocol="rdma", device="mlx5_0", gdr=True)
TCP = Decision(backend="MooncakeStore", protocol="tcp", fallbacks=(FELL,))
SIMPLE = Decision(backend="SimpleStorage", protocol="zmq", fallbacks=(FELL,))


class Sampler:
    """Stands for the live object that Relax puts into its config."""


def section(decision: Decision, settings: Settings = MOONCAKE) -> JobSection:
    return JobSection(
        job="f00d", settings=settings, decision=decision, plugin_version="0.1.0", master="10.0.0.1:4711", nodes=4
    )


def relax_conf(sampler: Any, **simple: Any) -> DictConfig:
    """As ``Controller._initialize_data_system`` builds it (contract §2); the newest line has no total_storage_size."""
    plain = {
        "controller": {"sampler": sampler, "polling_mode": True},
        "backend": {"SimpleStorage": {"num_data_storage_units": 3, **simple}},
    }
    return OmegaConf.create(plain, flags={"allow_objects": True})


def test_without_a_layer_the_conf_is_returned_as_it_is() -> None:
    for conf in (None, {"backend": {}}, relax_conf(Sampler())):
        assert build_conf(conf, section(SIMPLE, Settings())) is conf


def test_mooncake_keys() -> None:
    built = build_conf(None, section(RDMA)).backend
    assert built.storage_backend == "MooncakeStore"
    keys = {key: value for key, value in built.MooncakeStore.items() if key != "relax_tq_rdma"}
    assert keys == {
        "auto_init": False,
        "metadata_server": "10.0.0.8:8080",
        "master_server_address": "10.0.0.1:4711",
        "local_hostname": "",
        "protocol": "rdma",
        "device_name": "mlx5_0",
        "use_gdr": True,
        "gdr_staging_buffer_mb": 512,
        "hard_pin": True,
        "global_segment_size": 0,
        "local_buffer_size": 256 * MIB,
    }


def test_a_lower_rung_asks_for_neither_gdr_nor_a_device() -> None:
    store = build_conf(None, section(TCP)).backend.MooncakeStore
    assert (store.protocol, store.device_name, store.use_gdr) == ("tcp", "", False)


def test_the_staging_pool_is_added_by_each_process_that_can_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RTQ_LOCAL_BUFFER_MB", "64")
    staged = Settings(**{**MOONCAKE.to_dict(), "host_staging": True, "host_staging_mb": 100})
    assert build_conf(None, section(RDMA, staged)).backend.MooncakeStore.local_buffer_size == 64 * MIB


@pytest.mark.parametrize("total", [{}, {"total_storage_size": 512}])
@pytest.mark.parametrize("decision", [RDMA, TCP, SIMPLE])
def test_the_caller_keeps_every_key_and_the_conf_is_not_changed(decision: Decision, total: dict[str, int]) -> None:
    sampler = Sampler()
    conf = relax_conf(sampler, **total)
    before = copy.deepcopy(conf)
    built = build_conf(conf, section(decision))
    assert conf == before
    assert built.controller.sampler is sampler
    assert built.controller.polling_mode is True
    assert built._get_flag("allow_objects") is True
    simple = {key: value for key, value in built.backend.SimpleStorage.items() if key != "relax_tq_rdma"}
    assert simple == {"num_data_storage_units": 3, **total}


@pytest.mark.parametrize("conf", [None, {}, {"backend": {"MooncakeStore": {"offload": {"enabled": False}}}}])
def test_a_plain_dict_or_nothing_will_do(conf: dict[str, Any] | None) -> None:
    before = copy.deepcopy(conf)
    built = build_conf(conf, section(RDMA))
    assert isinstance(built, DictConfig)
    assert conf == before
    if conf:
        assert built.backend.MooncakeStore.offload.enabled is False


def test_a_plain_dict_may_hold_a_live_sampler() -> None:
    sampler = Sampler()
    assert build_conf({"controller": {"sampler": sampler}}, section(RDMA)).controller.sampler is sampler


@pytest.mark.parametrize("flag", ["struct", "readonly"])
def test_a_locked_conf_is_copied_and_extended(flag: str) -> None:
    conf = relax_conf(Sampler())
    conf._set_flag(flag, True)
    built = build_conf(conf, section(RDMA))
    assert built.backend.storage_backend == "MooncakeStore"
    assert built._get_flag(flag) is True
    assert conf._get_flag(flag) is True


@pytest.mark.parametrize("decision", [RDMA, TCP, SIMPLE])
def test_every_process_can_read_the_section_back(decision: Decision) -> None:
    built = build_conf(relax_conf("GRPOGroupNSampler"), section(decision))
    shipped = pickle.loads(pickle.dumps(built))  # noqa: S301 - own bytes, as Ray ships them
    read, notes = read_section(shipped.backend[decision.backend])
    assert (read, notes) == (section(decision), [])
    other = "SimpleStorage" if decision.backend == "MooncakeStore" else "MooncakeStore"
    assert read_section(shipped.backend.get(other) or {}) == (None, [])


def test_a_conf_of_an_earlier_start_can_be_used_again() -> None:
    """Its section is replaced, not merged, and is gone from the backend that is no longer used."""
    first = build_conf(relax_conf(Sampler()), section(TCP))
    again = build_conf(first, section(SIMPLE))
    assert read_section(again.backend.MooncakeStore) == (None, [])
    assert read_section(again.backend.SimpleStorage)[0] == section(SIMPLE)
    bare = Decision(backend="MooncakeStore", protocol="tcp")
    assert read_section(build_conf(first, section(bare)).backend.MooncakeStore)[0] == section(bare)


def test_it_merges_with_the_defaults_of_transfer_queue() -> None:
    spec = find_spec("transfer_queue")  # without importing it, and torch with it
    assert spec is not None
    assert spec.origin is not None
    defaults = OmegaConf.load(Path(spec.origin).with_name("config.yaml"))
    merged = OmegaConf.merge(defaults, build_conf(relax_conf("SequentialSampler"), section(RDMA)))
    assert set(merged.backend.MooncakeStore) - set(defaults.backend.MooncakeStore) == {"relax_tq_rdma"}
    assert merged.backend.MooncakeStore.auto_init is False
    assert read_section(merged.backend.MooncakeStore)[0] == section(RDMA)
