"""The checks ``rdma_device``, ``rdma_port`` and ``rdma_gid`` of a node, made from the verdicts on its devices."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Network

import msgspec

from relax_tq_rdma import env
from relax_tq_rdma.transport import gid as gids
from relax_tq_rdma.transport.hca import DEVICE, GID, PORT, DeviceRequest, EngineEnv, Verdict, judge
from relax_tq_rdma.transport.memory import MIB, shown
from relax_tq_rdma.transport.report import Check, CheckStatus, RdmaDevice
from relax_tq_rdma.transport.sysfs import Hca, Tree, read_hcas
from relax_tq_rdma.transport.verbs import VerbsFacts

_FORCE_TCP = "MC_FORCE_TCP"
"""Mooncake looks only whether it exists, so an empty or "0" value counts too (transfer_engine_impl.cpp)."""


def check_rdma(
    tree: Tree,
    request: Sequence[DeviceRequest],
    environ: Mapping[str, str],
    *,
    largest_region: int,
    splits_regions: bool,
    verbs: VerbsFacts | None = None,
) -> tuple[list[Check], tuple[RdmaDevice, ...]]:
    """Look at the RDMA devices of a node.

    Args:
        tree: the node's files.
        request: the devices asked for; empty: any will do.
        environ: where the engine reads its port, partition key and GID index from.
        largest_region: bytes of the largest memory region a client will register.
        splits_regions: this Mooncake registers what is larger than a device's limit in pieces.
        verbs: what libibverbs says; ``None`` below a root that is not this machine's.

    Returns:
        The three checks, and the usable devices in natural order (or in the order asked for).
    """
    if _FORCE_TCP in environ:
        return [_forced_tcp(), _nothing_left(PORT, DEVICE), _nothing_left(GID, DEVICE)], ()
    engine = EngineEnv.read(environ)
    hcas = read_hcas(tree)
    if not hcas and not request:
        return [_no_device(tree), _nothing_left(PORT, DEVICE), _nothing_left(GID, DEVICE)], ()
    known = {hca.name: hca for hca in hcas}
    asked = request or [DeviceRequest(hca.name) for hca in hcas]
    verdicts = [
        judge(tree, known[r.name], engine, r.port, verbs) if r.name in known else _unknown(tree, r, hcas) for r in asked
    ]
    devices = tuple(v.usable for v in verdicts if v.usable is not None)
    device, port, gid = (_gate(gate, verdicts, named=bool(request)) for gate in (DEVICE, PORT, GID))
    if not request and gid.status == "ok":
        gid = _with_doubts(tree, gid, verdicts)
    if device.status == "ok":
        device = _with_region_limit(device, devices, largest_region, splits_regions)
    return [device, port, gid], devices


def _forced_tcp() -> Check:
    return Check(
        name=DEVICE,
        status="missing",
        evidence=f"{_FORCE_TCP} is set: Mooncake then moves bytes over TCP, whatever it is asked for",
        fix=f"unset {_FORCE_TCP} on this node (where Ray is started)",
    )


def _no_device(tree: Tree) -> Check:
    reading = "is empty" if tree.exists("sys/class/infiniband") else "does not exist"
    return Check(
        name=DEVICE,
        status="missing",
        evidence=f"no RDMA device: /sys/class/infiniband {reading}",
        fix="use nodes with an RDMA device and its driver, or --tq-transport tcp",
    )


def _with_region_limit(check: Check, devices: Sequence[RdmaDevice], largest: int, splits: bool) -> Check:
    """A region above the device's limit "works" until its far end is first used, where it is not split (FC-10)."""
    small = [d for d in devices if d.max_mr_bytes is not None and d.max_mr_bytes < largest]
    if not small:
        return check
    limit = min(d.max_mr_bytes or 0 for d in small)
    names = ", ".join(d.name for d in small)
    status: CheckStatus = "degraded" if splits else "missing"
    how = "registered in pieces" if splits else "this Mooncake silently registers a part only"
    text = f"a region of {shown(largest)} is above max_mr_size {shown(limit)} of {names}: {how}"
    return msgspec.structs.replace(
        check,
        status=status,
        evidence=f"{check.evidence}; {text}",
        fix=(
            f"keep {env.SEGMENT_MB.name}, and {env.LOCAL_BUFFER_MB.name} plus --tq-host-staging-mb, "
            f"at {limit // MIB} or less"
        ),
    )


def _unknown(tree: Tree, request: DeviceRequest, hcas: Sequence[Hca]) -> Verdict:
    owner = next((hca.name for hca in hcas if request.name in hca.netdevs), "")
    if owner:
        reason, fix = "is a network interface, not an RDMA device", f"use --tq-rdma-device {owner}"
        return Verdict(str(request), DEVICE, reason, fix)
    names = [hca.name for hca in hcas]
    close = difflib.get_close_matches(request.name.lower(), names, n=1, cutoff=0.7)
    if close:
        fix = f"did you mean {close[0]}?"
    elif names:
        fix = f"use one of: {', '.join(names[:8])}"
    else:
        fix = "this node has no RDMA device: use another node, or --tq-transport tcp"
    interface = "/" not in request.name and tree.exists("sys/class/net", request.name)
    reason = "is a network interface without an RDMA device" if interface else "does not exist on this node"
    return Verdict(str(request), DEVICE, reason, fix)


def _nothing_left(gate: str, before: str) -> Check:
    """No device is left to look at; the fix is that of the check ``before``."""
    return Check(name=gate, status="missing", evidence=f"no device passed {before}")


def _gate(gate: str, verdicts: Sequence[Verdict], *, named: bool) -> Check:
    """One check over all devices: with named devices each must pass, without any one is enough."""
    order = (DEVICE, PORT, GID, "")
    reached = [v for v in verdicts if order.index(v.gate) >= order.index(gate)]
    passed = [v for v in reached if v.gate != gate]
    failed = [v for v in reached if v.gate == gate]
    if not reached:
        return _nothing_left(gate, max((v.gate for v in verdicts), key=order.index))
    good = not failed if named else bool(passed)
    words = {DEVICE: "opens: ", PORT: "active: ", GID: ""}
    texts = [words[gate] + ", ".join(_gid_text(v) if gate == GID else v.name for v in passed)] if passed else []
    texts += [f"{v.name}: {v.reason}" for v in failed]
    return Check(
        name=gate,
        status="ok" if good else "missing",
        evidence="; ".join(texts),
        fix="" if good else "; ".join(dict.fromkeys(v.fix for v in failed)),
    )


def _gid_text(verdict: Verdict) -> str:
    assert verdict.chosen is not None
    elsewhere = f", {verdict.chosen.netdev} not in this namespace" if verdict.chosen.netdev_here is False else ""
    return f"{verdict.name} GID {verdict.chosen.index} ({gids.describe(verdict.chosen)}{elsewhere})"


def _with_doubts(tree: Tree, check: Check, verdicts: Sequence[Verdict]) -> Check:
    """No device was named, so Mooncake opens every device it finds: say where that is not known to work (FC-04)."""
    usable = [v for v in verdicts if v.usable is not None]
    doubts: list[str] = []
    unnoticed = [v.name for v in verdicts if v.engine_takes_it]
    if unnoticed:
        doubts.append(f"Mooncake would also use {', '.join(unnoticed)}")
    subnets = {v.name: subnet(tree, v) for v in usable}
    if len(set(subnets.values())) > 1:
        listed = ", ".join(f"{name} in {net}" for name, net in subnets.items())
        doubts.append(f"different subnets, not known to reach one another: {listed}")
        names = [name for name, net in subnets.items() if net == subnets[usable[0].name]]
    else:
        names = list(subnets)
    if not doubts:
        return check
    status: CheckStatus = "degraded"
    return msgspec.structs.replace(
        check,
        status=status,
        evidence="; ".join([check.evidence, *doubts]),
        fix=f"name the devices to use, for example --tq-rdma-device {','.join(names)}",
    )


def subnet(tree: Tree, verdict: Verdict) -> str:
    """The subnet of a usable device: from the node's routes, else the customary /24 or /64 around its address."""
    assert verdict.chosen is not None
    address = verdict.chosen.address
    if isinstance(address, IPv4Address):
        routes = (line.split() for line in tree.text("proc/net/route").splitlines()[1:])
        for fields in routes:
            network = _route(fields) if len(fields) > 7 and fields[0] == verdict.chosen.netdev else None
            if network and network.prefixlen and address in network:
                return str(network)
        return str(IPv4Network((address, 24), strict=False))
    assert address is not None
    return str(IPv6Network((address, 64), strict=False))


def _route(fields: Sequence[str]) -> IPv4Network | None:
    try:
        target, mask = (int.from_bytes(bytes.fromhex(fields[i]), "little") for i in (1, 7))
        return IPv4Network(f"{IPv4Address(target)}/{IPv4Address(mask)}")
    except ValueError:
        return None
