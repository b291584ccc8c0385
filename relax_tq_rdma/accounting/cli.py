"""``relax-tq-rdma metrics``: the totals of the jobs on this node, from their snapshots. Needs no running endpoint."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from relax_tq_rdma.accounting import names, snapshot
from relax_tq_rdma.accounting.records import Totals
from relax_tq_rdma.accounting.snapshot import NodeView
from relax_tq_rdma.errors import DataplaneError
from relax_tq_rdma.transport.rundir import run_dir
from relax_tq_rdma.usage import Parser
from relax_tq_rdma.words import count, duration

SCHEMA = 1
_SHOWN = 8
DESCRIPTION = """\
Show the byte and stage totals of a job on this node, from what its processes have published, whether it still runs
here, and how old the news are. Needs --dataplane-accounting in the job, and the same RTQ_RUN_DIR here. Exit code: 0 ok,
1 no job of this node has published anything, 2 wrong usage."""


def run(argv: list[str]) -> int:
    """Print the totals of one job as tables, or with ``--json`` as one object.

    Raises:
        UsageError: a wrong argument.
        DataplaneError: no job of this node has published anything.
    """
    parser = Parser(
        prog="relax-tq-rdma metrics",
        description=DESCRIPTION,
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument(
        "--job",
        default="",
        metavar="TOKEN",
        help="the job, by the token that relax-tq-rdma status shows (default: one that runs, else the last one)",
    )
    args = parser.parse_args(argv)
    view = _find(run_dir(snapshot.FOLDER), args.job)
    if args.json:
        sys.stdout.write(msgspec.json.encode(report(view)).decode() + "\n")
    else:
        _print(view)
    return 0


def report(view: NodeView) -> dict[str, Any]:
    """The ``--json`` object; integers are exact."""
    counters = [
        {"name": name, "labels": dict(zip(names.METRICS[name].labels, labels, strict=True)), "value": value}
        for (name, labels), value in view.totals.counters.items()
    ]
    histograms = [
        {
            "name": name,
            "labels": dict(zip(names.METRICS[name].labels, labels, strict=True)),
            "count": h.count,
            "sum_s": h.sum_ns / 1e9,
        }
        for (name, labels), h in view.totals.histograms.items()
    ]
    return {
        "schema": SCHEMA,
        "job": view.job,
        "live_processes": view.live,
        "ended_processes": view.ended,
        "published": view.written,
        "backends": [dict(zip(names.BACKEND_INFO.labels, labels, strict=True)) for labels in view.backends],
        "counters": counters,
        "histograms": histograms,
    }


def _find(root: Path, job: str) -> NodeView:
    folders = [snapshot.job_folder(root, job)] if job else sorted(root.iterdir())
    views = [snapshot.read_node(folder) for folder in folders if folder.is_dir()]
    views = [view for view in views if view.live or view.ended]
    if not views:
        which = f"job {job!r}" if job else "any job"
        others = sorted(folder.name for folder in root.iterdir() if folder.is_dir()) if job else []
        raise DataplaneError(
            f"no metrics of {which} in {root}{f', but of {_some(others)}' if others else ''}: start the job with "
            "--dataplane-accounting summary, and give the same RTQ_RUN_DIR here"
        )
    return max(views, key=lambda view: (bool(view.live), view.written))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _print(view: NodeView) -> None:
    from rich.console import Console

    tables = [table for table in (_fields(view.totals), _stages(view.totals), _events(view.totals)) if table.row_count]
    console = Console(highlight=False)
    # Rich would drop columns where the terminal is narrow; a wrapped line loses nothing.
    needed = max((Console(width=10_000).measure(table).maximum for table in tables), default=0)
    console.width = max(console.width, needed)
    console.print(_state(view, time.time()), soft_wrap=True)
    for backend, protocol, device, gdr in view.backends:
        console.print(f"backend={backend} protocol={protocol} device={device} gdr={gdr}")
    for table in tables:
        console.print(table)


def _state(view: NodeView, now: float) -> str:
    """Whether the job still runs here, and how old what follows is."""
    state = "runs" if view.live else "has ended"
    return (
        f"job {view.job} {state} on this node, last news {duration(now - view.written)} ago: "
        f"{count(view.live, 'live process', 'live processes')}, {view.ended} ended"
    )


def _fields(totals: Totals) -> Any:
    table = _table("field", "direction", "path", "rows", "bytes", "unique bytes", "redundancy", "wire", "saved")
    counters = totals.counters
    for (name, labels), size in sorted(counters.items()):
        if name != names.BYTES.name:
            continue
        field, path, direction = labels
        unique = counters.get((names.BYTES_UNIQUE.name, (field,))) if direction == "put" else None
        logical = sum(counters.get((name, (field, p, direction)), 0) for p in ("fast", "slow"))
        wire = counters.get((names.BYTES_WIRE.name, (field, direction)))
        table.add_row(
            field,
            direction,
            path,
            str(counters.get((names.ROWS.name, labels), 0)),
            f"{size:,}",
            "-" if unique is None else f"{unique:,}",
            f"{logical / unique:.1f}x" if unique else "-",
            "-" if wire is None else f"{wire:,}",
            "-" if wire is None else f"{counters.get((names.BYTES_SAVED.name, (field, direction)), 0):,}",
        )
    return table


def _stages(totals: Totals) -> Any:
    table = _table("time", "", "count", "total s", "mean ms")
    for (name, labels), histogram in sorted(totals.histograms.items(), key=lambda item: item[0]):
        if histogram.count:
            mean = histogram.sum_ns / histogram.count / 1e6
            short = name.removeprefix("dataplane_").removesuffix("_seconds")
            total = f"{histogram.sum_ns / 1e9:.3f}"
            table.add_row(short, ", ".join(labels) or "-", str(histogram.count), total, f"{mean:.3f}")
    return table


def _events(totals: Totals) -> Any:
    table = _table("event", "", "count")
    for (name, labels), value in sorted(totals.counters.items()):
        if name in (names.OPERATIONS.name, names.FALLBACK.name, names.MR_REGISTER.name):
            table.add_row(name.removeprefix("dataplane_").removesuffix("_total"), ", ".join(labels), str(value))
    return table


def _table(*columns: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    numbers = {"rows", "bytes", "unique bytes", "redundancy", "wire", "saved", "count", "total s", "mean ms"}
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", no_wrap=True)
    return table
