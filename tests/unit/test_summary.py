"""The start line's grammar is relied on by others (design §9)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_tq_rdma import Settings
from relax_tq_rdma.compat import HostFacts
from relax_tq_rdma.summary import parse_start_line, start_line
from relax_tq_rdma.transport.port import Verification
from relax_tq_rdma.transport.report import Decision, Fallback


def test_untouched_job():
    assert start_line(Settings()) == (
        "[dataplane] backend=SimpleStorage protocol=zmq device=- gdr=off normalize=off dedup=off staging=off "
        "per_rank_fetch=auto fallback=none (probe: not needed; verify: not needed)"
    )


def test_the_line_of_the_design():
    settings = Settings(
        storage_backend="mooncake",
        transport="rdma",
        rdma_mode="required",
        normalize_multimodal=True,
        dedup_multimodal=True,
        host_staging=True,
    )
    line = start_line(
        settings,
        Decision(backend="MooncakeStore", protocol="rdma", device="mlx5_0"),
        probe=(8, 8),
        verify=Verification(passed=8, total=8, wire="rdma"),
        host=HostFacts(per_rank_fetch=True),
    )
    assert line == (
        "[dataplane] backend=MooncakeStore protocol=rdma device=mlx5_0 gdr=off normalize=on dedup=on staging=on "
        "per_rank_fetch=on fallback=none (probe: 8/8 nodes ok; verify: 8/8 round trips, wire=rdma)"
    )


@pytest.mark.parametrize(
    ("facts", "shown"),
    [
        ({}, "on"),
        ({"tensor_parallel": 2, "pipeline_parallel": 2, "context_parallel": 8}, "on:x32"),
        ({"tensor_parallel": 1, "pipeline_parallel": 1, "context_parallel": 1}, "on:x1"),
        ({"rollout_routed_experts": True}, "off:rollout_routed_experts"),
        ({"multimodal": False}, "off"),
        ({"multimodal": False, "rollout_routed_experts": True}, "off"),
    ],
)
def test_how_often_each_row_is_read(facts, shown):
    settings = Settings(storage_backend="mooncake", host_staging=True)
    decision = Decision(backend="MooncakeStore", protocol="tcp")
    line = start_line(settings, decision, host=HostFacts(**facts))
    assert parse_start_line(line)["per_rank_fetch"] == shown


def test_staging_is_not_claimed_after_a_fallback_to_simple_storage():
    line = start_line(Settings(storage_backend="mooncake", host_staging=True))
    assert parse_start_line(line)["staging"] == "off"


@given(st.lists(st.tuples(st.text(max_size=12), st.sampled_from(["", "rdma_port"])), max_size=3))
def test_any_fallback_parses_back(steps):
    fallbacks = tuple(
        Fallback(from_="MooncakeStore/rdma", to="MooncakeStore/tcp", reason="x", node=node, check=check)
        for node, check in steps
    )
    line = start_line(Settings(), Decision(backend="MooncakeStore", protocol="tcp", fallbacks=fallbacks), probe=(3, 4))
    pairs = parse_start_line(line)
    assert pairs["probe"] == "3/4 nodes ok"
    assert pairs["fallback"].count(">") >= len(steps)
    assert "\n" not in line
    with pytest.raises(ValueError, match="not a start line"):
        parse_start_line(line[1:])
