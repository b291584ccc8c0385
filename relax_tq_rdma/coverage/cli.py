"""``relax-tq-rdma status``: the job that runs on this Ray cluster, seen from the records of its processes."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from relax_tq_rdma.coverage import board
from relax_tq_rdma.coverage.board import Board
from relax_tq_rdma.coverage.compare import SILENT_SECONDS, alike, differences
from relax_tq_rdma.coverage.records import SCHEMA, JobRecord, ProcessRecord
from relax_tq_rdma.errors import StartError
from relax_tq_rdma.transport import running_ray
from relax_tq_rdma.usage import Parser
from relax_tq_rdma.words import duration

DESCRIPTION = """\
Show the job that runs on this Ray cluster with the plugin: what it was started as, and of each process with a storage
manager its version, seams, wire and staging pool. Looks only; the job takes no notice. Exit code 0: all processes are
as the driver is; 1: some are not (they are named), or no such job runs (one that is starting is named); 2: wrong
usage."""


@dataclass(frozen=True)
class Status:
    """``now``: Unix time of looking, in seconds. ``differences``: one sentence each."""

    job: JobRecord
    processes: Sequence[ProcessRecord]
    differences: Sequence[str]
    now: float


def run(argv: list[str]) -> int:
    """Print the status.

    Raises:
        UsageError: a wrong argument.
        StartError: there is no cluster to connect to, or no job of the plugin runs on it.
    """
    parser = Parser(prog="relax-tq-rdma status", description=DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="one JSON object (docs/reference/status.md)")
    options = parser.parse_args(argv)
    status = look()
    if options.json:
        sys.stdout.write(msgspec.json.encode(to_json(status)).decode() + "\n")
    else:
        _print(status)
    return 1 if status.differences else 0


def look() -> Status:
    """Connect, read, disconnect.

    Raises:
        StartError: there is no cluster to connect to, or no job of the plugin runs on it.
    """
    with running_ray.joined():
        found = board.read()
    return of_the_running_job(found, time.time())


def of_the_running_job(found: Board, now: float) -> Status:
    """The job whose processes speak, and of several the one that came last: one runs at a time, another one was killed
    and has left its records, or is about to be refused.

    Raises:
        StartError: there is none, or it is still starting.
    """
    speaking = {process.job for process in found.processes if now - process.written <= SILENT_SECONDS}
    jobs = {start.job: (start.job in speaking, start.began) for start in found.starts}
    jobs |= {job.job: (job.job in speaking, job.started) for job in found.jobs}
    if not jobs:
        raise StartError(
            "no job with the plugin runs on this Ray cluster, and none is starting its data plane"
            + "".join(f"; {problem}" for problem in found.problems)
            + ": start one with relax-tq-rdma train, or set RAY_ADDRESS to its cluster"
        )
    token = max(jobs, key=lambda job: jobs[job])
    job = next((job for job in found.jobs if job.job == token), None)
    if job is None:
        start = next(start for start in found.starts if start.job == token)
        raise StartError(
            f"job {token} has been starting for {duration(now - start.began)} (driver {start.driver}): its processes "
            "show once it has printed its start line; if that driver is gone, it was killed during its start"
        )
    own = [process for process in found.processes if process.job == token]
    return Status(job, own, [*found.problems, *differences(job, own, now=now)], now)


def to_json(status: Status) -> dict[str, Any]:
    """The ``--json`` object."""
    return {
        "schema": SCHEMA,
        "job": _without_schema(status.job),
        "processes": [
            {**_without_schema(process), "name": process.name, "silent_s": round(status.now - process.written, 1)}
            for process in status.processes
        ],
        "differences": list(status.differences),
    }


def _without_schema(record: JobRecord | ProcessRecord) -> dict[str, Any]:
    return {key: value for key, value in msgspec.to_builtins(record).items() if key != "schema"}


def _print(status: Status) -> None:
    from rich.console import Console
    from rich.text import Text

    from relax_tq_rdma.doctor.render import plain_lines

    job = status.job
    with plain_lines() as console:
        since = duration(status.now - job.started)
        head = f"job {job.job}, driver {job.driver}, up for {since}, relax-tq-rdma {job.plugin}"
        console.print(Text(head), soft_wrap=True)
        console.print(Text(job.start_line), soft_wrap=True)
        for step in job.decision.fallbacks:
            where = ", ".join(filter(None, (step.node, step.check)))
            console.print(Text(f"fallback {step.from_} -> {step.to}: {step.reason} ({where})"), soft_wrap=True)
        console.print()
        table = _table(status)
        # Rich would cut columns where the terminal is narrow; a wrapped line loses nothing.
        console.width = max(console.width, Console(width=10_000).measure(table).maximum)
        console.print(table)
        console.print()
        for sentence in status.differences:
            console.print(Text.assemble(("DIFFERS  ", "bold red"), sentence), soft_wrap=True)
        if not status.differences:
            console.print(Text.assemble(("ok  ", "bold green"), f"{alike(status.processes)}, all alike"))


def _table(status: Status) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for title in ("process", "node", "pid", "version", "seams", "wire", "pool held/peak/size MiB", "otherwise"):
        table.add_column(title, no_wrap=True)
    for one in status.processes:
        seams = " ".join(seam for seam, state in sorted(one.seams.items()) if state == "taken")
        counts = [f"{what} {times}" for what, times in sorted(one.counts.items())]
        if one.pool is not None and one.pool.misses:
            counts.append(f"pool misses {one.pool.misses}")
        wire = f"{one.backend}/{one.protocol}"
        table.add_row(one.role, one.node, str(one.pid), one.plugin, seams, wire, _pool(one), ", ".join(counts) or "-")
    return table


def _pool(process: ProcessRecord) -> str:
    level = process.pool
    if level is None or not level.capacity:
        return "-"
    return "/".join(f"{size / (1 << 20):.0f}" for size in (level.held, level.peak, level.capacity))
