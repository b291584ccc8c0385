"""What a process says of itself, and what the driver says of the job. Plain data; JSON on the way, never pickle."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from relax_tq_rdma.transport.report import Decision

SCHEMA = 1


class PoolLevel(msgspec.Struct, frozen=True, kw_only=True):
    """The staging pool of a process, in bytes, and what was moved past it, in values (RFC §4.6)."""

    capacity: int = 0
    held: int = 0
    peak: int = 0
    retired: int = 0
    misses: int = 0


class ProcessRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One process with a storage manager of the plugin.

    ``role``: what Ray runs there (``MegatronTrainRayActor rank 3``), or ``driver``. ``seams``: short name to state
    (:data:`relax_tq_rdma.seams.taken.State`). ``backend`` and ``protocol`` are those of its real manager and store
    client. ``counts``: what it did otherwise than asked, by name. ``joined``, ``written``: Unix time in seconds.
    """

    job: str
    role: str
    node: str
    node_id: str
    pid: int
    start_ticks: int
    plugin: str
    transfer_queue: str
    mooncake: str
    seams: dict[str, str]
    backend: str
    protocol: str
    device: str = ""
    pool: PoolLevel | None = None
    counts: dict[str, int] = {}
    notes: tuple[str, ...] = ()
    joined: float
    written: float
    schema: int = SCHEMA

    @property
    def key(self) -> str:
        return f"{self.job}/{self.node_id}/{self.pid}-{self.start_ticks}"

    @property
    def name(self) -> str:
        """For people, and unique in the job."""
        return f"{self.role} (pid {self.pid} on {self.node})"


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A running job, as its driver started it. ``started``: Unix time in seconds, when its data plane was up."""

    job: str
    plugin: str
    start_line: str
    settings: dict[str, Any]
    decision: Decision
    driver: str
    nodes: int
    started: float
    schema: int = SCHEMA

    @property
    def key(self) -> str:
        return f"{self.job}/{JOB}"


class StartRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A job whose driver is bringing its data plane up. ``began``: Unix time in seconds."""

    job: str
    plugin: str
    driver: str
    began: float
    schema: int = SCHEMA

    @property
    def key(self) -> str:
        return f"{self.job}/{START}"


JOB, START = "job", "start"
"""Last parts of the keys of :class:`JobRecord` and :class:`StartRecord`."""

Record: TypeAlias = ProcessRecord | JobRecord | StartRecord


def decode(key: str, value: bytes) -> Record | str:
    """Read a record back, or say in a sentence why it cannot be read: another version may have written it."""
    kinds: dict[str, type[Record]] = {JOB: JobRecord, START: StartRecord}
    try:
        schema = msgspec.json.decode(value, type=_AnySchema).schema
        if schema > SCHEMA:
            return f"record {key} has schema {schema}, this version of relax-tq-rdma reads {SCHEMA}"
        record = msgspec.json.decode(value, type=kinds.get(key.rpartition("/")[2], ProcessRecord))
    except msgspec.MsgspecError as exc:
        return f"record {key} cannot be read ({exc})"
    return record if record.key == key else f"record {key} is of {record.key}"


class _AnySchema(msgspec.Struct):
    schema: int = 0
