"""The native Mooncake client at its edge: reach the master, set up, and what its error codes mean.

Only for processes that may be killed (see :mod:`relax_tq_rdma.transport.peer`) or that have just seen such a one
succeed.
"""

from __future__ import annotations

import socket
from typing import Any, Literal

import msgspec

from relax_tq_rdma.errors import StartError
from relax_tq_rdma.transport import address
from relax_tq_rdma.transport.hazards import guard_environment, guard_gid_index, installed_mooncake_version
from relax_tq_rdma.transport.report import RdmaDevice
from relax_tq_rdma.transport.wire import WireProof

LOCAL_BUFFER_BYTES = SEGMENT_BYTES = 16 * 2**20
ANYWHERE = "*"
"""Location of a segment that is mounted: found out page by page, as at set-up. With the default, an empty one, a peer
takes an RDMA segment for corrupted, and every transfer to it gives -800 (measured on real verbs, 0.3.13)."""

RPC_FAILED = -900
ANY_KEY = "rtq_handshake"
"""A key nobody puts: asking for it proves that the master answers calls of this version."""

_made: list[Any] = []
"""Clients of this process, kept to its end: the destructor of one whose master died blocks for 10 s."""


class NativeError(StartError):
    """A step of the native client failed; ``check`` is the check to blame."""

    def __init__(self, reason: str, check: str) -> None:
        super().__init__(reason)
        self.check = check


class Ring(msgspec.Struct, frozen=True, kw_only=True):
    """Place of one peer in the ring: ``index`` of ``size``. ``token`` names this verification."""

    token: str
    index: int
    size: int
    payload_bytes: int = 4 * 2**20


class PeerRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer does. ``hostname`` is the address its node announces, ``devices`` those of its node's report.

    ``root`` is the file-system root whose HCA counters are read, and ``ring`` is needed in mode ``ring`` only.
    """

    mode: Literal["handshake", "hold", "ring"]
    master: str
    hostname: str
    metadata_server: str = "P2PHANDSHAKE"
    protocol: Literal["tcp", "rdma"] = "tcp"
    device: str = ""
    devices: tuple[RdmaDevice, ...] = ()
    root: str = "/"
    ring: Ring | None = None


class PeerResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it.

    ``reason`` is empty when all went well, else one sentence, with ``check`` the check to blame. ``unread``: neighbours
    whose pattern could not be read or differed, and ``unacknowledged``: neighbours that did not read ours; index to
    reason. ``endpoint``: where the master says this peer's own pattern lies. ``detail``: the last words of the native
    library.
    """

    reason: str = ""
    check: str = ""
    mooncake_version: str = ""
    unread: dict[int, str] = {}
    unacknowledged: dict[int, str] = {}
    endpoint: str = ""
    wire: WireProof | None = None
    detail: str = ""


def metadata_url(server: str) -> str:
    """``--tq-mooncake-metadata-server`` as the engine wants it; the same rule as TransferQueue's own client."""
    if server.strip().upper() == "P2PHANDSHAKE":
        return "P2PHANDSHAKE"
    if server.startswith("etcd://"):
        return server
    url = server if server.startswith("http://") else f"http://{server}"
    return url if url.endswith("/metadata") else f"{url}/metadata"


def reach_master(master: str, seconds: float) -> None:
    """Connect to the master with a plain socket: native set-up must never be the one to find out.

    Raises:
        NativeError: nothing accepts there.
    """
    where = address.parse(master)
    try:
        with socket.create_connection((where.host, where.port), timeout=seconds):
            return
    except OSError as exc:
        why = "timed out" if isinstance(exc, TimeoutError) else exc.strerror or str(exc)
        raise NativeError(f"mooncake_master {master} cannot be reached ({why})", "master") from None


def set_up(request: PeerRequest, segment_bytes: int = 0) -> Any:
    """A connected native client of this process; guards first.

    Raises:
        NativeError: set-up gave an error code, or the master does not understand this version's calls.
        StartError: an environment guard refuses.
    """
    version = installed_mooncake_version()
    guard_environment(version)
    if request.protocol == "rdma":
        guard_gid_index(request.devices)
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as exc:
        raise NativeError(f"Mooncake cannot be imported ({exc})", "mooncake") from None
    store = MooncakeDistributedStore()
    _made.append(store)
    code = store.setup(
        request.hostname,
        request.metadata_server,
        segment_bytes,
        LOCAL_BUFFER_BYTES,
        request.protocol,
        request.device,
        request.master,
    )
    if code != 0:
        raise NativeError(explain_code("set-up", code, version, request), _check_of(code, request))
    # Neither set-up without a segment nor health_check notices a master of another version, nor one that died since
    # (measured, 0.3.10 and 0.3.13): only a call with arguments does.
    code = store.is_exist(ANY_KEY)
    if code < 0:
        raise NativeError(explain_code("first call", code, version, request), _check_of(code, request))
    return store


def set_up_with_segment(request: PeerRequest) -> Any:
    """Like :func:`set_up`, with a small segment of its own: mounted later where the wheel can, at set-up else."""
    from mooncake.store import MooncakeDistributedStore

    if not hasattr(MooncakeDistributedStore, "allocate_and_mount_segment"):
        return set_up(request, SEGMENT_BYTES)
    store = set_up(request)
    mounted = store.allocate_and_mount_segment(SEGMENT_BYTES, request.protocol, ANYWHERE)
    if mounted["ret"] != 0:
        raise NativeError(f"a segment of {SEGMENT_BYTES} bytes cannot be mounted (code {mounted['ret']})", "memlock")
    return store


def explain_code(step: str, code: int, version: str, request: PeerRequest) -> str:
    """One sentence for an error code of the native client."""
    if code == RPC_FAILED:
        return (
            f"{step} gave {code}: mooncake_master {request.master} does not answer as Mooncake {version or 'unknown'} "
            "expects, most likely it is of another version (or it died just now): run one version everywhere"
        )
    if code == -1 and request.protocol == "rdma":
        return f"{step} gave {code}: Mooncake could not open RDMA device {request.device or '(its own choice)'}"
    return f"{step} gave error code {code}"


def _check_of(code: int, request: PeerRequest) -> str:
    if code == RPC_FAILED:
        return "master"
    return "rdma_device" if request.protocol == "rdma" else "preflight"
