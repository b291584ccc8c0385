"""All processes of a run: masters, TransferQueue's servers, producer and consumer. They end with the block."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from relax_tq_rdma import env
from relax_tq_rdma.bench.path.cases import Case
from relax_tq_rdma.bench.path.child import Child, Refused
from relax_tq_rdma.bench.path.messages import Hello, Open, Ready, Server, Setup
from relax_tq_rdma.bench.path.options import Options
from relax_tq_rdma.demo import signals
from relax_tq_rdma.transport.hazards import LOG_LEVEL, MEMCPY
from relax_tq_rdma.transport.master import Master

UNITS = 2
"""Storage units, TransferQueue's default."""

_LOOPBACK = "127.0.0.1"
_START_SECONDS = 90.0
_JOIN_SECONDS = 120.0
_MASTER_SECONDS = 30.0


class Stage:
    """The ends, and which cases they have joined.

    ``refused``: case name to why it cannot be measured. ``lost``: why an end does not answer any more; empty while both
    do.
    """

    def __init__(self, producer: Child, consumer: Child) -> None:
        self.lost = ""
        self.producer, self.consumer = producer, consumer
        self.cases: list[Case] = []
        self.refused: dict[str, str] = {}

    @property
    def ends(self) -> tuple[Child, Child]:
        return self.producer, self.consumer

    def join(self, case: Case, master: str) -> None:
        """Let both ends join the store of a case; note it when one cannot."""
        try:
            for end in self.ends:
                end.ask(Open(case=case, master=master), _JOIN_SECONDS)
        except Refused as why:
            self.refused[case.name] = str(why)
        else:
            self.cases.append(case)


@contextmanager
def staged(options: Options, say: Callable[[str], None]) -> Iterator[Stage]:
    """Start everything.

    Raises:
        DataplaneError: a process could not be started.
    """
    logs = Path(tempfile.mkdtemp(prefix="rtq-bench-"))
    children: list[Child] = []
    masters: list[Master] = []

    def start(role: str, name: str) -> Child:
        children.append(Child(role, logs / f"{name}.log", _environment(options)))
        return children[-1]

    try:
        say("starting producer, consumer and TransferQueue's servers")
        servers = [start("controller", "controller"), *(start("unit", f"unit{number}") for number in range(UNITS))]
        stage = Stage(start("producer", "producer"), start("consumer", "consumer"))
        controller, *units = [_server(server) for server in servers]
        setup = Setup(
            controller=controller,
            units=units,
            segment_mib=segment_mib(options),
            pool_mib=options.pool,
            keep=options.keep,
        )
        for end in stage.ends:
            end.tell(setup)
        for end in stage.ends:
            end.hear(_START_SECONDS)
        job = secrets.token_hex(4)
        for case in options.cases:
            say(f"joining {case.name}")
            if case.backend == "mooncake":
                # One each, so that no case's values lie in another one's segment.
                masters.append(Master(f"bench-{job}-{case.name}"))
                masters[-1].start(_MASTER_SECONDS)
            stage.join(case, masters[-1].address if case.backend == "mooncake" else "")
        yield stage
    finally:
        with signals.ignored():
            for child in children:
                child.dismiss()
            for child in children:
                child.close()
            for master in masters:
                master.stop()
            shutil.rmtree(logs, ignore_errors=True)


def segment_mib(options: Options) -> int:
    """Room for one batch of the largest tier and what surrounds it."""
    return max(64, max(options.tiers) * 5 // 4 + 64)


def _environment(options: Options) -> dict[str, str]:
    return {
        MEMCPY: str(int(options.memcpy)),
        LOG_LEVEL: "ERROR",
        env.LOCAL_HOSTNAME.name: _LOOPBACK,
        env.SEGMENT_MB.name: str(segment_mib(options)),
        "TQ_LOGGING_LEVEL": "ERROR",
        "TQ_NUM_THREADS": str(min(8, psutil.cpu_count(logical=False) or 1)),  # TransferQueue warns above that
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def _server(child: Child) -> Server:
    answer = child.ask(Hello(), _START_SECONDS)
    assert isinstance(answer, Ready)
    assert answer.server is not None
    return answer.server
