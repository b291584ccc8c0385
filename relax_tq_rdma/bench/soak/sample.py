"""What every process holds at one moment."""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping

import msgspec
import psutil

from relax_tq_rdma.bench.soak.messages import Counts

_STORE_BYTES, _STORE_KEYS = "master_allocated_bytes", "master_key_count"
_SECONDS = 5.0


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """One process, as the kernel tells it. ``cpu_s``: user and system, since its start."""

    rss: int
    fds: int
    threads: int
    cpu_s: float


class Store(msgspec.Struct, frozen=True, kw_only=True):
    """What the master counts: bytes and number of all values."""

    nbytes: int
    keys: int


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One moment. ``at``: seconds since the first put. By process name.

    ``steps``: that are gone. ``warm``: the first step is, which has every kind of row.
    """

    at: float
    steps: int
    warm: bool
    processes: dict[str, Usage]
    ends: dict[str, Counts]
    store: Store

    def unexplained(self, name: str) -> int:
        """Resident bytes of a process, without ordinary memory that it holds on purpose.

        That is what a consumer keeps and the pool did not lend, and what the staging keeps for later results.
        """
        rss, end = self.processes[name].rss, self.ends.get(name)
        return rss if end is None else rss - max(0, end.kept_bytes - end.held) - end.spare


def usage(pid: int) -> Usage:
    """Of a process that runs.

    Raises:
        psutil.Error: it does not.
    """
    process = psutil.Process(pid)
    with process.oneshot():
        times = process.cpu_times()
        return Usage(
            rss=process.memory_info().rss,
            fds=process.num_fds(),
            threads=process.num_threads(),
            cpu_s=times.user + times.system,
        )


def store(metrics_address: str) -> Store:
    """Of the master whose metrics are there.

    Raises:
        OSError: it does not answer.
        ValueError: it does not tell.
    """
    with urllib.request.urlopen(f"http://{metrics_address}/metrics", timeout=_SECONDS) as answer:
        page = answer.read().decode("ascii", "replace")
    found = counters(page)
    try:
        return Store(nbytes=int(found[_STORE_BYTES]), keys=int(found[_STORE_KEYS]))
    except KeyError as exc:
        raise ValueError(f"the Mooncake master's metrics have no {exc}") from None


def counters(page: str) -> Mapping[str, float]:
    """The values without labels of a Prometheus page."""
    lines = (line.split() for line in page.splitlines() if line and not line.startswith("#"))
    return {line[0]: float(line[1]) for line in lines if len(line) == 2 and "{" not in line[0]}
