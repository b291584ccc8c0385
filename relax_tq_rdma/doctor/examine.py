"""What the doctor finds out: probe, decision, matrix, seams. The result is plain data; others print it."""

from __future__ import annotations

import difflib
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, redirect_stdout
from dataclasses import dataclass

import msgspec

from relax_tq_rdma import compat, env
from relax_tq_rdma.doctor.options import Options
from relax_tq_rdma.say import say
from relax_tq_rdma.seams import SeamReport, reports
from relax_tq_rdma.seams.base import installed_transfer_queue
from relax_tq_rdma.seams.host_code import has_host
from relax_tq_rdma.seams.relax_controller import RelaxController
from relax_tq_rdma.seams.relax_rollout import RelaxRollout
from relax_tq_rdma.settings import Settings
from relax_tq_rdma.summary import start_line
from relax_tq_rdma.transport import address, running_ray
from relax_tq_rdma.transport.bounded import if_longer
from relax_tq_rdma.transport.decision import Refusal, decide, nodes_ok
from relax_tq_rdma.transport.findings import unique_names
from relax_tq_rdma.transport.probe import ProbeRequest, probe_node, with_check
from relax_tq_rdma.transport.report import Check, Decision, NodeReport
from relax_tq_rdma.transport.rundir import run_dir

ALL_CAPABILITIES = Settings(storage_backend="mooncake", transport="rdma", rdma_mode="auto", use_gdr=True)
"""Settings under which every check runs: what could this node do?"""

_QUIET_SECONDS = 2.0
_DIAL_SECONDS = 3.0


@dataclass(frozen=True)
class Diagnosis:
    """Everything the doctor knows.

    ``nodes`` maps node id to a unique name. ``reports`` are those of the planned job; when it does not use Mooncake
    they say nothing, and ``capabilities`` holds what the nodes could do instead. ``seams`` is empty when no layer is
    on and Relax is not installed. ``outcome`` is the engine's own.
    """

    settings: Settings
    nodes: Mapping[str, str]
    reports: tuple[NodeReport, ...]
    capabilities: tuple[NodeReport, ...]
    findings: Sequence[compat.Finding]
    seams: Sequence[SeamReport]
    outcome: Decision | Refusal
    variables: Sequence[tuple[str, str, str]]

    @property
    def rejects(self) -> list[compat.Finding]:
        return [finding for finding in self.findings if finding.verdict == "reject"]

    @property
    def decision(self) -> Decision | None:
        """What the job would run on; ``None`` when it would not start."""
        return self.outcome if isinstance(self.outcome, Decision) and not self.refusal else None

    @property
    def ok(self) -> bool:
        """The job would start. A degradation in ``auto`` does not change that; it is shown instead."""
        return self.decision is not None

    @property
    def exit_code(self) -> int:
        """As the job's own: 2 for flags that cannot go together, 1 for what was found out about the nodes."""
        return 0 if self.ok else 2 if self.rejects else 1

    @property
    def refusal(self) -> str:
        """Why the job would not start; empty when it would."""
        reasons = [finding.text for finding in self.rejects] or [
            seam.text for seam in self.seams if seam.needed and not seam.ok
        ]
        if not reasons and isinstance(self.outcome, Refusal):
            reasons = [self.outcome.message]
        return "; ".join(reasons)

    @property
    def start_line(self) -> str:
        """The start line of that job, before its verification; empty when it would not start."""
        if self.decision is None:
            return ""
        probed = self.settings.wants_mooncake
        counts = nodes_ok(self.decision, self.settings, self.reports, self.nodes) if probed else None
        return start_line(self.settings, self.decision, probe=counts)


def examine(options: Options, settings: Settings) -> Diagnosis:
    """Look at this node or the cluster.

    Raises:
        UsageError: an ``RTQ_*`` size or duration is no number.
        StartError: ``--cluster`` without Ray or without a running cluster; or the run folder cannot be used.
    """
    if options.cluster:
        running_ray.dial()
    seams = _seams(settings)
    facts = _facts(seams)
    findings, settings = compat.findings(settings, facts), compat.in_force(settings, facts)
    if not settings.touches_nothing:
        _check_own_settings(options, settings)
    asked = settings if settings.wants_mooncake else ALL_CAPABILITIES
    where = "the nodes of the cluster" if options.cluster else "this node"
    with progress(f"probing {where}, at most {settings.init_timeout_seconds:g} s"):
        nodes, found = probe_running_cluster(asked) if options.cluster else _probe_here(options, asked)
        found = _with_master(found, asked, max(options.nodes, len({report.address for report in found})))
    names = unique_names(nodes)
    complete = tuple(_completed(found, names))
    own = complete if settings.wants_mooncake else tuple(_unasked(settings, names))
    return Diagnosis(
        settings=settings,
        nodes=names,
        reports=own,
        capabilities=() if settings.wants_mooncake else complete,
        findings=findings,
        seams=seams,
        outcome=decide(settings, [r for r in own if r.checks[0].name != "report"], names),
        variables=variables(os.environ),
    )


def _check_own_settings(options: Options, settings: Settings) -> None:
    """What the job would only notice when it is too late to ask anybody."""
    env.check()
    if settings.wants_mooncake and settings.mooncake_auto_init == "job-owned" and str(options.root) == "/":
        run_dir("masters")


def _seams(settings: Settings) -> list[SeamReport]:
    """Where the layers of this job would attach. Costs the import of TransferQueue, and with it of torch."""
    if settings.touches_nothing and not has_host():
        return []
    # stdout belongs to the result: what a library prints while it is imported goes elsewhere.
    with progress("importing TransferQueue to check its seams"), redirect_stdout(sys.stderr):
        try:
            return reports(settings)
        except ImportError as exc:
            return [
                SeamReport(
                    name="TransferQueue",
                    ok=False,
                    installed=installed_transfer_queue(),
                    expected="that it can be imported",
                    found=str(exc),
                )
            ]


def _facts(seams: Sequence[SeamReport]) -> compat.HostFacts:
    """What the host does by itself. Its arguments are not known here."""
    aside = {seam.name for seam in seams if seam.aside}
    return compat.HostFacts(
        own_data_plane=RelaxController.name in aside, own_group_processor=RelaxRollout.name in aside
    )


def probe_running_cluster(settings: Settings) -> tuple[dict[str, str], list[NodeReport]]:
    """Nodes (id to name) and their reports, within ``--tq-init-timeout-seconds``.

    Raises:
        StartError: Ray is not installed, or there is no cluster to join.
    """
    with running_ray.joined():
        from relax_tq_rdma.transport.agents import probe_cluster

        return probe_cluster(settings, settings.init_timeout_seconds)


def _probe_here(options: Options, settings: Settings) -> tuple[dict[str, str], list[NodeReport]]:
    request = ProbeRequest(hosts=options.nodes, processes_per_node=options.processes_per_node)
    name = socket.gethostname() if str(options.root) == "/" else options.root.name
    report = probe_node(settings, root=options.root, node=name, node_id="local", request=request)
    return {"local": name}, [report]


def _master_check(master: str, hosts: int) -> Check | None:
    """The master counts as a peer of every node; looked at from here. ``None`` when it answers.

    Raises:
        UsageError: it is not HOST:PORT.
    """
    endpoint = address.parse(master)
    if hosts > 1 and address.is_loopback(endpoint.host):
        problem = f"{endpoint} is loopback: each node would look for it on itself"
    else:
        problem = address.dial(endpoint, _DIAL_SECONDS)
    fix = "start it, mend --tq-mooncake-master-address, or use --tq-mooncake-auto-init job-owned"
    evidence = f"the Mooncake master {problem}"
    return Check(name="reachability", status="missing", evidence=evidence, fix=fix) if problem else None


def _with_master(reports: Sequence[NodeReport], settings: Settings, hosts: int) -> list[NodeReport]:
    check = _master_check(settings.mooncake_master_address, hosts) if settings.mooncake_master_address else None
    if check is None:
        return list(reports)
    failed = {r.node_id for r in reports if (known := r.check("reachability")) and known.status == "missing"}
    return [report if report.node_id in failed else with_check(report, check) for report in reports]


def _completed(reports: Sequence[NodeReport], names: Mapping[str, str]) -> Iterator[NodeReport]:
    """One report a node, in the order of the nodes; a silent node gets a report that says so."""
    by_id = {report.node_id: report for report in reports}
    for node_id, name in names.items():
        silent = Check(
            name="report", status="missing", evidence="no report in time", fix="check this node with: ray status"
        )
        report = by_id.get(node_id) or NodeReport(node=name, node_id=node_id, checks=(silent,))
        yield msgspec.structs.replace(report, node=name)


def _unasked(settings: Settings, names: Mapping[str, str]) -> Iterator[NodeReport]:
    for node_id, name in names.items():
        yield probe_node(settings, node=name, node_id=node_id)


def variables(environ: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Variables set here that change a job: name, value, note. A misspelt ``RTQ_`` name is pointed out."""
    known = {variable.name: variable for variable in env.VARIABLES}
    found = []
    for name in sorted(environ):
        if name in known or name.startswith("MC_") or name == "NCCL_IB_GID_INDEX":  # Mooncake reads that one too
            found.append((name, environ[name], ""))
        elif name.startswith("RTQ_"):
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            if close:
                found.append((name, environ[name], f"not known; did you mean {close[0]}?"))
    return found


def progress(what: str) -> AbstractContextManager[None]:
    """Say on stderr what is going on, once it takes longer than two seconds."""
    return if_longer(_QUIET_SECONDS, lambda: say(f"doctor: {what} ..."))
