"""Proof that bytes crossed an HCA: its counters before and after (design: "only the wire proves RDMA").

``protocol=rdma`` without a usable HCA sets up with code 0 and moves bytes over TCP, so no return code proves RDMA. A
reader that fetches N bytes over RDMA makes the receive counter of its own HCA grow by at least N; nothing else is
accepted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from relax_tq_rdma.transport.sysfs import Tree

WORD_BYTES = 4
"""Unit of ``port_rcv_data`` (InfiniBand PortCounters)."""

MTU_BYTES = 4096
"""Largest InfiniBand and RoCE path MTU: a packet carries no more payload, whatever the port is set to."""

Unit = Literal["word", "packet"]
_COUNTERS: tuple[tuple[Unit, str], ...] = (("word", "counters/port_rcv_data"), ("packet", "hw_counters/rcvd_pkts"))
_SATURATED = (2**32 - 1, 2**64 - 1)


class Counter(msgspec.Struct, frozen=True, kw_only=True):
    """What one port has received since boot, in ``unit``: ``word`` (4 bytes) or ``packet``."""

    device: str
    port: int
    unit: Unit
    received: int


class WireProof(msgspec.Struct, frozen=True, kw_only=True):
    """Judgement over one transfer. ``proven``: the growth accounts for the bytes; ``evidence`` is one sentence."""

    proven: bool
    evidence: str


def read_counters(tree: Tree, devices: Iterable[str] = ()) -> tuple[Counter, ...]:
    """Receive counters of all ports of ``devices`` (of all devices when empty) below ``sys/class/infiniband``.

    ``ports/*/counters/port_rcv_data`` where it exists, else ``ports/*/hw_counters/rcvd_pkts`` (soft-RoCE). A port
    that has neither is left out.
    """
    base = "sys/class/infiniband"
    ports = [
        (device, port)
        for device in tuple(devices) or tree.names(base)
        for port in tree.names(base, device, "ports")
        if port.isdigit()
    ]
    found = (_read_port(tree, f"{base}/{device}/ports/{port}", device, int(port)) for device, port in ports)
    return tuple(counter for counter in found if counter is not None)


def judge(
    before: Iterable[Counter],
    after: Iterable[Counter],
    received_bytes: int,
    *,
    quiet: tuple[Iterable[Counter], Iterable[Counter]] = ((), ()),
    quiet_seconds: float = 0.0,
    transfer_seconds: float = 0.0,
) -> WireProof:
    """Whether the receive counters account for ``received_bytes``.

    Args:
        before: read right before this process fetched.
        after: read right after.
        received_bytes: payload this process fetched from other processes in between.
        quiet: read at both ends of a window in which this process fetched nothing: what others receive on the same HCA
            at that rate is not counted as ours.
        quiet_seconds: length of that window.
        transfer_seconds: length of the window from ``before`` to ``after``.
    """
    start, idle = _by_port(before), tuple(map(_by_port, quiet))
    pairs = [(start[key], end) for key, end in _by_port(after).items() if key in start]
    if not pairs:
        return WireProof(proven=False, evidence="no counter of an HCA could be read, so nothing proves RDMA")
    stuck = [end.device for begin, end in pairs if begin.received == end.received and end.received in _SATURATED]
    if stuck:
        return WireProof(proven=False, evidence=f"the receive counter of {stuck[0]} stands at its limit: reset it")
    accounted = 0.0
    for begin, end in pairs:
        growth = float(growth_of(begin.received, end.received))
        rest, woken = (reading.get((end.device, end.port, end.unit)) for reading in idle)
        if rest is not None and woken is not None and quiet_seconds > 0:
            growth -= growth_of(rest.received, woken.received) / quiet_seconds * transfer_seconds
        accounted += max(0.0, growth) * (WORD_BYTES if end.unit == "word" else MTU_BYTES)
    names = ", ".join(sorted({end.device for _, end in pairs}))
    evidence = f"{received_bytes} bytes were fetched, the receive counters of {names} account for {accounted:.0f}"
    return WireProof(proven=accounted >= received_bytes, evidence=evidence)


def growth_of(before: int, after: int) -> int:
    """Difference of two readings of a counter that may have wrapped, at 32 or at 64 bits."""
    if after >= before:
        return after - before
    return after - before + (2**32 if before < 2**32 else 2**64)


def _by_port(counters: Iterable[Counter]) -> dict[tuple[str, int, str], Counter]:
    return {(counter.device, counter.port, counter.unit): counter for counter in counters}


def _read_port(tree: Tree, base: str, device: str, port: int) -> Counter | None:
    for unit, name in _COUNTERS:
        received = tree.number(base, name)
        if received is not None:
            return Counter(device=device, port=port, unit=unit, received=received)
    return None
