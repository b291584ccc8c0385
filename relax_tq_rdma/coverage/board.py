"""Where the records of a job lie: Ray's own key-value store in its control service (GCS).

It is there in every cluster and costs no actor; a record is a few hundred bytes. Only a process that is connected to
Ray can reach it. Calls raise :class:`Unreachable` instead of waiting where that can be known; the client under them has
time limits of its own, so call them where a wait hurts nobody.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from relax_tq_rdma.coverage.records import JobRecord, ProcessRecord, Record, StartRecord, decode
from relax_tq_rdma.errors import DataplaneError
from relax_tq_rdma.transport import gcs

_NAMESPACE = b"relax_tq_rdma"
_PID = os.getpid()


class Unreachable(DataplaneError):
    """This process cannot reach the records."""


@dataclass(frozen=True)
class Board:
    """All records, and in ``problems`` a sentence for each one that cannot be read."""

    jobs: Sequence[JobRecord]
    starts: Sequence[StartRecord] = ()
    processes: Sequence[ProcessRecord] = ()
    problems: Sequence[str] = ()


def put(record: Record) -> None:
    """Write a record, over an earlier one of the same key."""
    _kv()._internal_kv_put(record.key, msgspec.json.encode(record), overwrite=True, namespace=_NAMESPACE)


def remove(key: str) -> None:
    _kv()._internal_kv_del(key, namespace=_NAMESPACE)


def remove_job(job: str) -> None:
    """Remove all records of a job."""
    _kv()._internal_kv_del(f"{job}/", del_by_prefix=True, namespace=_NAMESPACE)


def remove_others(job: str) -> None:
    """Remove what all other jobs of this cluster have left, readable to this version or not."""
    kv = _kv()
    for key in kv._internal_kv_list("", namespace=_NAMESPACE):
        if not key.startswith(f"{job}/".encode()):
            kv._internal_kv_del(key, namespace=_NAMESPACE)


def read(job: str = "") -> Board:
    """What is written of a job, or of all."""
    jobs: list[JobRecord] = []
    starts: list[StartRecord] = []
    processes: list[ProcessRecord] = []
    problems: list[str] = []
    for key, value in _pairs(f"{job}/" if job else ""):
        match decode(key, value):
            case JobRecord() as record:
                jobs.append(record)
            case StartRecord() as record:
                starts.append(record)
            case ProcessRecord() as record:
                processes.append(record)
            case problem:
                problems.append(problem)
    return Board(jobs, starts, sorted(processes, key=lambda r: (r.joined, r.key)), problems)


def _pairs(prefix: str) -> Iterator[tuple[str, bytes]]:
    kv = _kv()
    for key in sorted(kv._internal_kv_list(prefix, namespace=_NAMESPACE)):
        value = kv._internal_kv_get(key, namespace=_NAMESPACE)
        if value is not None:  # else its process has ended meanwhile
            yield key.decode(), value


def _kv() -> Any:
    import ray
    from ray.experimental import internal_kv

    if os.getpid() != _PID:
        raise Unreachable("a forked child has no connection to Ray")
    if not ray.is_initialized() or not internal_kv._internal_kv_initialized():
        raise Unreachable("this process is not connected to Ray")
    silent = gcs.why_silent()
    if silent:
        raise Unreachable(f"Ray's control service is gone ({silent})")
    return internal_kv
