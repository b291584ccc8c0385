"""Joining the job's Mooncake store: what can be refused in words is refused before native code runs."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from transfer_queue.storage.clients import mooncake_client as upstream

from relax_tq_rdma import env
from relax_tq_rdma.errors import StartError, UsageError
from relax_tq_rdma.settings import Settings
from relax_tq_rdma.staging.segment import planned_size
from relax_tq_rdma.staging.store import buffer_pool_type
from relax_tq_rdma.transport.host_checks import pinnable_bytes
from relax_tq_rdma.transport.memory import client_sizes, shown, staging_that_fits
from relax_tq_rdma.transport.mooncake_facts import explain_import_error
from relax_tq_rdma.transport.native import reach_master
from relax_tq_rdma.transport.sysfs import Tree

logger = logging.getLogger(__name__)

REACH_SECONDS = 5.0

_user_pid = 0
"""The process that has a native client, as seen in it and in its forked children; 0 when there is none."""


def staging_bytes(settings: Settings, protocol: str) -> int:
    """Size of this process's staging pool: what was asked for, or what its locked-memory limit leaves; 0: none.

    Under RDMA the local buffer is registered as a whole, so a pool that is too large would fail the set-up (FC-05). The
    probe has said so already; here each process looks at its own limit.

    Raises:
        UsageError: an ``RTQ_*`` variable that holds a size is not one.
    """
    if not settings.host_staging:
        return 0
    if buffer_pool_type() is None:
        logger.warning("this Mooncake wheel has no BufferPool (0.3.12 and later have): --tq-host-staging has no effect")
        return 0
    sizes = client_sizes(settings)
    limit = pinnable_bytes(Tree(Path("/"))) if protocol == "rdma" else None
    fits = staging_that_fits(sizes, limit)
    if fits < sizes.staging:
        logger.warning(
            "staging pool of %s instead of %s: the locked-memory limit of this process is %s; raise it (ulimit -l)",
            shown(fits),
            shown(sizes.staging),
            shown(limit or 0),
        )
    return fits


def client_config(config: Any, master: str, *, staging: int = 0) -> dict[str, Any]:
    """The config for upstream's client of this process: no segment at set-up, and this node's own address.

    Args:
        config: the backend's section of the TransferQueue config.
        master: address of the Mooncake master.
        staging: bytes of the staging pool, which lies in the local buffer; the rest of that is headroom.

    Raises:
        StartError: this is a forked child of a process that uses Mooncake, Mooncake cannot be imported, or nothing
            listens at the master's address. Native set-up would find out too, by blocking for minutes or for ever with
            the GIL held (measured).
    """
    _claim_process()
    if not upstream.MOONCAKE_STORE_IMPORTED:
        problem, fix = _import_problem()
        raise StartError(f"this process cannot use Mooncake ({problem}): {fix}")
    try:
        reach_master(master, REACH_SECONDS)
    except UsageError as exc:
        raise StartError(f"the job's Mooncake master has no usable address: {exc}") from None
    plain = dict(config.items())
    plain["global_segment_size"] = 0 if mounts_later() else planned_size()
    plain["local_buffer_size"] = int(plain.get("local_buffer_size") or env.mebibytes(env.LOCAL_BUFFER_MB)) + staging
    plain["local_hostname"] = env.LOCAL_HOSTNAME.read() or plain.get("local_hostname", "")
    return plain


def mounts_later() -> bool:
    """Whether the installed wheel can mount a segment after set-up (0.3.13 can, 0.3.10 cannot)."""
    return hasattr(upstream.MooncakeDistributedStore, "allocate_and_mount_segment")


def _claim_process() -> None:
    global _user_pid
    if _user_pid not in (0, os.getpid()):
        raise StartError(
            f"process {os.getpid()} was forked from process {_user_pid}, which uses Mooncake: native set-up would hang "
            "in it: start it with spawn (a DataLoader takes multiprocessing_context='spawn'), or use num_workers=0"
        )
    _user_pid = os.getpid()


def _import_problem() -> tuple[str, str]:
    try:
        import mooncake.store  # noqa: F401
    except ImportError as exc:
        return explain_import_error(f"{type(exc).__name__}: {exc}", exc.name or "")
    return "it became importable after TransferQueue was loaded", "start the process again"
