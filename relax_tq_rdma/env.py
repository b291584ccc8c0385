"""Environment variables of the plugin (prefix ``RTQ_``; ``RELAX_`` and ``SLIME_`` belong to the host).

They hold internals that are not flags: per-node overrides and limits. One registry, so that ``doctor`` and the docs can
list them all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from relax_tq_rdma.errors import UsageError

_MOST_DIGITS = 12  # of a number of MiB


@dataclass(frozen=True)
class Variable:
    """One variable. ``read()`` returns its text, or the default when unset or empty.

    ``otherwise``: what is done where there is neither text nor a default, when the meaning does not say it.
    ``of_node``: each node has its own, so that a driver's does not go to the workers.
    """

    name: str
    default: str
    meaning: str
    otherwise: str = "none"
    of_node: bool = False

    def read(self) -> str:
        return os.environ.get(self.name) or self.default


SYSTEM_ROOT = Variable(
    "RTQ_SYSTEM_ROOT", "/", "root of the /sys, /proc and /dev trees the probe inspects on this node", of_node=True
)
LOCAL_HOSTNAME = Variable(
    "RTQ_LOCAL_HOSTNAME", "", "address this node announces to its peers; empty: Ray's node address", of_node=True
)
RUN_DIR = Variable(
    "RTQ_RUN_DIR",
    "",
    "folder of run state (master records, port leases, metric snapshots)",
    otherwise="relax-tq-rdma-UID in $XDG_RUNTIME_DIR, else in the folder for temporary files",
    of_node=True,
)
SEGMENT_MB = Variable("RTQ_SEGMENT_MB", "4096", "Mooncake segment of a process that puts payload, in MiB")
LOCAL_BUFFER_MB = Variable("RTQ_LOCAL_BUFFER_MB", "256", "Mooncake local buffer of each client process, in MiB")
METRICS_PORT = Variable(
    "RTQ_METRICS_PORT",
    "",
    "port, or address:port, of the node's Prometheus endpoint (a port alone binds 127.0.0.1); empty: nothing listens",
)
ACCOUNTING_DIR = Variable(
    "RTQ_ACCOUNTING_DIR", "dataplane-accounting", "folder of the JSON lines of --dataplane-accounting verbose"
)
STORE_CALL_SECONDS = Variable(
    "RTQ_STORE_CALL_SECONDS",
    "75",
    "longest time of one Mooncake call, in seconds, and one more for each 16 MiB it moves",
)
STORE_WAIT_SECONDS = Variable(
    "RTQ_STORE_WAIT_SECONDS",
    "90",
    "how long a put waits for room, or for the master to drop a dead process's segment, in seconds",
)
COHORT_SPLIT_SECONDS = Variable(
    "RTQ_COHORT_SPLIT_SECONDS",
    "60",
    "with per-rank fetch: how long ranks of a cohort may be told different things about a batch, in seconds",
)
DEDUP_CACHE_MB = Variable(
    "RTQ_DEDUP_CACHE_MB",
    "512",
    "payload that a reader keeps for deduplicated rows of later batches, in MiB",
)
RECYCLED_MB = Variable(
    "RTQ_RECYCLED_MB",
    "256",
    "memory of finished batches that a process keeps to build the next ones in, in MiB",
)
PAYLOAD_CHECKSUM = Variable(
    "RTQ_PAYLOAD_CHECKSUM", "0", "1: each normalised row carries a crc32c of its payload, which every reader checks"
)

VARIABLES: tuple[Variable, ...] = (
    SYSTEM_ROOT,
    LOCAL_HOSTNAME,
    RUN_DIR,
    SEGMENT_MB,
    LOCAL_BUFFER_MB,
    METRICS_PORT,
    ACCOUNTING_DIR,
    STORE_CALL_SECONDS,
    STORE_WAIT_SECONDS,
    COHORT_SPLIT_SECONDS,
    DEDUP_CACHE_MB,
    RECYCLED_MB,
    PAYLOAD_CHECKSUM,
)


def of_job(environ: Mapping[str, str]) -> dict[str, str]:
    """What is set in the driver's environment and holds for every process of its job, wherever that runs."""
    return {v.name: environ[v.name] for v in VARIABLES if not v.of_node and environ.get(v.name)}


def check() -> None:
    """See that every variable that must hold a number or a switch does: in the driver, where it can still be mended.

    Raises:
        UsageError: one does not.
    """
    for size in (SEGMENT_MB, LOCAL_BUFFER_MB, DEDUP_CACHE_MB, RECYCLED_MB):
        mebibytes(size)
    for duration in (STORE_CALL_SECONDS, STORE_WAIT_SECONDS, COHORT_SPLIT_SECONDS):
        seconds(duration)
    switch(PAYLOAD_CHECKSUM)


def mebibytes(variable: Variable) -> int:
    """Value of a variable that holds a size, in bytes.

    Raises:
        UsageError: it is not a whole number of MiB above 0, or one that 64 bits of bytes cannot hold.
    """
    text = variable.read().strip()
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS and int(text) > 0):
        raise UsageError(
            f"{variable.name}={text[:40]!r}: expected MiB as a whole number above 0, for example {variable.default}"
        )
    return int(text) * 2**20


def seconds(variable: Variable) -> float:
    """Value of a variable that holds a duration.

    Raises:
        UsageError: it is not a number of seconds above 0.
    """
    text = variable.read()
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 86400:
        raise UsageError(
            f"{variable.name}={text[:40]!r}: expected seconds as a number above 0, for example {variable.default}"
        )
    return value


def switch(variable: Variable) -> bool:
    """Value of a variable that is on (1) or off (0).

    Raises:
        UsageError: it is neither.
    """
    text = variable.read()
    if text not in ("0", "1"):
        raise UsageError(f"{variable.name}={text[:40]!r}: expected 0 or 1")
    return text == "1"
