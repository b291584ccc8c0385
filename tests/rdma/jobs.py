"""A running job of the tests: its driver and its members, each a process of a node."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.rdma import counters
from tests.rdma.nodes import Process, TestNode

MIB = 2**20
START_SECONDS = 240.0
CALL_SECONDS = 120.0
"""Of one call under emulation, where everything takes 20 times longer."""

_ATTEMPT = "150"
LAYERS = ("--tq-normalize-multimodal", "--tq-host-staging", "--tq-host-staging-mb", "64")
ACCOUNTS = ("--dataplane-accounting", "verbose")
SIMPLE = (*ACCOUNTS, "--tq-normalize-multimodal")
TCP = (
    *("--tq-storage-backend", "mooncake", "--tq-mooncake-auto-init", "job-owned"),
    *("--tq-fallback-backend", "none", "--tq-init-timeout-seconds", _ATTEMPT),
    *(*LAYERS, *ACCOUNTS),
)
RDMA = (*TCP, "--tq-transport", "rdma", "--tq-rdma-mode", "required")
_clusters = itertools.count()


@dataclass(frozen=True)
class Job:
    """``started``: what the driver said at the start (:func:`tests.rdma.duties.start`)."""

    driver: Process
    producer: Process
    consumer: Process
    started: dict[str, Any]
    rung: str

    @property
    def line(self) -> str:
        return str(self.started["line"])

    def move(self, partition: str, spec: dict[str, Any], nbytes: int = 0, **more: Any) -> dict[str, Any]:
        """Put and get one payload; the result of the get. With ``nbytes`` the run's summary counts it."""
        indexes = self.producer.call("put", CALL_SECONDS, partition=partition, spec=spec)
        got: dict[str, Any] = self.consumer.call(
            "get", CALL_SECONDS, partition=partition, spec=spec, indexes=indexes, **more
        )
        if nbytes:
            counters.record(self.rung, nbytes, got["packets"])
        return got


@contextmanager
def job(
    nodes: Sequence[TestNode],
    flags: Sequence[str],
    *,
    rung: str = "",
    environment: dict[str, str] | None = None,
    ends: tuple[int, int] = (0, -1),
    orderly: bool = True,
) -> Iterator[Job]:
    """Start a job on the nodes, and close it: nothing may be left that could not be removed.

    Args:
        nodes: of the job; the driver is on the first.
        flags: the plugin's.
        rung: for the summary of the run.
        environment: of all its processes.
        ends: nodes of producer and consumer.
        orderly: whether the members are still able to leave at the end.
    """
    with nodes[0].process(environment=environment) as driver:
        started = start(driver, nodes, flags)
        with (
            nodes[ends[0]].process(environment=environment) as producer,
            nodes[ends[1]].process(environment=environment) as consumer,
        ):
            for member in (producer, consumer):
                member.call("join", CALL_SECONDS, conf=started["conf"])
            yield Job(driver, producer, consumer, started, rung)
            for member in (producer, consumer) if orderly else ():
                member.call("leave", CALL_SECONDS)
        left = driver.call("close_job", CALL_SECONDS)
        assert not (orderly and left), left


def start(driver: Process, nodes: Sequence[TestNode], flags: Sequence[str]) -> dict[str, Any]:
    """Start a job in a cluster of its own."""
    cluster = f"cluster{next(_clusters)}-{time.monotonic_ns()}"
    started: dict[str, Any] = driver.call(
        "start", START_SECONDS, flags=list(flags), nodes=[node.plain() for node in nodes], cluster=cluster
    )
    return started
