"""What this process would say of itself: who it is, what it took, what it did otherwise than asked."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import weakref
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from relax_tq_rdma.coverage.records import PoolLevel, ProcessRecord
from relax_tq_rdma.section import JobSection
from relax_tq_rdma.transport.hazards import installed_mooncake_version
from relax_tq_rdma.transport.process import own_id
from relax_tq_rdma.version import __version__

MAX_NOTES = 20


class Process:
    """The one of this process. Safe to use from several threads; nothing here raises into its caller."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._notes: dict[str, None] = {}
        self._counts: Counter[str] = Counter()
        self._managers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._first: ProcessRecord | None = None

    def note(self, text: str) -> None:
        with self._lock:
            if len(self._notes) < MAX_NOTES:
                self._notes[text] = None

    def count(self, what: str, times: int) -> None:
        with self._lock:
            self._counts[what] += times

    def joined(self, manager: Any, section: JobSection) -> bool:
        """A storage manager of the plugin was made; returns whether it is the first of its job."""
        self._managers.add(manager)
        failed = getattr(sys, "relax_tq_rdma_hook_failed", "")  # left by the hook (:mod:`.seams.worker_hook`)
        if failed:
            self.note(f"the plugin could not be loaded at the start of this process ({failed})")
        if self._first is not None and self._first.job == section.job:
            return False
        self._first = _about(manager, section)
        return True

    def left(self, manager: Any) -> bool:
        """A manager was closed; returns whether it was the last."""
        self._managers.discard(manager)
        return not self._managers

    def record(self) -> ProcessRecord | None:
        """The record as of now; ``None`` before the first manager."""
        if self._first is None:
            return None
        from relax_tq_rdma.install import taken_seams

        pools = [level for level in map(_pool, list(self._managers)) if level is not None]
        with self._lock:
            notes, counts = tuple(self._notes), dict(self._counts)
        return msgspec.structs.replace(
            self._first,
            seams=dict(taken_seams()),
            pool=_sum(pools) if pools else None,
            counts=counts,
            notes=notes,
            written=time.time(),
        )


def role() -> str:
    """What runs here, for people: Ray gives its workers a title, ``ray::Class.method``, and a driver has none."""
    title = Path("/proc/self/cmdline").read_bytes().partition(b"\0")[0].decode(errors="replace")
    if not title.startswith("ray::"):
        return "driver"
    rank = os.environ.get("RANK", "")
    return title.removeprefix("ray::").partition(".")[0] + (f" rank {rank}" if rank else "")


def node() -> str:
    return socket.gethostname().partition(".")[0] or "localhost"


def here() -> str:
    """Which process this is, for people."""
    return f"pid {os.getpid()} on {node()}"


def whoami() -> str:
    """One clause for errors: which process of which version this is."""
    return f"{role()}, {here()}, relax-tq-rdma {__version__}"


def _about(manager: Any, section: JobSection) -> ProcessRecord:
    client = getattr(manager, "storage_client", None)
    now, own = time.time(), own_id()
    return ProcessRecord(
        job=section.job,
        role=role(),
        node=node(),
        node_id=_node_id(),
        pid=own.pid,
        start_ticks=own.start_ticks,
        plugin=__version__,
        transfer_queue=_version("TransferQueue"),
        mooncake=installed_mooncake_version() if client is not None else "",
        seams={},
        backend="SimpleStorage" if client is None else "MooncakeStore",
        protocol="zmq" if client is None else str(getattr(client, "protocol", "")),
        device=section.decision.device,
        joined=now,
        written=now,
    )


def _node_id() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id()) if ray.is_initialized() else node()


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _pool(manager: Any) -> PoolLevel | None:
    counts = getattr(getattr(manager, "storage_client", None), "staging_counts", None)
    if counts is None:
        return None
    now = counts()
    return PoolLevel(
        capacity=now.capacity,
        held=now.held,
        peak=now.peak,
        retired=now.retired + now.retired_regions,
        misses=now.misses,
    )


def _sum(levels: list[PoolLevel]) -> PoolLevel:
    names = [field.name for field in msgspec.structs.fields(PoolLevel)]
    return PoolLevel(**{name: sum(getattr(level, name) for level in levels) for name in names})
