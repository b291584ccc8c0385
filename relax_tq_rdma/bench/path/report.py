"""Tables for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from relax_tq_rdma.bench.path.figures import CaseFigures, Side
from relax_tq_rdma.bench.path.measure import Result
from relax_tq_rdma.words import count

_COLUMNS = ("GB/s", "limit", "median s", "range s", "copies", "fresh", "reg", "moved MB", "RSS +MB", "CPU s", "rungs")
_WIDTH = 170
_LIMITS = {
    "memcpy": "copy (1 thread, warm)",
    "memcpy_rows": "copy row by row",
    "loopback": "TCP over loopback",
    "engine_put": "engine put",
    "engine_get": "engine get",
    "put_copy": "copy, then engine put",
}


def show(whole: dict[str, Any], result: Result) -> None:
    """Print tables, limits, ratios and what was not measured."""
    console = Console(width=max(_WIDTH, Console().width), highlight=False)
    console.print(_header(whole["environment"]))
    for tier, bounds in result.limits.items():
        cases = [case for case in result.cases if case.tier_mib == tier]
        gbs = bounds.gbs()
        console.print(_table(tier, cases, gbs))
        for case in cases:
            if case.not_measured:
                console.print(f"{case.case}: not measured: {case.not_measured}", markup=False)
        console.print("limits, GB/s: " + ", ".join(f"{text} {_number(gbs[name])}" for name, text in _LIMITS.items()))
        medians, best = (whole[key][str(tier)] for key in ("ratios_by_tier", "ratios_of_best_by_tier"))
        console.print(_ratios(medians, best))
        missing = [name for name, value in medians.items() if value is None]
        console.print(f"ratios not measured: {', '.join(missing) or 'none'}\n")


def _header(shared: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in shared["versions"].items())
    return (
        f"{versions}; {shared['cpus']} CPUs; MC_STORE_MEMCPY={int(shared['mc_store_memcpy'])}\n{shared['controller']}; "
        f"Mooncake: {shared['mooncake']}\n{count(shared['repeats'], 'repeat')}, the consumer retains "
        f"{count(shared['retained_batches'], 'batch', 'batches')}, pool {shared['pool_mib']} MiB. "
        "A ratio above 1: the plugin is faster." + "".join(f"\nWARNING {warning}" for warning in shared["warnings"])
    )


def _ratios(medians: dict[str, float | None], best: dict[str, float | None]) -> Table:
    table = Table("ratio", "of medians", "of best")
    for name, value in medians.items():
        if value is not None:
            table.add_row(name, _number(value), _number(best[name]))
    return table


def _table(tier: int, cases: list[CaseFigures], limits: dict[str, float | None]) -> Table:
    first = cases[0]
    table = Table(
        title=f"{tier} MiB: {first.payload_bytes / 1e6:.1f} MB in {count(first.rows, 'row')}, groups of {first.dup}"
    )
    table.add_column("case")
    table.add_column("")
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    for case in cases:
        if case.put and case.get:
            put, get = (limits[name] for name in _limits_of(case))
            table.add_row(case.case, "put", *_cells(case.put, put))
            table.add_row("", "get", *_cells(case.get, get), end_section=True)
        else:
            table.add_row(case.case, "", "not measured", end_section=True)
    return table


def _limits_of(case: CaseFigures) -> tuple[str, str]:
    """What bounds put and get: the engine, with a copy where rows are packed; for SimpleStorage the link."""
    if case.backend == "simple":
        return "loopback", "loopback"
    return ("engine_put" if case.case in ("engine", "mooncake_jagged") else "put_copy"), "engine_get"


def _cells(side: Side, limit: float | None) -> list[str]:
    return [
        f"{side.gbs:.2f}",
        _number(limit),
        f"{side.seconds.median:.4f}",
        f"{side.seconds.min:.4f}-{side.seconds.max:.4f}",
        f"{side.copies:.2f}",
        f"{side.fresh:.2f}",
        f"{side.registrations:.0f}",
        f"{side.moved_bytes / 1e6:.1f}",
        f"{side.peak_rss_bytes / 1e6:.1f}",
        f"{side.cpu_s:.3f}",
        " ".join(f"{name} {nbytes / 1e6:.0f}" for name, nbytes in side.rungs.items() if nbytes),
    ]


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2f}"
