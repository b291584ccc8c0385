"""Judging the RDMA devices of a node: which may be used, and the one reason why each other may not (FC-01..FC-06).

A device passes three gates, one per check of the report: *device* (it exists and its verbs node opens here), *port*
(ACTIVE, a known link layer, full partition membership), *gid* (a routable GID). It is refused at the first it fails.
The gates look at what the engine itself will use: port, partition-key index and GID index of Mooncake come from its
environment variables.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass

from relax_tq_rdma.transport import gid as gids
from relax_tq_rdma.transport.report import RdmaDevice
from relax_tq_rdma.transport.sysfs import Hca, Port, Tree, describe_os_error
from relax_tq_rdma.transport.verbs import VerbsFacts

DEVICE, PORT, GID = "rdma_device", "rdma_port", "rdma_gid"
FULL_MEMBER_BIT = 0x8000
"""A partition key without this bit is a limited member: two limited members cannot talk to one another."""


@dataclass(frozen=True)
class EngineEnv:
    """What Mooncake reads from the environment of each process (mooncake-transfer-engine/src/config.cpp)."""

    port: int = 1
    pkey_index: int = 0
    gid_index: int | None = None
    gid_variable: str = ""

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> EngineEnv:
        """Read as the engine does, with ``atoi``: text that is no number is 0, out of range is ignored."""
        variable = next((name for name in ("MC_GID_INDEX", "NCCL_IB_GID_INDEX") if name in environ), "")
        forced = _atoi(environ[variable], 255) if variable else None
        port = _atoi(environ["MC_IB_PORT"], 255) if "MC_IB_PORT" in environ else None
        return cls(
            port=1 if port is None else port,
            pkey_index=_atoi(environ.get("MC_PKEY_INDEX", ""), 65535) or 0,
            gid_index=forced,
            gid_variable=variable if forced is not None else "",
        )


@dataclass(frozen=True)
class DeviceRequest:
    """One name of ``--tq-rdma-device``; ``port`` when it was written as ``mlx5_0:1``."""

    name: str
    port: int | None = None

    def __str__(self) -> str:
        return self.name if self.port is None else f"{self.name}:{self.port}"


def parse_request(text: str | None) -> tuple[DeviceRequest, ...]:
    """Read ``--tq-rdma-device``: trimmed, empty parts and duplicates dropped, order kept (FC-06)."""
    found: dict[str, DeviceRequest] = {}
    for part in (text or "").split(","):
        match = re.fullmatch(r"(.+?)\s*:\s*(\d{1,3})", part.strip())
        request = DeviceRequest(match[1], int(match[2])) if match else DeviceRequest(part.strip())
        if request.name and (request.name not in found or found[request.name].port is None):
            found[request.name] = request
    return tuple(found.values())


@dataclass(frozen=True)
class Verdict:
    """Outcome for one device or one requested name.

    ``gate`` is the check it failed, empty when usable. ``engine_takes_it``: refused here, but not by Mooncake, which
    uses every device it can open when none is named.
    """

    name: str
    gate: str = ""
    reason: str = ""
    fix: str = ""
    engine_takes_it: bool = False
    usable: RdmaDevice | None = None
    chosen: gids.GidEntry | None = None


def judge(
    tree: Tree, hca: Hca, engine: EngineEnv, wanted_port: int | None = None, verbs: VerbsFacts | None = None
) -> Verdict:
    """Run one device through the three gates. ``verbs`` is ``None`` below a root that is not this machine's."""
    problem, fix = open_problem(tree, hca)
    if not problem and verbs is not None:
        problem, fix = _library_problem(hca, verbs)
    if problem:
        return Verdict(hca.name, DEVICE, problem, fix)
    if wanted_port not in (None, engine.port):
        return Verdict(
            hca.name,
            PORT,
            f"port {wanted_port} was asked for, Mooncake opens port {engine.port}",
            f"set MC_IB_PORT={wanted_port} on every node",
        )
    port = hca.port(engine.port)
    if port is None:
        return Verdict(hca.name, PORT, f"has no port {engine.port}", "check MC_IB_PORT and the device's driver")
    if port.state != "ACTIVE":
        return Verdict(hca.name, PORT, f"port {port.number} is {_state(port)}", _state_fix(hca, port))
    refused, fix = _membership_problem(port, engine)
    if refused:
        return Verdict(hca.name, PORT, refused, fix, engine_takes_it=True)
    choice = gids.choose(port.gids, _link_layer(port), engine.gid_index)
    if choice.entry is None:
        opens = any(entry.gid is not None and not entry.is_zero for entry in port.gids)
        return Verdict(hca.name, GID, choice.reason, _gid_fix(port, engine), engine_takes_it=opens)
    device = RdmaDevice(
        name=hca.name,
        port=port.number,
        gid_index=choice.entry.index,
        gid=choice.entry.text,
        link_layer=_link_layer(port),
        netdev=choice.entry.netdev,
        numa_node=hca.numa_node,
        max_mr_bytes=_max_mr_bytes(tree, hca, verbs),
    )
    return Verdict(hca.name, usable=device, chosen=choice.entry)


def open_problem(tree: Tree, hca: Hca) -> tuple[str, str]:
    """Why the device's verbs node does not open read-write in this process, and the fix; empty when it does (FC-03).

    sysfs is the host's, also inside a container, so a listed device proves nothing.
    """
    if not hca.uverbs:
        return "no verbs device in /sys/class/infiniband_verbs", "load the ib_uverbs module on the host"
    node = f"dev/infiniband/{hca.uverbs}"
    try:
        fd = os.open(tree.path(node), os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as exc:
        problem = describe_os_error(exc)
        if problem == "not permitted":
            fix = f"give this user read and write access to /{node} (in a container also its device cgroup)"
        else:
            fix = "map it into the container (docker --device=/dev/infiniband)"
        return f"/{node} is {problem}", fix
    try:
        if tree.is_system and not stat.S_ISCHR(os.fstat(fd).st_mode):
            return f"/{node} is not a device node", "map the host's device into the container"
    finally:
        os.close(fd)
    return "", ""


def _library_problem(hca: Hca, verbs: VerbsFacts) -> tuple[str, str]:
    if verbs.problem:
        return f"cannot be opened: {verbs.problem}", "install rdma-core (Debian: libibverbs1 and ibverbs-providers)"
    device = verbs.devices.get(hca.name)
    if device is None:
        return "libibverbs has no driver for it", "install the driver's library (Debian: ibverbs-providers)"
    return (f"does not open: {device.problem}", "check dmesg for the device's driver") if device.problem else ("", "")


def _max_mr_bytes(tree: Tree, hca: Hca, verbs: VerbsFacts | None) -> int | None:
    """Largest memory region: from the driver, or below another root from a file, where someone put one."""
    if verbs is None:
        return tree.number("sys/class/infiniband", hca.name, "max_mr_size")
    device = verbs.devices.get(hca.name)
    return device.max_mr_bytes if device else None


def _state(port: Port) -> str:
    return port.state[:40] or "in an unreadable state"


def _state_fix(hca: Hca, port: Port) -> str:
    others = [str(p.number) for p in hca.ports if p.state == "ACTIVE"]
    if others:
        return f"set MC_IB_PORT={others[0]} on every node to use the active port"
    if port.state == "INIT":
        return "check the subnet manager: the link is up, but nobody brought the port to ACTIVE"
    return "bring the link up (cable, switch port, ip link set DEV up)"


def _membership_problem(port: Port, engine: EngineEnv) -> tuple[str, str]:
    if not _link_layer(port):
        return f"link layer {port.link_layer[:40] or 'unreadable'}", "name the data-plane devices with --tq-rdma-device"
    key = port.pkeys.get(engine.pkey_index)
    if key is None or key & FULL_MEMBER_BIT:
        return "", ""
    full = [index for index, other in sorted(port.pkeys.items()) if other & FULL_MEMBER_BIT]
    fix = f"set MC_PKEY_INDEX={full[0]}" if full else "ask the fabric's administrator for full membership"
    return f"limited partition key 0x{key:04x} at index {engine.pkey_index}", fix


def _link_layer(port: Port) -> str:
    """``Ethernet`` or ``InfiniBand``; old drivers have no such file, then a RoCE v2 entry settles it; else empty."""
    if port.link_layer in ("Ethernet", "InfiniBand"):
        return port.link_layer
    return "Ethernet" if not port.link_layer and any(e.type == gids.ROCE_V2 for e in port.gids) else ""


def _gid_fix(port: Port, engine: EngineEnv) -> str:
    if engine.gid_index is not None:
        return f"unset {engine.gid_variable} or set it to a routable entry"
    if _link_layer(port) == "InfiniBand":
        return "check the subnet manager"
    return "give the device's network interface a routable IP address"


def _atoi(text: str, largest: int) -> int | None:
    match = re.match(r"\s*([+-]?[0-9]+)", text)
    value = int(match[1]) if match else 0
    return value if 0 <= value <= largest else None
