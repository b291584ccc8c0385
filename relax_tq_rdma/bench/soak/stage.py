"""All processes of a soak: master, TransferQueue's controller, producer and consumers. They end with the block."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from relax_tq_rdma import env
from relax_tq_rdma.bench.path.child import Child
from relax_tq_rdma.bench.path.messages import Hello, Ready, Server
from relax_tq_rdma.bench.soak.ends import End
from relax_tq_rdma.bench.soak.options import Options
from relax_tq_rdma.demo import signals
from relax_tq_rdma.transport.hazards import LOG_LEVEL, MEMCPY
from relax_tq_rdma.transport.master import Master
from relax_tq_rdma.transport.process import own_id

_LOOPBACK = "127.0.0.1"
_START_SECONDS = 90.0
_MASTER_SECONDS = 30.0


@dataclass
class Stage:
    """The processes. ``keep_logs``: set when somebody will want to read them."""

    producer: End
    consumers: list[End]
    controller: Child
    server: Server
    master: Master
    logs: Path
    keep_logs: bool = False

    @property
    def ends(self) -> list[End]:
        return [self.producer, *self.consumers]

    @property
    def pids(self) -> dict[str, int]:
        """By name, of all but the driver."""
        ends = {end.name: end.pid for end in self.ends}
        return {**ends, "controller": self.controller.pid, "master": self.master.pid}


@contextmanager
def staged(options: Options, say: Callable[[str], None]) -> Iterator[Stage]:
    """Start everything.

    Raises:
        DataplaneError: a process could not be started.
    """
    logs = Path(tempfile.mkdtemp(prefix="rtq-soak-"))
    environment = _environment(options)
    started: list[Child | End] = []
    master = Master(f"soak-{own_id().pid}-{own_id().start_ticks}")
    stage: Stage | None = None
    try:
        say("starting Mooncake's master, TransferQueue's controller, a producer and the consumers")
        started.append(controller := Child("controller", logs / "controller.log", environment))
        started.append(producer := End("producer", "producer", logs / "producer.log", environment))
        consumers = []
        for number in range(options.consumers):
            name = f"consumer{number}"
            consumers.append(End(name, name, logs / f"{name}.log", environment))
            started.append(consumers[-1])
        master.start(_MASTER_SECONDS)
        answer = controller.ask(Hello(), _START_SECONDS)
        assert isinstance(answer, Ready)
        assert answer.server is not None
        stage = Stage(producer, consumers, controller, answer.server, master, logs)
        yield stage
    finally:
        with signals.ignored():
            for child in started:
                child.dismiss()
            for child in started:
                child.close()
            master.stop()
            if stage is not None and stage.keep_logs:
                say(f"the logs of the processes are in {logs}")
            else:
                shutil.rmtree(logs, ignore_errors=True)


def _environment(options: Options) -> dict[str, str]:
    return {
        MEMCPY: "0",
        LOG_LEVEL: "ERROR",
        env.LOCAL_HOSTNAME.name: _LOOPBACK,
        env.SEGMENT_MB.name: str(options.segment_mib),
        # Caches that are full before the middle of the run: what grows after that is a leak.
        env.DEDUP_CACHE_MB.name: str(options.cache_mib),
        env.RECYCLED_MB.name: str(options.recycled_mib),
        "TQ_LOGGING_LEVEL": "ERROR",
        "TQ_NUM_THREADS": str(min(8, psutil.cpu_count(logical=False) or 1)),  # TransferQueue warns above that
        "RAY_USAGE_STATS_ENABLED": "0",
    }
