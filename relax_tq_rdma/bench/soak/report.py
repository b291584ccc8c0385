"""The result as a JSON object and as tables for people."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from relax_tq_rdma.bench.path.environment import CONTROLLER
from relax_tq_rdma.bench.soak.content import MIB
from relax_tq_rdma.bench.soak.drive import Result
from relax_tq_rdma.bench.soak.options import Options
from relax_tq_rdma.bench.soak.verdict import Check, after_first_step, growth, holds, verdict
from relax_tq_rdma.bench.soak.worker import LAYERS
from relax_tq_rdma.transport.hazards import installed_mooncake_version
from relax_tq_rdma.version import __version__
from relax_tq_rdma.words import count

SCHEMA = "relax-tq-rdma/bench-soak/1"
_PACKAGES = ("TransferQueue", "torch", "tensordict", "numpy")
_WIDTH = 150
_SHOWN = 13


def environment() -> dict[str, Any]:
    """Versions, machine, and the time of day: call it when the run begins."""
    return {
        "started": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "versions": {
            "relax-tq-rdma": __version__,
            "mooncake": installed_mooncake_version(),
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in _PACKAGES},
        },
        "cpus": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "machine": platform.platform(),
        "controller": CONTROLLER,
        "mooncake": "protocol tcp on loopback, MC_STORE_MEMCPY=0; only the producer mounts a segment",
    }


def document(options: Options, result: Result, surroundings: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON object (``--json``)."""
    checks = verdict(result, options.pool_mib)
    asked = msgspec.to_builtins(options, enc_hook=str)
    return {
        "schema": SCHEMA,
        "verdict": {
            "ok": holds(checks),
            "interrupted": result.interrupted,
            "checks": [msgspec.to_builtins(check) for check in checks],
        },
        "environment": dict(surroundings),
        "layers": LAYERS,
        "options": {key: asked[key] for key in asked if key not in ("json", "output")}
        | {"cache_mib": options.cache_mib, "recycled_mib": options.recycled_mib},
        "seconds": round(result.seconds, 1),
        "cores_used": _cores(result),
        "totals": msgspec.to_builtins(result.totals),
        "faults": result.faults,
        "growth": [{**msgspec.to_builtins(one), "ok": one.ok} for one in growth(after_first_step(result.samples))],
        "samples": [msgspec.to_builtins(sample) for sample in result.samples],
        "final": msgspec.to_builtins(result.final),
    }


def show(options: Options, result: Result) -> bool:
    """Print what was found; returns whether everything holds."""
    console = Console(width=max(_WIDTH, Console().width), highlight=False)
    totals, checks = result.totals, verdict(result, options.pool_mib)
    console.print(
        f"{result.seconds:.0f} s with {count(options.consumers, 'consumer')}, pool {options.pool_mib} MiB, "
        f"seed {options.seed}: "
        f"{count(totals.steps, 'step')}, {count(totals.puts, 'put')}, {count(totals.gets, 'get')}, "
        f"{count(totals.rows_read, 'row')}, "
        f"{totals.bytes_checked / 1e9:.1f} GB; {_cores(result):.2f} cores"
    )
    if result.samples:
        console.print(_timeline(result))
    console.print(_table(checks))
    console.print(f"verdict: {_word(holds(checks))}{' (interrupted)' if result.interrupted else ''}")
    return holds(checks)


def _cores(result: Result) -> float:
    """Processor seconds a second, of all processes, over the samples."""
    if len(result.samples) < 2:
        return 0.0
    first, last = result.samples[0], result.samples[-1]
    spent = sum(last.processes[name].cpu_s - first.processes[name].cpu_s for name in last.processes)
    return round(spent / (last.at - first.at), 2)


def _timeline(result: Result) -> Table:
    table = Table(title="by process: RSS MiB / fds / threads; of each end: MiB lent, registrations, misses")
    last = result.samples[-1]
    table.add_column("s", justify="right")
    for name in last.processes:
        table.add_column(name, justify="right")
    table.add_column("store MiB", justify="right")
    for sample in _spread(result.samples):
        cells = []
        for name, used in sample.processes.items():
            cell = f"{used.rss / MIB:.0f} / {used.fds} / {used.threads}"
            end = sample.ends.get(name)
            cells.append(cell if end is None else f"{cell}; {end.held >> 20}, {end.registrations}, {end.misses}")
        table.add_row(f"{sample.at:.0f}", *cells, f"{sample.store.nbytes >> 20}")
    return table


def _spread(samples: Sequence[Any]) -> list[Any]:
    """At most :data:`_SHOWN`, evenly, the first and the last among them."""
    if len(samples) <= _SHOWN:
        return list(samples)
    return [samples[round(at * (len(samples) - 1) / (_SHOWN - 1))] for at in range(_SHOWN)]


def _table(checks: Sequence[Check]) -> Table:
    table = Table("check", "", "found")
    for check in checks:
        table.add_row(check.name, _word(check.ok), check.found)
    return table


def _word(ok: bool | None) -> str:
    return "not measured" if ok is None else "ok" if ok else "FAILED"
