"""The RDMA device of one node is hidden: ``required`` refuses and names it, ``auto`` takes both nodes to TCP."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from relax_tq_rdma.summary import parse_start_line
from tests.rdma.jobs import CALL_SECONDS, MIB, RDMA, START_SECONDS, job
from tests.rdma.nodes import Process, TestNode

pytestmark = [pytest.mark.two_nodes, pytest.mark.breaks_devices]

StartProcess = Callable[..., Process]


@pytest.fixture(scope="module")
def _hidden(nodes: list[TestNode]) -> Iterator[None]:
    with nodes[1].process() as there:
        there.call("shell", CALL_SECONDS, command="rdma link delete rxe0")
        yield
        there.call("shell", CALL_SECONDS, command="rdma link add rxe0 type rxe netdev data0")


@pytest.mark.usefixtures("_hidden")
def test_required_ends_with_an_exit_code_and_names_node_and_check(nodes: list[TestNode], process: StartProcess) -> None:
    driver = process(0)
    driver.begin(
        "start_or_exit", flags=list(RDMA), nodes=[node.plain() for node in nodes[:2]], cluster="without a device"
    )
    assert driver.exit_status(START_SECONDS) == 1
    said = process(0)
    with pytest.raises(Exception, match="node1") as failure:
        said.call("start", START_SECONDS, flags=list(RDMA), nodes=[node.plain() for node in nodes[:2]], cluster="again")
    assert "required rules out anything less" in str(failure.value)
    assert "no RDMA device" in str(failure.value)


@pytest.mark.usefixtures("_hidden")
def test_auto_takes_both_nodes_to_tcp_with_the_reason_on_record(nodes: list[TestNode]) -> None:
    with job(nodes[:2], [*RDMA, "--tq-rdma-mode", "auto"], rung="tcp after fallback") as running:
        pairs = parse_start_line(running.line)
        assert (pairs["backend"], pairs["protocol"]) == ("MooncakeStore", "tcp")
        (fallback,) = running.started["fallbacks"]
        assert (fallback["from"], fallback["to"]) == ("MooncakeStore/rdma", "MooncakeStore/tcp")
        assert (fallback["node"], fallback["check"]) == ("node1", "rdma_device")
        assert "no RDMA device" in fallback["reason"]
        assert sum(running.driver.call("fallback_counts", CALL_SECONDS).values()) == 1
        assert [one.call("protocol", CALL_SECONDS) for one in (running.producer, running.consumer)] == ["tcp", "tcp"]
        got = running.move("over tcp", {"kind": "tier", "mib": 4, "rows": 4}, nbytes=4 * MIB)
        assert got["wrong"] == []
        assert got["packets"] == 0
