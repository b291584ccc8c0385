"""What the host's arguments say of the plugin, in every process that gets them pickled."""

from __future__ import annotations

import argparse
import pickle
from typing import Any

import pytest
from omegaconf import OmegaConf

from relax_tq_rdma import Settings, StartError
from relax_tq_rdma.compat import HostFacts
from relax_tq_rdma.seams.relax_args import host_facts, job_of, keep_settings, settings_of
from relax_tq_rdma.section import JobSection
from relax_tq_rdma.transport.config import build_conf
from relax_tq_rdma.transport.report import Decision

SETTINGS = Settings(accounting="summary", normalize_multimodal=True)


def with_section(settings: Settings, **flags: Any) -> argparse.Namespace:
    decision = Decision(backend="SimpleStorage", protocol="zmq")
    section = JobSection(job="j", settings=settings, decision=decision, plugin_version="0")
    conf = build_conf({"backend": {"SimpleStorage": {}}}, section)
    args: argparse.Namespace = pickle.loads(pickle.dumps(argparse.Namespace(tq_config=conf, **flags)))  # noqa: S301
    return args


def test_the_section_of_the_running_job_decides() -> None:
    args = with_section(SETTINGS, dataplane_accounting="off", rollout_group_share_processor=True)
    assert settings_of(args) == SETTINGS
    job = job_of(args)
    assert job is not None
    assert job.decision.backend == "SimpleStorage"


def test_without_a_section_what_the_driver_left_decides_then_the_flags() -> None:
    args = argparse.Namespace(rollout_group_share_processor=True)
    assert settings_of(args) == Settings(group_share_processor=True)
    keep_settings(args, Settings())
    assert settings_of(args) is None, "the driver found that nothing is in force"
    keep_settings(args, SETTINGS)
    assert settings_of(args) == SETTINGS


@pytest.mark.parametrize(
    "args",
    [
        argparse.Namespace(),
        argparse.Namespace(tq_config=None),
        argparse.Namespace(tq_config=OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}})),
        argparse.Namespace(tq_rdma_mode="auto", tq_rdma_device=""),
    ],
)
def test_a_job_without_the_plugin(args: argparse.Namespace) -> None:
    assert settings_of(args) is None
    assert job_of(args) is None


def test_a_section_that_cannot_be_read_is_said() -> None:
    args = argparse.Namespace(
        tq_config={"backend": {"storage_backend": "SimpleStorage", "SimpleStorage": {"relax_tq_rdma": {"job": 1}}}}
    )
    with pytest.raises(StartError, match="cannot be read"):
        settings_of(args)


def test_host_facts_are_what_the_host_has_and_nothing_more() -> None:
    assert host_facts(argparse.Namespace()) == HostFacts()
    args = argparse.Namespace(
        fully_async=True,
        hybrid=True,
        colocate=True,
        multimodal_keys=None,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=1,
        context_parallel_size=4,
        num_data_storage_units=3,
        per_rank_fetch=True,
        use_rollout_routing_replay=True,
    )
    facts = host_facts(args)
    assert (facts.colocate, facts.multimodal, facts.cohort) == (False, False, 8)
    assert facts.per_rank_fetch
    assert facts.rollout_routed_experts
