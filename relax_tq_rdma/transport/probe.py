"""The probe of one node (RFC §4.2.3): every check of :data:`report.CHECKS`, each with evidence and a way out.

It runs in the process that will use what it finds (a Ray worker of the node), because limits, devices and environment
are those of a process, not of a machine. All files are read below one root, so a made-up tree drives it in tests.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from relax_tq_rdma import env
from relax_tq_rdma.settings import Settings
from relax_tq_rdma.transport import address, host_checks
from relax_tq_rdma.transport import memory as memory_plan
from relax_tq_rdma.transport.hca import parse_request
from relax_tq_rdma.transport.mooncake_facts import MooncakeFacts, inspect_mooncake
from relax_tq_rdma.transport.rdma_checks import check_rdma
from relax_tq_rdma.transport.report import CHECKS, Check, NodeReport, RdmaDevice
from relax_tq_rdma.transport.sysfs import Tree
from relax_tq_rdma.transport.verbs import VerbsFacts, query_verbs
from relax_tq_rdma.version import __version__

SPLITS_REGIONS_SINCE = (0, 3, 13)
"""First Mooncake release seen to register a region above the device's ``max_mr_size`` in pieces."""

_RDMA = ("rdma_device", "rdma_port", "rdma_gid", "memlock")
_CHILD_SECONDS = 20.0


class ProbeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the asker knows about the job, the same for all nodes. It crosses to the nodes as plain data.

    ``hosts``: machines of the job. ``processes_per_node``: client processes of a node, 0: one a GPU and one more,
    at least 2. ``producers_per_node``: those that put payload. ``announce``: the address this node announces, where
    the environment does not name one; empty: found out. ``mooncake_path``: folder to import Mooncake from first.
    ``limit_seconds``: time for the whole probe.
    """

    hosts: int = 1
    processes_per_node: int = 0
    producers_per_node: int = 1
    announce: str = ""
    mooncake_path: str = ""
    limit_seconds: float = _CHILD_SECONDS


def probe_node(
    settings: Settings,
    *,
    root: Path | None = None,
    node: str,
    node_id: str = "local",
    request: ProbeRequest | None = None,
    environ: Mapping[str, str] | None = None,
) -> NodeReport:
    """Inspect this node.

    Args:
        settings: the job's settings; a check they do not ask for is ``skipped``.
        root: where ``sys``, ``proc`` and ``dev`` are; by default ``RTQ_SYSTEM_ROOT``.
        node: short name for people.
        node_id: Ray's node id, or ``local``.
        request: what the asker knows about the job.
        environ: environment of the processes that will run, by default this one's.

    Raises:
        UsageError: a size in ``RTQ_*`` is no number. Nothing that is found on the node raises.
    """
    request = request or ProbeRequest()
    environ = os.environ if environ is None else environ
    tree = Tree(root if root is not None else Path(env.SYSTEM_ROOT.read()))
    asked = _asked(settings)
    if not asked:
        skipped = tuple(_skipped(name, settings) for name in CHECKS)
        return NodeReport(node=node, node_id=node_id, checks=skipped, plugin_version=__version__)

    ends = time.monotonic() + request.limit_seconds

    def left() -> float:
        return max(0.5, ends - time.monotonic())

    mooncake = inspect_mooncake(left(), first_path=request.mooncake_path, environ=environ)
    plan = memory_plan.plan(
        settings,
        processes=request.processes_per_node or max(2, host_checks.gpu_count(tree) + 1),
        producers=request.producers_per_node,
        lazy=mooncake.lazy_mount,
    )
    rdma: dict[str, Check] = {}
    devices: tuple[RdmaDevice, ...] = ()
    if "rdma_device" in asked:
        checks, devices = check_rdma(
            tree,
            parse_request(settings.rdma_device),
            environ,
            largest_region=plan.largest_region,
            splits_regions=mooncake.release >= SPLITS_REGIONS_SINCE,
            verbs=_verbs(tree, left()),
        )
        rdma = {check.name: check for check in checks}
    announced = environ.get(env.LOCAL_HOSTNAME.name) or request.announce or address.own_address()
    found: dict[str, Callable[[], Check]] = {
        "mooncake": lambda: _check_mooncake(mooncake),
        "rdma_device": lambda: rdma["rdma_device"],
        "rdma_port": lambda: rdma["rdma_port"],
        "rdma_gid": lambda: rdma["rdma_gid"],
        "memlock": lambda: host_checks.check_memlock(tree, plan),
        "reachability": lambda: _check_announced(announced, request.hosts, left()),
        "gdr": lambda: host_checks.check_gdr(tree, mooncake),
        "memcpy_hazard": lambda: host_checks.check_memcpy_hazard(environ, mooncake),
        "shm": lambda: host_checks.check_shm(tree),
        "memory": lambda: host_checks.check_memory(tree, plan),
    }
    return NodeReport(
        node=node,
        node_id=node_id,
        checks=tuple(found[name]() if name in asked else _skipped(name, settings) for name in CHECKS),
        address=announced,
        mooncake_version=mooncake.version,
        plugin_version=__version__,
        devices=devices,
        memory=plan,
    )


def with_check(report: NodeReport, check: Check) -> NodeReport:
    """The report with one check replaced, or added: peers are dialled later, by someone else than the probe."""
    others = [c for c in report.checks if c.name != check.name]
    order = {name: i for i, name in enumerate(CHECKS)}
    checks = sorted([*others, check], key=lambda c: order.get(c.name, len(order)))
    return msgspec.structs.replace(report, checks=tuple(checks))


def _asked(settings: Settings) -> frozenset[str]:
    """Checks whose outcome matters to this job."""
    if not settings.wants_mooncake:
        return frozenset()
    asked = set(CHECKS) - {"gdr", *_RDMA}
    if settings.wants_rdma:
        asked.update(_RDMA)
        if settings.use_gdr:
            asked.add("gdr")
    return frozenset(asked)


def _skipped(name: str, settings: Settings) -> Check:
    if not settings.wants_mooncake:
        why = "the backend is simple"
    elif name == "gdr" and settings.wants_rdma:
        why = "--tq-use-gdr is off"
    else:
        why = "the job does not use RDMA"
    return Check(name=name, status="skipped", evidence=f"not asked for: {why}")


def _verbs(tree: Tree, limit: float) -> VerbsFacts | None:
    return query_verbs(limit) if tree.is_system and tree.names("sys/class/infiniband") else None


def _check_mooncake(facts: MooncakeFacts) -> Check:
    if facts.problem:
        return Check(name="mooncake", status="missing", evidence=facts.problem, fix=facts.fix)
    if not facts.version:
        return Check(
            name="mooncake",
            status="degraded",
            evidence="imports, but its version is unknown (no package metadata): nodes cannot be compared",
            fix="install Mooncake as a wheel",
        )
    build = "" if facts.has_cuda else ", build without CUDA"
    mount = "" if facts.lazy_mount else "; every client mounts a segment (newer ones only where payload is put)"
    return Check(name="mooncake", status="ok", evidence=f"Mooncake {facts.version}{build}{mount}")


def _check_announced(host: str, hosts: int, limit: float) -> Check:
    """The local half of reachability: the address this node tells its peers (FC-18)."""
    judged = address.judge_announce(host, hosts=hosts, limit=limit)
    fix = f"set {env.LOCAL_HOSTNAME.name} on this node to an address its peers can reach"
    if judged.problem:
        return Check(name="reachability", status="missing", evidence=judged.problem, fix=fix)
    if judged.doubt:
        return Check(name="reachability", status="degraded", evidence=judged.doubt, fix=fix)
    return Check(name="reachability", status="ok", evidence=f"announces {host}")
