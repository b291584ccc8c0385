"""The diagnosis as text for people: 80 columns, colours only on a terminal, the verdict last."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from relax_tq_rdma.doctor.examine import Diagnosis
from relax_tq_rdma.transport import memory
from relax_tq_rdma.transport.findings import clip
from relax_tq_rdma.transport.report import CHECKS, Check, Decision, NodeReport

_STYLES = {"ok": "green", "degraded": "yellow", "missing": "bold red", "skipped": "dim"}
_SHOWN_NODES = 4


def render(diagnosis: Diagnosis, file: TextIO | None = None) -> None:
    """Print the whole diagnosis."""
    with plain_lines(file) as console:
        if diagnosis.capabilities:
            _title(console, f"{_where(diagnosis.capabilities)}: what is possible (the job as flagged uses none of it)")
            console.print(_checks_table(diagnosis.capabilities, console.width))
        else:
            _title(console, _where(diagnosis.reports))
            console.print(_checks_table(diagnosis.reports, console.width))
            _memory(console, diagnosis.reports)
        _findings(console, diagnosis)
        _seams(console, diagnosis)
        _variables(console, diagnosis)
        _verdict(console, diagnosis)


@contextmanager
def plain_lines(file: TextIO | None = None) -> Iterator[Console]:
    """A console whose lines do not end in blanks: they get in the way of grep, diff and pasting."""
    target = file or sys.stdout
    console = Console(file=target, highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        yield console
    target.write("\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n")


def _where(reports: Sequence[NodeReport]) -> str:
    if len(reports) == 1:
        return f"node {reports[0].node}"
    return f"{len(reports)} nodes"


def _title(console: Console, text: str) -> None:
    console.print(Text(text, style="bold"))


def _checks_table(reports: Sequence[NodeReport], width: int) -> Table:
    room = width - len("memcpy_hazard") - len("degraded") - 6
    table = Table(box=None, pad_edge=False, show_header=True, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("check", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("evidence and fix")
    for name, group in _by_check(reports):
        for check, nodes in group:
            finding = Text(_on(nodes, len(reports), named=check.status != "ok") + check.evidence)
            if check.fix:
                inline = len(finding) + len("; fix: ") + len(check.fix) <= room
                finding.append("; fix: " if inline else "\nfix: ", style="bold")
                finding.append(check.fix)
            state = check.status.upper() if check.status == "missing" else check.status
            table.add_row(name, Text(state, style=_STYLES[check.status]), finding)
            name = ""
    skipped = {check.name: check.evidence for report in reports for check in report.checks if check.status == "skipped"}
    for why in dict.fromkeys(skipped.values()):
        names = "\n".join(name for name, evidence in skipped.items() if evidence == why)
        table.add_row(names, Text("skipped", style="dim"), Text(why, style="dim"))
    return table


def _by_check(reports: Sequence[NodeReport]) -> Iterator[tuple[str, list[tuple[Check, list[str]]]]]:
    """Checks that ran, in display order; within one, equal findings of several nodes together, the good ones first.

    Nodes that pass count as equal even where their evidence differs (free memory does): the first one's is shown.
    """
    ran = {check.name for report in reports for check in report.checks if check.status != "skipped"}
    for name in (name for name in ("report", *CHECKS) if name in ran):
        groups: dict[tuple[str, str], tuple[Check, list[str]]] = {}
        for report in reports:
            check = report.check(name)
            if check is not None and check.status != "skipped":
                key = (check.status, "" if check.status == "ok" else check.evidence)
                groups.setdefault(key, (check, []))[1].append(report.node)
        rank = {"ok": 0, "degraded": 1, "missing": 2}
        yield name, sorted(groups.values(), key=lambda group: rank[group[0].status])


def _on(nodes: Sequence[str], total: int, *, named: bool) -> str:
    if total == 1:
        return ""
    if not named or len(nodes) == total:
        return f"{len(nodes)}/{total} nodes: "
    more = f" and {len(nodes) - _SHOWN_NODES} more" if len(nodes) > _SHOWN_NODES else ""
    return f"{', '.join(nodes[:_SHOWN_NODES])}{more}: "


def _memory(console: Console, reports: Sequence[NodeReport]) -> None:
    plans: dict[memory.MemoryPlan, list[str]] = {}
    for report in reports:
        if report.memory is not None:
            plans.setdefault(report.memory, []).append(report.node)
    for plan, nodes in plans.items():
        mount = "only where payload is put" if plan.lazy else "in every client, this Mooncake cannot mount later"
        console.print()
        where = _on(nodes, len(reports), named=True) if len(plans) > 1 else ""
        _title(console, f"memory plan: {where}segments {mount}")
        table = Table(box=None, pad_edge=False, show_header=True, header_style="dim", padding=(0, 2, 0, 0))
        for column in ("part", "a process", "processes", "a node", "set by"):
            table.add_column(column, no_wrap=True, justify="left" if column in ("part", "set by") else "right")
        for row in memory.rows(plan):
            what = row.what if row.where == "host" else f"{row.what} (GPU)"
            sizes = memory.shown(row.process_bytes), str(row.processes), memory.shown(row.node_bytes)
            table.add_row(what, *sizes, row.knob)
        table.add_row(
            "host memory", memory.shown(plan.process_bytes), str(plan.processes), memory.shown(plan.node_bytes)
        )
        console.print(table)


def _findings(console: Console, diagnosis: Diagnosis) -> None:
    if not diagnosis.findings:
        return
    console.print()
    _title(console, "flags")
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for finding in diagnosis.findings:
        style = {"reject": "bold red", "warn": "yellow"}.get(finding.verdict, "dim")
        table.add_row(Text(finding.verdict, style=style), Text(finding.text))
    console.print(table)


def _seams(console: Console, diagnosis: Diagnosis) -> None:
    if not diagnosis.seams:
        return
    console.print()
    _title(console, "seams")
    good: dict[str, list[str]] = {}
    for seam in diagnosis.seams:
        if seam.ok and not seam.aside:
            good.setdefault(seam.installed, []).append(seam.name)
    for installed, names in good.items():
        console.print(Text.assemble(("ok  ", "green"), f"{', '.join(names)}: {installed}"))
    for seam in diagnosis.seams:
        if seam.aside:
            console.print(Text.assemble(("aside  ", "yellow"), seam.text))
        elif not seam.ok:
            word, style = ("FAILED", "bold red") if seam.needed else ("note", "yellow")
            console.print(Text.assemble((f"{word}  ", style), seam.text))


def _variables(console: Console, diagnosis: Diagnosis) -> None:
    if not diagnosis.variables:
        return
    console.print()
    _title(console, "variables set here")
    for name, value, note in diagnosis.variables:
        console.print(Text(f"{name}={clip(value, 120)}" + (f"  ({note})" if note else "")))


def _verdict(console: Console, diagnosis: Diagnosis) -> None:
    console.print()
    decision = diagnosis.decision
    if decision is None:
        console.print(Text.assemble(("the job would NOT START: ", "bold red"), _refusal(diagnosis)))
        return
    _fallbacks(console, decision)
    _title(console, "start line, before verification")
    console.print(Text(diagnosis.start_line), soft_wrap=True)
    console.print()
    if decision.fallbacks:
        wanted = decision.fallbacks[0].from_
        console.print(
            Text.assemble(("DEGRADED: ", "bold yellow"), f"the job would start on {decision.rung}, not on {wanted}")
        )
    else:
        console.print(Text.assemble(("ok: ", "bold green"), f"the job would start on {decision.rung}"))


def _refusal(diagnosis: Diagnosis) -> str:
    """Why it would not start, without the sentences that were shown already."""
    if diagnosis.rejects:
        return "its flags cannot go together (see reject above)"
    if any(seam.needed and not seam.ok for seam in diagnosis.seams):
        return "a seam does not fit (see FAILED above)"
    return diagnosis.refusal


def _fallbacks(console: Console, decision: Decision) -> None:
    for step in decision.fallbacks:
        where = f"{step.check} on {step.node}" if step.node else step.check
        console.print(Text(f"{step.from_} -> {step.to}", style="bold yellow"))
        console.print(Padding(Text(f"{where}: {step.reason}"), (0, 0, 0, 2)))
    if decision.fallbacks:
        console.print()
