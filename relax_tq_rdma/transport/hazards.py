"""Guards that must hold in *this* process at the moment a Mooncake client is created (FC-01, FC-15).

A variable set by the driver after ``ray.init`` reaches no worker, and one from a job's environment can be overridden
by an operator: so every process enforces them by itself, right before ``setup``.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from relax_tq_rdma.errors import StartError, TransferError
from relax_tq_rdma.transport.report import RdmaDevice

logger = logging.getLogger(__name__)

LOG_LEVEL = "MC_LOG_LEVEL"
"""Level of Mooncake's native log. Read when its library is loaded, so it must be set before the first import."""

MEMCPY = "MC_STORE_MEMCPY"
GID_INDEX = "MC_GID_INDEX"
_GID_INDEX_OF_NCCL = "NCCL_IB_GID_INDEX"  # Mooncake reads it when its own is not set
_MEMCPY_FIXED = (0, 3, 11)
_OFF = ("0", "false", "no", "off")


def memcpy_is_hazardous(mooncake_version: str) -> bool:
    """Whether the local-memcpy path of this version takes another process' address for its own.

    Versions before 0.3.11 compare only the host of a segment, so any peer on the same host (or behind the same address)
    counts as local: reads crash, or end in zeros while every code says success. Fixed upstream in pull requests 1995
    and 2001. A version that cannot be read counts as bad.
    """
    match = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", mooncake_version.strip())
    return match is None or tuple(int(part or 0) for part in match.groups()) < _MEMCPY_FIXED


def guard_environment(mooncake_version: str) -> None:
    """Keep Mooncake's local-memcpy path off in this process. Idempotent; call it before every ``setup``.

    Unset or off becomes an explicit ``0``: unset means *on* where only TCP is available. An explicit wish to have it
    on is honoured, with a note, where the path is safe.

    Raises:
        StartError: it is switched on by hand and this version is known bad.
    """
    value = os.environ.get(MEMCPY)
    # Mooncake takes any word it does not know for "on".
    if value is None or value.strip().lower() in _OFF:
        os.environ[MEMCPY] = "0"
        return
    if memcpy_is_hazardous(mooncake_version):
        raise StartError(
            f"{MEMCPY}={value} is set, and Mooncake {mooncake_version or 'of unknown version'} then takes memory of "
            "other processes for its own (crashes, or zeros with success codes): "
            f"unset {MEMCPY}, or install Mooncake 0.3.11 or later"
        )
    logger.warning("%s=%s is kept as set by hand; the data plane was tested with it off", MEMCPY, value)


def quiet_native_log() -> None:
    """Let Mooncake log errors only, unless a level is set by hand: its INFO lines bury the start line.

    Nothing is lost that the plugin relies on: it checks every status itself, and its child processes log in full.
    """
    os.environ.setdefault(LOG_LEVEL, "ERROR")


def guard_gid_index(devices: Sequence[RdmaDevice]) -> str:
    """Give Mooncake the GID index this node's probe found, so that it does not choose by itself (FC-01).

    Args:
        devices: the RDMA devices this process will use, from the report of its own node.

    Returns:
        What was done, or why nothing was; one sentence for the log. A value set by hand always stays.
    """
    for name in (GID_INDEX, _GID_INDEX_OF_NCCL):
        if os.environ.get(name):
            return f"{name}={os.environ[name]} is kept as set by hand"
    indexes = {device.name: device.gid_index for device in devices}
    if not indexes:
        return f"{GID_INDEX} is left to Mooncake: no device of this node was probed"
    if len(set(indexes.values())) > 1:
        # One variable for the whole process: with two indexes it would be wrong for one of the devices.
        which = ", ".join(f"{name}: {index}" for name, index in indexes.items())
        return f"{GID_INDEX} is left to Mooncake: the devices need different indexes ({which})"
    os.environ[GID_INDEX] = str(next(iter(indexes.values())))
    return f"{GID_INDEX}={os.environ[GID_INDEX]} for {', '.join(indexes)}"


def check_same_process(owner_pid: int, what: str) -> None:
    """Refuse to use a native client in a forked child: its threads, sockets and registrations stayed with the parent.

    Raises:
        TransferError: the calling process is not the one that made ``what``.
    """
    if os.getpid() != owner_pid:
        raise TransferError(
            f"{what} was made in process {owner_pid} and cannot be used in its forked child {os.getpid()}: "
            "start children with spawn, or make a client of their own after the fork"
        )


def installed_mooncake_version() -> str:
    """Version of the Mooncake this process imports, without importing it; empty when unknown.

    Read beside the package itself: the name of the distribution differs (CUDA or not), and another one may be installed
    than the one that comes first on the path.
    """
    spec = importlib.util.find_spec("mooncake")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for info in Path(folder).parent.glob("mooncake_transfer_engine*.dist-info"):
            return metadata.PathDistribution(info).version
    return ""
