"""Joining the job's Mooncake store: what can be refused in words is refused before native code runs."""

from __future__ import annotations

import os
from typing import Any

from transfer_queue.storage.clients import mooncake_client as upstream

from relax_tq_rdma import env
from relax_tq_rdma.errors import StartError, UsageError
from relax_tq_rdma.staging.segment import planned_size
from relax_tq_rdma.transport.mooncake_facts import explain_import_error
from relax_tq_rdma.transport.native import reach_master

REACH_SECONDS = 5.0

_user_pid = 0
"""The process that has a native client, as seen in it and in its forked children; 0 when there is none."""


def client_config(config: Any, master: str) -> dict[str, Any]:
    """The config for upstream's client of this process: no segment at set-up, and this node's own address.

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
