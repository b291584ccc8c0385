"""Where the RDMA tests run: in a soft-RoCE guest (``make test-rdma``), or on real nodes (``--real``)."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rdma.agent import PORT
from tests.rdma.jobs import RDMA, Job, job
from tests.rdma.nodes import Process, TestNode

CONTROL, DATA = "10.77.0.", "10.78.0."
"""Networks of the guests; a guest alone has no other to control."""
_AGENT_SECONDS = 400.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--real",
        metavar="FILE",
        help="run on real nodes instead of guests: one 'NAME ADDRESS[:PORT]' a line, this node first; on each an agent "
        "(python -m tests.rdma.agent) with the same RTQ_RDMA_TOKEN",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "two_nodes: needs two nodes")
    config.addinivalue_line("markers", "breaks_devices: takes links and devices of a guest away; never on a real node")
    config.addinivalue_line("markers", "guest_only: knows what a guest has and lacks; says nothing of a real node")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    real = config.getoption("real", default=None)
    nodes = len(read_hosts(Path(real))) if real else int(os.environ.get("RTQ_RDMA_NODES", "0"))
    for item in here:
        item.add_marker("rdma")
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(600))
        if not nodes:
            item.add_marker(pytest.mark.skip(reason="needs real verbs: run make test-rdma"))
        elif real and item.get_closest_marker("breaks_devices"):
            item.add_marker(pytest.mark.skip(reason="takes devices away: only in a guest"))
        elif real and item.get_closest_marker("guest_only"):
            item.add_marker(pytest.mark.skip(reason="is about the guest's own device"))
        elif item.get_closest_marker("two_nodes") and nodes < 2:
            item.add_marker(pytest.mark.skip(reason="needs two nodes: run make test-rdma-full"))
    # What needs no agent comes first: the agent imports meanwhile.
    items.sort(key=lambda item: item in here and "nodes" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def nodes(request: pytest.FixtureRequest) -> list[TestNode]:
    """All nodes of the run, this one first, their agents ready."""
    real = request.config.getoption("real", default=None)
    if real:
        if not os.environ.get("RTQ_RDMA_TOKEN"):
            pytest.exit("RTQ_RDMA_TOKEN is not set: it must hold the secret of the agents", returncode=4)
        found = read_hosts(Path(real))
    else:
        number = int(os.environ["RTQ_RDMA_NODES"])
        found = [TestNode(f"node{at}", f"{DATA}{at + 1}", control=f"{CONTROL}{at + 1}") for at in range(number)]
        found[0] = TestNode("node0", f"{DATA}1", control="127.0.0.1")
    ends = time.monotonic() + _AGENT_SECONDS
    for node in found:
        node.await_agent(ends - time.monotonic())
    return found


def read_hosts(path: Path) -> list[TestNode]:
    """The nodes of a hosts file.

    Raises:
        pytest.UsageError: the file or a line of it cannot be read.
    """
    found = []
    try:
        lines = path.read_text().splitlines()
    except OSError as exc:
        raise pytest.UsageError(f"the hosts file cannot be read: {exc}") from None
    for line in lines:
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = re.fullmatch(r"(\S+)\s+([^\s:]+)(?::(\d+))?", text)
        if match is None:
            raise pytest.UsageError(f"{path}: '{text}' is not 'NAME ADDRESS[:PORT]'")
        found.append(TestNode(match[1], match[2], int(match[3] or PORT)))
    if not found:
        raise pytest.UsageError(f"{path} names no node")
    return found


@pytest.fixture
def process(nodes: list[TestNode]) -> Iterator[type[Process]]:
    """``process(node=0, **environment)``: a new process of a node; all end with the test."""
    made: list[Process] = []

    def start(node: int = 0, **environment: str) -> Process:
        made.append(nodes[node].process(environment=environment))
        return made[-1]

    yield start
    for one in made:
        one.close()


@pytest.fixture(scope="session")
def rdma_job(nodes: list[TestNode]) -> Iterator[Job]:
    """One job on RDMA with every layer of the payload path, on the first node; tests use partitions of their own."""
    with job(nodes[:1], RDMA, rung="rdma") as running:
        yield running
