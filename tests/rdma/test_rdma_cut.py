"""A transfer is cut in the middle: an error in time, no other rung, no wrong byte, and no memory of it used again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from tests.rdma.channel import RemoteError
from tests.rdma.jobs import CALL_SECONDS, MIB, RDMA, Job, job, start
from tests.rdma.nodes import Process, TestNode

pytestmark = [pytest.mark.two_nodes, pytest.mark.breaks_devices]

PAYLOAD = {"kind": "tier", "mib": 32, "rows": 8}
ERROR_SECONDS = 240.0
"""The engine gives up after 30 to 60 s (FC-27), the client does not ask again after that; then the emulation."""

LINK = "ip link set data0 down", "ip link set data0 up && ip route replace default dev data0"
DEVICE = "rdma link delete rxe0", "rdma link add rxe0 type rxe netdev data0"


@pytest.fixture
def reader_node(nodes: list[TestNode]) -> Iterator[Process]:
    """A process on the consumer's node, for commands; link and device are there again afterwards."""
    with nodes[1].process() as there:
        yield there
        there.call("shell", CALL_SECONDS, command=f"{LINK[1]}; [[ -e /sys/class/infiniband/rxe0 ]] || {DEVICE[1]}")


def test_a_reader_that_loses_its_link_gets_an_error(nodes: list[TestNode], reader_node: Process) -> None:
    with job(nodes[:2], RDMA, orderly=False) as running:
        future = receiving(running, reader_node)
        reader_node.call("shell", CALL_SECONDS, command=LINK[0])
        assert error_of(future).kind == "TransferError"
        assert running.consumer.call("protocol", CALL_SECONDS) == "rdma"  # no other rung


def test_a_device_deleted_under_its_reader_gives_an_error_or_every_byte_and_takes_no_new_job(
    nodes: list[TestNode], reader_node: Process
) -> None:
    """A driver that cannot cut its users off, as this soft-RoCE, lets them finish and the device goes when they go."""
    with job(nodes[:2], RDMA, orderly=False) as running:
        future = receiving(running, reader_node)
        deletion = reader_node.begin("shell", command=DEVICE[0], limit=2 * ERROR_SECONDS)
        error = future.exception(ERROR_SECONDS)
        assert getattr(error, "kind", "TransferError") == "TransferError"
        assert error or future.result()["wrong"] == []
        assert running.consumer.call("protocol", CALL_SECONDS) == "rdma"
        with nodes[0].process() as another, pytest.raises(RemoteError, match="node1") as failure:
            start(another, nodes[:2], RDMA)
        assert "required rules out anything less" in str(failure.value)
    deletion.result(CALL_SECONDS)  # its last user is gone
    assert reader_node.call("shell", CALL_SECONDS, command="rdma -j link").split() == ["[]"]


def test_a_reader_whose_peer_is_killed_gets_an_error_and_reads_on_from_others(
    nodes: list[TestNode], reader_node: Process
) -> None:
    with job(nodes[:2], RDMA, orderly=False) as running:
        future = receiving(running, reader_node)
        running.producer.kill()
        assert error_of(future).kind == "TransferError"
        consumer = running.consumer
        retired = consumer.call("retired_spans", CALL_SECONDS)
        assert sum(end - first + 1 for first, end in retired) >= 4 * MIB  # what the engine may still write to
        with nodes[0].process() as another:
            another.call("join", CALL_SECONDS, conf=running.started["conf"])
            for step in range(4):
                spec = {"kind": "tier", "mib": 4, "rows": 4, "seed": step}
                indexes = another.call("put", CALL_SECONDS, partition=f"after {step}", spec=spec)
                got = consumer.call(
                    "get", CALL_SECONDS, partition=f"after {step}", spec=spec, indexes=indexes, keep=f"after {step}"
                )
                assert got["wrong"] == []
                used = consumer.call("kept_spans", CALL_SECONDS, keep=f"after {step}")
                assert not any(a <= d and c <= b for a, b in used for c, d in retired)
        assert consumer.call("retired_spans", CALL_SECONDS) == retired
        assert consumer.call("protocol", CALL_SECONDS) == "rdma"


def receiving(running: Job, watcher: Process) -> Future[Any]:
    """A get of which the reader's node has received a part."""
    indexes = running.producer.call("put", CALL_SECONDS, partition="cut", spec=PAYLOAD)
    before = watcher.call("received_packets", CALL_SECONDS)
    future = running.consumer.begin("get", partition="cut", spec=PAYLOAD, indexes=indexes)
    while watcher.call("received_packets", CALL_SECONDS) - before < 1000:  # a thirtieth of it has arrived
        assert not future.done(), future.result(0)
        time.sleep(0.02)
    assert not future.done()
    return future


def error_of(future: Future[Any]) -> RemoteError:
    with pytest.raises(RemoteError) as failure:
        future.result(ERROR_SECONDS)
    return failure.value
