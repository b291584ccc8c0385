"""What the node reports say against a job: a finding for each node and check that fails (RFC §4.2.3; FC-09, FC-16).

Any doubt about a node counts: no report, two reports, an unreadable one, a check that was skipped, a version other than
the other nodes'. The order of the reports does not matter.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from relax_tq_rdma.transport.report import CHECKS, DERIVED_CHECKS, NodeReport

_SHOWN_NODES = 8
_SHOWN_CHARS = 240
_SAME_PLUGIN = "install the same relax-tq-rdma on every node"


class Finding(NamedTuple):
    """Why one node cannot do something: it fails ``check``. ``node`` is the name shown to people, or empty."""

    node: str
    check: str
    evidence: str
    fix: str = ""

    @property
    def why(self) -> str:
        """``evidence: fix``, on one line of bounded length."""
        return clip(": ".join(part.strip().rstrip(".") for part in (self.evidence, self.fix) if part.strip()))


def find(
    checks: Sequence[str], devices: Sequence[str], reports: Iterable[object], nodes: Mapping[str, str]
) -> list[Finding]:
    """All findings, in natural order of nodes (``node-2`` before ``node-10``), then in display order of checks.

    Args:
        checks: the checks that must pass.
        devices: RDMA devices that every node must have, when ``rdma_device`` is among the checks.
        reports: :class:`NodeReport` values or mappings of that shape; anything else is an unreadable report.
        nodes: the nodes of the job, node id to short name.
    """
    names = unique_names(nodes)
    by_node, found = _sort_out(reports, names)
    if not nodes:
        found.append(Finding("", "report", "no alive node was found", "check that Ray is up with: ray status"))
    probed = [check for check in checks if check in CHECKS]
    for node_id, report in by_node.items():
        found += _failing_checks(names[node_id], report, probed)
        if "rdma_device" in checks:
            found += _missing_devices(names[node_id], report, devices)
    named = [(names[node_id], report) for node_id, report in by_node.items()]
    with_mooncake = [(name, report.mooncake_version) for name, report in named if _passed(report, "mooncake")]
    found += _other_versions(with_mooncake, "mooncake", "Mooncake")
    found += _other_versions([(name, report.plugin_version) for name, report in named], "plugin", "relax-tq-rdma")
    asked = [finding for finding in found if finding.check in checks]
    place = {node: i for i, node in enumerate(sorted({finding.node for finding in asked}, key=_natural))}
    order = {check: i for i, check in enumerate((*DERIVED_CHECKS, *CHECKS))}
    return sorted(asked, key=lambda f: (place[f.node], order[f.check], f))


def unique_names(nodes: Mapping[str, str]) -> dict[str, str]:
    """Node id to the name shown; nodes that share a name (several on one host) get the start of their id with it."""
    short = {node_id: clip(name, 64) for node_id, name in nodes.items()}
    count = Counter(short.values())
    return {i: name if count[name] == 1 else f"{name}/{i[:12]}" for i, name in short.items()}


def describe(found: Sequence[Finding]) -> str:
    """All checks and nodes in one bounded piece of text: ``check on a, b (evidence: fix); check on c (...)``."""
    groups: dict[str, list[Finding]] = {}
    for finding in found:
        groups.setdefault(finding.check, []).append(finding)
    parts = []
    for check, group in groups.items():
        nodes = list(dict.fromkeys(finding.node for finding in group if finding.node))
        more = f" and {len(nodes) - _SHOWN_NODES} more" if len(nodes) > _SHOWN_NODES else ""
        where = f"{check} on {', '.join(nodes[:_SHOWN_NODES])}{more}" if nodes else check
        parts.append(f"{where} ({group[0].why})")
    return "; ".join(parts)


def clip(text: str, limit: int = _SHOWN_CHARS) -> str:
    """``text`` on one line, cut to ``limit`` characters: evidence comes from other nodes and ends up in logs."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _sort_out(reports: Iterable[object], names: Mapping[str, str]) -> tuple[dict[str, NodeReport], list[Finding]]:
    """The one good report of each node; a finding for each node without one and for reports that belong to no node."""
    entries: defaultdict[str, list[NodeReport | str]] = defaultdict(list)
    for raw in reports:
        node_id, entry = _read(raw)
        entries[node_id].append(entry)
    good: dict[str, NodeReport] = {}
    found: list[Finding] = []
    for node_id in names.keys() | entries.keys():
        got, name = entries[node_id], names.get(node_id, "")
        if node_id not in names:
            whose = f"of unknown node {clip(node_id, 64)}" if node_id else "without a node id"
            found.append(Finding("", "report", f"{len(got)} report(s) {whose}", "start again when no node is joining"))
        elif not got:
            found.append(Finding(name, "report", "no report in time", "check this node with: ray status"))
        elif len(got) > 1:
            found.append(Finding(name, "report", f"{len(got)} reports for one node id", _SAME_PLUGIN))
        elif isinstance(got[0], str):
            found.append(Finding(name, "report", f"the report cannot be read ({got[0]})", _SAME_PLUGIN))
        else:
            good[node_id] = got[0]
    return good, found


def _read(raw: object) -> tuple[str, NodeReport | str]:
    """Node id and validated report; or node id (empty when unknown) and what is wrong with the report."""
    try:
        # A Struct that was unpickled or built in Python is not validated: check it like any other input.
        report = msgspec.convert(msgspec.to_builtins(raw), NodeReport)
    except (TypeError, ValueError, AttributeError, RecursionError) as exc:
        node_id = raw.get("node_id") if isinstance(raw, Mapping) else getattr(raw, "node_id", None)
        return node_id if isinstance(node_id, str) else "", clip(str(exc))
    if len({check.name for check in report.checks}) < len(report.checks):
        return report.node_id, "a check is reported twice"
    return report.node_id, report


def _passed(report: NodeReport, name: str) -> bool:
    check = report.check(name)
    return check is not None and check.status in ("ok", "degraded")


def _failing_checks(node: str, report: NodeReport, wanted: Sequence[str]) -> list[Finding]:
    checks = {check.name: check for check in report.checks}
    found = []
    for name in wanted:
        check = checks.get(name)
        if check is None:
            found.append(Finding(node, name, "was not checked", _SAME_PLUGIN))
        elif check.status == "skipped":
            found.append(Finding(node, name, f"was skipped ({check.evidence})", check.fix))
        elif check.status == "missing":
            found.append(Finding(node, name, check.evidence, check.fix))
    return found


def _missing_devices(node: str, report: NodeReport, requested: Sequence[str]) -> list[Finding]:
    if not all(_passed(report, check) for check in ("rdma_device", "rdma_port", "rdma_gid")):
        return []  # the check that refused the device says so itself, and better
    usable = sorted({device.name for device in report.devices}, key=_natural)
    absent = [name for name in requested if name not in usable]
    if absent:
        text = f"{', '.join(absent)} is not usable here (usable: {', '.join(usable) or 'none'})"
        return [Finding(node, "rdma_device", text, "name devices in --tq-rdma-device that every node has")]
    return [] if usable else [Finding(node, "rdma_device", "no usable device is listed", _SAME_PLUGIN)]


def _other_versions(versions: Sequence[tuple[str, str]], check: str, label: str) -> list[Finding]:
    """A finding for each node that does not run what most nodes run; a tie goes to the first node in natural order."""
    known = sorted(((node, version) for node, version in versions if version), key=lambda item: _natural(item[0]))
    if not known and len(versions) == 1:
        return []  # nothing to compare with
    if not known:
        return [Finding(node, check, f"{label} does not tell its version", _SAME_PLUGIN) for node, _ in versions]
    common, count = Counter(version for _, version in known).most_common(1)[0]
    others = f"{count} nodes have" if count > 1 else f"{known[0][0]} has"
    fix = f"install {label} {common} on every node"
    return [
        Finding(node, check, f"{label} {version or 'of unknown version'} here, while {others} {common}", fix)
        for node, version in versions
        if version != common
    ]


def _natural(name: str) -> list[str | int]:
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", name))]
