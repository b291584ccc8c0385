"""Two nodes, real verbs: connections, backpressure, time limits, retries, and what a job leaves behind (RFC §5.2.3)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import pytest

from relax_tq_rdma.summary import parse_start_line
from tests.rdma.channel import RemoteError
from tests.rdma.jobs import CALL_SECONDS, MIB, RDMA, Job, job, start
from tests.rdma.nodes import Process, TestNode

pytestmark = pytest.mark.two_nodes

StartProcess = Callable[..., Process]
ONE_ROW = {"kind": "tier", "mib": 1, "rows": 1, "seed": 3}
"""One value, so one call of the store."""


def tier(mib: int, seed: int = 0) -> dict[str, Any]:
    return {"kind": "tier", "mib": mib, "rows": 4, "seed": seed}


@pytest.fixture(scope="module")
def pair(nodes: list[TestNode]) -> Iterator[Job]:
    """One job over both nodes: the producer on the first, the consumer on the second."""
    with job(nodes[:2], RDMA, rung="rdma, two nodes") as running:
        yield running


# --- put and get, connection ------------------------------------------------------------------------------------------


def test_put_and_get_across_nodes_both_ways(pair: Job, nodes: list[TestNode]) -> None:
    pairs = parse_start_line(pair.line)
    assert (pairs["protocol"], pairs["verify"]) == ("rdma", "1/1 round trips, wire=rdma")
    for name, payload in {"matrix": {"kind": "matrix"}, "columns": {"kind": "columns"}, "16": tier(16)}.items():
        got = pair.move(f"across {name}", payload, nbytes=payload.get("mib", 0) * MIB)
        assert got["wrong"] == [], name
    assert got["packets"] >= 16 * MIB / 4096  # of the reader's own node
    back = pair.consumer.call("put", CALL_SECONDS, partition="back", spec=tier(4, 5))
    got = pair.producer.call("get", CALL_SECONDS, partition="back", spec=tier(4, 5), indexes=back)
    assert got["wrong"] == []
    assert got["packets"] >= 4 * MIB / 4096


def test_connection_by_an_explicit_metadata_server(nodes: list[TestNode], process: StartProcess) -> None:
    """The other row, P2PHANDSHAKE, is every other test. Here a master that the job does not own serves both."""
    host, http = nodes[0].address, 18780
    keeper = process(0)  # the master ends with it
    master = keeper.call(
        "serve_master",
        CALL_SECONDS,
        address=host,
        flags={
            "enable_http_metadata_server": "true",
            "http_metadata_server_host": host,
            "http_metadata_server_port": http,
        },
    )
    flags = [*RDMA, "--tq-mooncake-auto-init", "never", "--tq-mooncake-master-address", master]
    flags += ["--tq-mooncake-metadata-server", f"{host}:{http}"]
    with job(nodes[:2], flags, rung="rdma, metadata server") as running:
        assert parse_start_line(running.line)["verify"] == "1/1 round trips, wire=rdma"
        got = running.move("by name", tier(4), nbytes=4 * MIB)
        assert got["wrong"] == []
    port = master.rpartition(":")[2]
    assert keeper.call("processes", CALL_SECONDS, words=[f"--rpc_port={port}"]) != []  # not the job's: it lives on


# --- backpressure, time limits, retries -------------------------------------------------------------------------------


def test_a_producer_that_is_too_fast_waits_and_its_memory_stays_bounded(nodes: list[TestNode]) -> None:
    """Nothing is cleared, until a put has found no room and has waited.

    The producer mounts 64 MiB at its first put and 120 MiB when they are full: room for eleven batches of 16 MiB.
    """
    payload = tier(16)
    environment = {"RTQ_SEGMENT_MB": "120", "RTQ_STORE_WAIT_SECONDS": "200"}
    with job(nodes[:2], RDMA, environment=environment) as running:
        producer, consumer = running.producer, running.consumer
        put: dict[int, list[int]] = {}
        waiting = None
        for batch in range(14):
            future = producer.begin("put", partition=f"batch {batch}", spec=payload)
            try:
                put[batch] = future.result(15)
            except FutureTimeoutError:
                waiting = batch, future
                break
        assert waiting is not None, "fourteen batches found room for eleven"
        assert 7 <= len(put) <= 11
        blocked, future = waiting
        before = producer.call("memory", CALL_SECONDS)
        time.sleep(5)
        assert not future.done()
        assert producer.call("memory", CALL_SECONDS) - before < 8 * MIB  # it waits, and piles nothing up
        for batch, indexes in put.items():
            got = consumer.call("get", CALL_SECONDS, partition=f"batch {batch}", spec=payload, indexes=indexes)
            assert got["wrong"] == []
            producer.call("clear", CALL_SECONDS, partition=f"batch {batch}")
        indexes = future.result(CALL_SECONDS)
        got = consumer.call("get", CALL_SECONDS, partition=f"batch {blocked}", spec=payload, indexes=indexes)
        assert got["wrong"] == []
        assert consumer.call("staging", CALL_SECONDS)["capacity"] == 64 * MIB  # the staging has not grown either


def test_a_peer_that_never_answers_ends_the_start_within_its_limit(
    nodes: list[TestNode], process: StartProcess
) -> None:
    limit, silent = 60, process(1)
    port = silent.call("accept_and_say_nothing", CALL_SECONDS, address=nodes[1].address)
    flags = [*RDMA, "--tq-mooncake-auto-init", "never", "--tq-init-timeout-seconds", str(limit)]
    flags += ["--tq-mooncake-master-address", f"{nodes[1].address}:{port}"]
    driver, began = process(0), time.monotonic()
    with pytest.raises(RemoteError, match="accepts connections but does not answer") as failure:
        start(driver, nodes[:2], flags)
    assert failure.value.kind == "StartError"
    assert time.monotonic() - began < limit + 10


@pytest.mark.parametrize(("call", "verb"), [("batch_upsert_from", "put"), ("batch_get_into", "get")])
def test_a_passing_failure_is_tried_again_three_times_and_nothing_is_doubled(pair: Job, call: str, verb: str) -> None:
    member = pair.producer if verb == "put" else pair.consumer
    assert pair.move(f"warm up {verb}", ONE_ROW)["wrong"] == []  # the first put of a process mounts its segment
    keys = _stored(pair)
    member.call("fail_next", CALL_SECONDS, call=call, code=-1, times=3)
    got = pair.move(f"retried {verb}", ONE_ROW)
    assert got["wrong"] == []
    assert member.call("calls", CALL_SECONDS) == 4
    assert _stored(pair) - keys == 1
    pair.producer.call("clear", CALL_SECONDS, partition=f"retried {verb}")
    assert _stored(pair) == keys


def test_a_failure_that_stays_is_an_error_after_the_same_tries(pair: Job) -> None:
    keys = _stored(pair)
    pair.producer.call("fail_next", CALL_SECONDS, call="batch_upsert_from", code=-1, times=100)
    with pytest.raises(RemoteError, match="internal error") as failure:
        pair.producer.call("put", CALL_SECONDS, partition="never", spec=ONE_ROW)
    assert failure.value.kind == "TransferError"
    assert pair.producer.call("calls", CALL_SECONDS) == 4
    pair.producer.call("fail_next", CALL_SECONDS, call="batch_upsert_from", code=-1, times=0)
    assert _stored(pair) == keys
    assert pair.move("after it", tier(1, 4))["wrong"] == []


# --- several jobs, and what is left -----------------------------------------------------------------------------------


def test_two_jobs_side_by_side_do_not_touch_each_others_master(pair: Job, nodes: list[TestNode]) -> None:
    before = _masters(pair)
    with job(nodes[:2], RDMA) as other:
        assert other.started["master"] != pair.started["master"]
        assert other.move("theirs", tier(1, 11))["wrong"] == []
        assert pair.move("ours", tier(1, 12))["wrong"] == []
        assert _masters(other) == before + 1
    assert pair.move("still ours", tier(1, 13))["wrong"] == []
    assert _masters(pair) == before


def test_a_job_leaves_no_master_no_memory_region_and_no_process(nodes: list[TestNode], process: StartProcess) -> None:
    watchers = [process(at) for at in range(2)]

    def left() -> list[tuple[int, int, int]]:
        return [
            (
                watcher.call("memory_regions", CALL_SECONDS),
                len(watcher.call("processes", CALL_SECONDS, words=["/mooncake_master"])),
                len(watcher.call("processes", CALL_SECONDS, words=["relax_tq_rdma.transport", "tests.rdma.agent"])),
            )
            for watcher in watchers
        ]

    before = left()
    with job(nodes[:2], RDMA) as running:
        assert running.move("something", tier(4))["wrong"] == []
        during = left()
        assert all(now[0] > then[0] for now, then in zip(during, before, strict=True))  # both ends hold regions
        assert during[0][1] == before[0][1] + 1
    ends = time.monotonic() + 30
    while left() != before and time.monotonic() < ends:
        time.sleep(0.5)  # the kernel takes a moment to reap the processes of a closed connection
    assert left() == before


def _masters(running: Job) -> int:
    """On the driver's node, of all jobs."""
    return len(running.driver.call("processes", CALL_SECONDS, words=["/mooncake_master"]))


def _stored(running: Job) -> int:
    """Values that the master knows of."""
    lines = running.driver.call("master_page", CALL_SECONDS, word="master_key_count ")
    return int(float(lines[0].split()[-1]))
