"""Reading /sys, /proc and /dev below any root, and the RDMA devices found there.

A probe runs on machines that are broken in some way, so nothing here raises for what it finds: an absent, unreadable or
garbled file is a :class:`Reading` that says which of the three it was. Tests point the root at a made-up tree.
"""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from ipaddress import IPv6Address
from pathlib import Path
from typing import NamedTuple

from relax_tq_rdma.transport.gid import GidEntry

_LIMIT = 256 * 1024
"""No file the probe reads is larger; a made-up or wrong tree must not fill the memory."""

_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

_PERMISSION = (errno.EACCES, errno.EPERM)


class Reading(NamedTuple):
    """Content of one file, stripped, or why there is none: ``missing``, ``not permitted``, ``unreadable (...)``."""

    text: str
    problem: str


def describe_os_error(error: OSError) -> str:
    """``missing``, ``not permitted``, or ``unreadable`` with the system's own words."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
        return "missing"
    if error.errno in _PERMISSION:
        return "not permitted"
    return f"unreadable ({os.strerror(error.errno or 0)})"


class Tree:
    """A file-system root seen through relative paths such as ``"sys/class/infiniband"``."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def is_system(self) -> bool:
        """True for the machine's own root: only then this process and libibverbs may be asked instead of files."""
        try:
            return os.path.samefile(self.root, "/")
        except OSError:
            return False

    def path(self, *parts: str) -> Path:
        return self.root.joinpath(*parts)

    def read(self, *parts: str) -> Reading:
        """Read a small file. Never blocks (a FIFO in the tree reads as empty) and never raises."""
        try:
            fd = os.open(self.path(*parts), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as exc:
            return Reading("", describe_os_error(exc))
        try:
            data = b""
            while len(data) < _LIMIT and (block := os.read(fd, _LIMIT - len(data))):
                data += block
        except OSError as exc:
            return Reading("", describe_os_error(exc))
        finally:
            os.close(fd)
        # What is read here ends up on terminals and in logs: no control characters.
        text = _UNPRINTABLE.sub("\ufffd", data.decode("utf-8", "replace").strip("\0 \t\r\n"))
        return Reading(text, "")

    def text(self, *parts: str) -> str:
        """Content of a file whose absence and emptiness mean the same."""
        return self.read(*parts).text

    def number(self, *parts: str) -> int | None:
        """A whole number, decimal or ``0x`` hexadecimal; ``None`` for anything else."""
        try:
            return int(self.text(*parts), 0)
        except ValueError:
            return None

    def names(self, *parts: str) -> list[str]:
        """Entries of a folder in natural order (``mlx5_2`` before ``mlx5_10``); empty when there is no such folder."""
        try:
            return sorted(os.listdir(self.path(*parts)), key=natural_key)
        except OSError:
            return []

    def exists(self, *parts: str) -> bool:
        try:
            return self.path(*parts).exists()
        except OSError:
            return False


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key under which digits compare as numbers."""
    return tuple(
        (0, int(part), "") if part.isascii() and part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)
    )


@dataclass(frozen=True)
class Port:
    """One port of an HCA. ``state`` is the kernel's word (``ACTIVE``); ``pkeys`` maps index to key."""

    number: int
    state: str
    link_layer: str
    pkeys: dict[int, int]
    gids: tuple[GidEntry, ...]


@dataclass(frozen=True)
class Hca:
    """One entry of ``/sys/class/infiniband`` as found, not judged. ``uverbs`` is its device node's name."""

    name: str
    uverbs: str
    numa_node: int | None
    ports: tuple[Port, ...]
    netdevs: frozenset[str]

    def port(self, number: int) -> Port | None:
        return next((port for port in self.ports if port.number == number), None)


def read_hcas(tree: Tree) -> tuple[Hca, ...]:
    """All RDMA devices below the root, natural order, those with broken entries included."""
    verbs = _verbs_nodes(tree)
    return tuple(_read_hca(tree, name, verbs.get(name, "")) for name in tree.names("sys/class/infiniband"))


def _verbs_nodes(tree: Tree) -> dict[str, str]:
    base = "sys/class/infiniband_verbs"
    nodes = ((tree.text(base, node, "ibdev"), node) for node in tree.names(base))
    return {device: node for device, node in nodes if device}


def _read_hca(tree: Tree, name: str, uverbs: str) -> Hca:
    base = f"sys/class/infiniband/{name}"
    # A virtual device (soft-RoCE) has no PCI device behind it: no link, no NUMA node (FC-10). -1 means "unknown" too.
    numa = tree.number(base, "device/numa_node")
    ports = tuple(_read_port(tree, f"{base}/ports/{n}", int(n)) for n in tree.names(base, "ports") if _is_number(n))
    netdevs = {entry.netdev for port in ports for entry in port.gids if entry.netdev}
    netdevs.update(tree.names(base, "device/net"))
    return Hca(
        name=name,
        uverbs=uverbs,
        numa_node=numa if numa is not None and numa >= 0 else None,
        ports=ports,
        netdevs=frozenset(netdevs),
    )


def _read_port(tree: Tree, base: str, number: int) -> Port:
    # "4: ACTIVE" -> "ACTIVE"; anything else is kept as it is and shown as evidence.
    state = re.sub(r"^\d+:\s*", "", tree.text(base, "state"))
    pkeys = {int(i): key for i in tree.names(base, "pkeys") if _is_number(i) and (key := tree.number(base, "pkeys", i))}
    gids = tuple(_read_gid(tree, base, i) for i in tree.names(base, "gids") if _is_number(i))
    return Port(number=number, state=state, link_layer=tree.text(base, "link_layer"), pkeys=pkeys, gids=gids)


def _read_gid(tree: Tree, base: str, index: str) -> GidEntry:
    text = tree.text(base, "gids", index)
    try:
        gid = IPv6Address(text)
    except ValueError:
        return GidEntry(int(index), None, text)
    if gid == IPv6Address(0):  # most of a table of 256: their attributes say nothing and cost two reads each
        return GidEntry(int(index), gid, text)
    netdev = tree.text(base, "gid_attrs/ndevs", index)
    return GidEntry(
        int(index),
        gid,
        text,
        type=tree.text(base, "gid_attrs/types", index),
        netdev=netdev,
        netdev_here=_netdev_here(tree, netdev),
    )


def _netdev_here(tree: Tree, netdev: str) -> bool | None:
    """Whether the interface is in this network namespace; ``None`` when that cannot be told."""
    if not netdev or "/" in netdev or not tree.exists("sys/class/net"):
        return None
    return tree.exists("sys/class/net", netdev)


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit() and len(name) < 6
