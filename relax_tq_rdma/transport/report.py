"""What the transport layer says to its readers: checks, node reports, fallbacks, the decision. Plain frozen data.

Every type converts to and from builtins with :func:`msgspec.to_builtins` / :func:`msgspec.convert`; this is the wire
format between nodes and the ``--json`` output of ``doctor``.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from relax_tq_rdma.transport.memory import MemoryPlan

CheckStatus = Literal["ok", "degraded", "missing", "skipped"]
"""``ok``; ``degraded``: usable with a limit; ``missing``: the capability is not there; ``skipped``: not asked for."""

CHECKS: tuple[str, ...] = (
    "mooncake",  # importable, version
    "rdma_device",  # at least one usable HCA, and the requested ones
    "rdma_port",  # port ACTIVE
    "rdma_gid",  # routable GID (RoCE v2 preferred, or native InfiniBand)
    "memlock",  # RLIMIT_MEMLOCK against what this job pins
    "reachability",  # announce address, peers and master, both ways
    "gdr",  # nvidia_peermem or dma-buf, CUDA
    "memcpy_hazard",  # MC_STORE_MEMCPY against the Mooncake version
    "shm",  # writable /dev/shm
    "memory",  # free memory against segment + staging
)
"""Names of the probe's checks, in display order. A fallback record's ``check`` is one of these or of the next two."""

DERIVED_CHECKS: tuple[str, ...] = ("report", "plugin")
"""Found by comparing the reports: a node's report is missing, double or unreadable; its plugin version differs."""

STEP_CHECKS: tuple[str, ...] = ("master", "preflight", "controller", "init", "verify")
"""Steps of the start after the probe that can fail. ``master``: there is no Mooncake master that can be used."""


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One finding on one node. ``fix`` is one sentence, empty when ``ok`` or ``skipped``."""

    name: str
    status: CheckStatus
    evidence: str
    fix: str = ""


class RdmaDevice(msgspec.Struct, frozen=True, kw_only=True):
    """One HCA that may be used. ``gid_index`` is per device: two HCAs of a host can need different ones (FC-01)."""

    name: str
    port: int
    gid_index: int
    gid: str
    link_layer: str
    netdev: str = ""
    numa_node: int | None = None
    max_mr_bytes: int | None = None


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """The probe's result for one node. ``node`` is a short name for people, ``node_id`` Ray's id or ``local``."""

    node: str
    node_id: str
    checks: tuple[Check, ...]
    address: str = ""
    mooncake_version: str = ""
    plugin_version: str = ""
    devices: tuple[RdmaDevice, ...] = ()
    memory: MemoryPlan | None = None

    def check(self, name: str) -> Check | None:
        return next((c for c in self.checks if c.name == name), None)


class Fallback(msgspec.Struct, frozen=True, kw_only=True, rename={"from_": "from"}):
    """One step down the ladder (RFC §4.8, rule 3). ``from_`` and ``to`` are rungs such as ``MooncakeStore/rdma``."""

    from_: str
    to: str
    reason: str
    node: str = ""
    check: str = ""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The one decision of a job (RFC §4.8, rule 2). ``protocol`` is ``zmq`` for SimpleStorage."""

    backend: Literal["SimpleStorage", "MooncakeStore"]
    protocol: Literal["zmq", "tcp", "rdma"]
    device: str = ""
    gdr: bool = False
    fallbacks: tuple[Fallback, ...] = ()

    @property
    def rung(self) -> str:
        return f"{self.backend}/{self.protocol}" + ("+gdr" if self.gdr else "")
