"""Which GID of a port to use (FC-01). Pure: entries in, one index or a reason out.

A GID is an IPv6 address, and :mod:`ipaddress` already tells a link-local, a mapped and an empty one apart. The choosers
people met in the field take the first entry that looks usable and land on ``fe80::``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address

ROCE_V2 = "RoCE v2"


@dataclass(frozen=True)
class GidEntry:
    """One row of a port's GID table, as sysfs gives it.

    ``gid`` is ``None`` when ``text`` is no GID. ``netdev_here``: the entry's network interface exists in this network
    namespace (``None``: cannot be told).
    """

    index: int
    gid: IPv6Address | None
    text: str = ""
    type: str = ""
    netdev: str = ""
    netdev_here: bool | None = None

    @property
    def address(self) -> IPv4Address | IPv6Address | None:
        """The IP address a RoCE GID stands for: the IPv4 one when mapped."""
        return None if self.gid is None else (self.gid.ipv4_mapped or self.gid)

    @property
    def is_zero(self) -> bool:
        return self.gid is not None and int(self.gid) == 0


@dataclass(frozen=True)
class GidChoice:
    """The chosen entry, or ``entry=None`` and why."""

    entry: GidEntry | None
    reason: str = ""


def refusal(entry: GidEntry, link_layer: str) -> str:
    """Why this entry must not be used; empty when it may. ``link_layer`` is ``Ethernet`` or ``InfiniBand``."""
    if entry.gid is None:
        return f"not a GID ({entry.text[:40]!r})"
    if entry.is_zero:
        return "all zero"
    if link_layer == "InfiniBand":
        # A native GID is subnet prefix + port GUID; its default prefix is fe80::/64 and is routable on the fabric.
        return "" if int(entry.gid) & (2**64 - 1) else "port GUID is zero"
    if entry.type != ROCE_V2:
        return f"{entry.type or 'type unreadable'}, not {ROCE_V2}"
    address = entry.address
    assert address is not None
    for bad, word in (
        (address.is_unspecified, "empty address"),
        (address.is_loopback, "loopback"),
        (address.is_link_local, "link-local"),
        (address.is_multicast, "multicast"),
    ):
        if bad:
            return word
    return ""


def choose(entries: Sequence[GidEntry], link_layer: str, forced: int | None = None) -> GidChoice:
    """Pick the entry of one port.

    An interface of this namespace goes before an unknown one, that before one of another namespace; then IPv4 before
    IPv6; then the lowest index. RoCE v1 and link-local entries are never picked.

    Args:
        entries: the port's table.
        link_layer: ``Ethernet`` (RoCE) or ``InfiniBand``.
        forced: an index the environment forces on the engine (``MC_GID_INDEX``): judged, not chosen.
    """
    usable = [entry for entry in entries if not refusal(entry, link_layer)]
    best = min(usable, key=_rank, default=None)
    if forced is not None:
        return _judge_forced(entries, link_layer, forced, best)
    if best is None:
        return GidChoice(None, _why_none(entries, link_layer))
    return GidChoice(best)


def _rank(entry: GidEntry) -> tuple[int, int, int]:
    here = {True: 0, None: 1, False: 2}[entry.netdev_here]
    return here, 0 if isinstance(entry.address, IPv4Address) else 1, entry.index


def _judge_forced(entries: Sequence[GidEntry], link_layer: str, forced: int, best: GidEntry | None) -> GidChoice:
    entry = next((e for e in entries if e.index == forced), None)
    why = "no such entry" if entry is None else refusal(entry, link_layer)
    if not why:
        return GidChoice(entry)
    shown = "" if entry is None or entry.is_zero else f"{describe(entry)}, "
    instead = f"; index {best.index} would be right" if best else ""
    return GidChoice(None, f"the environment forces GID index {forced} ({shown}{why}){instead}")


def _why_none(entries: Sequence[GidEntry], link_layer: str) -> str:
    filled = [entry for entry in entries if not entry.is_zero]
    wanted = "usable GID" if link_layer == "InfiniBand" else f"routable {ROCE_V2} GID"
    if not entries:
        return f"no {wanted}: the GID table is empty or unreadable"
    if not filled:
        return f"no {wanted}: all {len(entries)} GIDs are zero"
    seen = "; ".join(f"{e.index}: {describe(e)} {refusal(e, link_layer)}" for e in filled[:4])
    return f"no {wanted} ({seen}{'; ...' if len(filled) > 4 else ''})"


def describe(entry: GidEntry) -> str:
    """The address in its short form."""
    return entry.text[:40] if entry.gid is None else str(entry.address)
