"""A job on real verbs on one node: its start line, its bytes on every path, and the proof that they crossed the HCA."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from relax_tq_rdma.summary import parse_start_line
from tests.rdma.jobs import CALL_SECONDS, MIB, SIMPLE, TCP, Job, job
from tests.rdma.nodes import TestNode

SMALLEST_MTU = 1024
"""RoCE path MTU over Ethernet frames of 1500 bytes."""

PAYLOADS: dict[str, dict[str, Any]] = {
    "matrix": {"kind": "matrix"},
    "columns": {"kind": "columns"},
    **{f"{mib} MiB": {"kind": "tier", "mib": mib, "rows": 4, "seed": mib} for mib in (1, 4, 16)},
}


@pytest.fixture(scope="module")
def digests(nodes: list[TestNode], rdma_job: Job) -> dict[str, dict[str, Any]]:
    """Path to payload to what its get said; every job but RDMA's is over when this is there."""

    def on(rung: str, flags: Sequence[str]) -> dict[str, Any]:
        with job(nodes[:1], flags, rung=rung) as running:
            return _move_all(running)

    found = {"rdma": _move_all(rdma_job)}
    others = {"tcp": TCP, "zmq": SIMPLE}  # at the same time: neither may make a counter grow
    with ThreadPoolExecutor(len(others)) as pool:
        return found | dict(zip(others, pool.map(on, others, others.values()), strict=True))


def test_the_start_line_claims_rdma_because_the_wire_has_shown_it(rdma_job: Job) -> None:
    pairs = parse_start_line(rdma_job.line)
    assert (pairs["backend"], pairs["protocol"], pairs["fallback"]) == ("MooncakeStore", "rdma", "none")
    assert pairs["verify"] == "1/1 round trips, wire=rdma"


@pytest.mark.parametrize("payload", PAYLOADS)
def test_every_path_gives_back_what_was_put_and_all_paths_agree(
    digests: dict[str, dict[str, Any]], payload: str
) -> None:
    for rung, found in digests.items():
        assert found[payload]["wrong"] == [], rung
        assert found[payload]["digests"]
    for one, other in itertools.combinations(digests, 2):
        assert digests[one][payload]["digests"] == digests[other][payload]["digests"], (one, other)


@pytest.mark.parametrize("rung", ["rdma", "tcp", "zmq"])
def test_the_largest_field_takes_the_fast_path(digests: dict[str, dict[str, Any]], rung: str) -> None:
    fast = {name: nbytes for name, nbytes in digests[rung]["paths"].items() if name.startswith("get ")}
    assert list(fast) == ["get multimodal_train_inputs fast"]
    assert fast["get multimodal_train_inputs fast"] >= 16 * MIB


@pytest.mark.parametrize("mib", [1, 4, 16])
def test_on_rdma_the_counters_grow_to_match_the_bytes(digests: dict[str, dict[str, Any]], mib: int) -> None:
    received = digests["rdma"][f"{mib} MiB"]["packets"]
    least = mib * MIB / 4096  # the largest path MTU there is
    assert received >= least
    assert received <= mib * MIB / SMALLEST_MTU * 1.5 + 500


@pytest.mark.parametrize("rung", ["tcp", "zmq"])
def test_on_tcp_and_zmq_no_counter_grows(digests: dict[str, dict[str, Any]], rung: str) -> None:
    assert sum(digests[rung][name]["put and get"] for name in PAYLOADS) == 0


def _move_all(running: Job) -> dict[str, Any]:
    found = {name: _move(running, name) for name in PAYLOADS}
    return {**found, "paths": running.consumer.call("fast_path", CALL_SECONDS, partition="16 MiB")}


def _move(running: Job, name: str) -> dict[str, Any]:
    spec, before = PAYLOADS[name], running.driver.call("received_packets", CALL_SECONDS)
    got = running.move(name, spec, nbytes=spec.get("mib", 0) * MIB)
    return {**got, "put and get": running.driver.call("received_packets", CALL_SECONDS) - before}
