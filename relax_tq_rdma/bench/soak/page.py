"""The JSON object of a soak as a page: ``python -m relax_tq_rdma.bench.soak.page soak.json -o soak.md``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from relax_tq_rdma.bench.soak.content import MIB
from relax_tq_rdma.words import count

_MODULE = "relax_tq_rdma.bench.soak.page"
_MOMENTS = 13
_WORDS = {True: "ok", False: "**failed**", None: "not measured"}


def page(run: Mapping[str, Any]) -> str:
    """Markdown, from what ``relax-tq-rdma bench soak --json`` gives."""
    return "\n\n".join(
        [
            "# Soak",
            f"<!-- Tables by `python -m {_MODULE}`, from the JSON of a run. -->",
            _header(run),
            f"## Verdict: {_WORDS[run['verdict']['ok']]}",
            _table(
                ("check", "", "found"),
                ((check["name"], _WORDS[check["ok"]], check["found"]) for check in run["verdict"]["checks"]),
            ),
            "## Over time",
            "Each process: RSS MiB / descriptors / threads. Each consumer also: MiB held, MiB lent by the pool.",
            _moments(run["samples"]),
            "## Growth",
            "Medians of the middle and the last third of all samples after the first step. Resident memory is without "
            "the ordinary memory that a consumer holds on purpose: what it keeps and the pool did not lend, and blocks "
            "for later results.",
            _growth(run["growth"]),
            "## Staging",
            "Values and bytes by rung in the whole run; fresh blocks of ordinary memory for results; registrations "
            "(calls of the engine's `register_buffer`).",
            _rungs(run["final"] or run["samples"][-1]),
        ]
    )


def _header(run: Mapping[str, Any]) -> str:
    asked, totals, shared = run["options"], run["totals"], run["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in shared["versions"].items())
    layers = ", ".join(f"`{name}`" for name in run["layers"])
    return (
        f"{shared['started']}, {versions}; {shared['cpus']} CPUs, {shared['memory_bytes'] / 2**30:.0f} GiB.\n\n"
        f"{run['seconds'] / 60:.1f} minutes over Mooncake, {shared['mooncake']}. Layers: {layers}. One producer and "
        f"{count(asked['consumers'], 'consumer')} of the batches, pool {asked['pool_mib']} MiB each, segment "
        f"{asked['segment_mib']} MiB, rows from 1 KiB to {asked['max_row_kib']} KiB and one of "
        f"{asked['pool_mib'] * 3 // 4 + 1} MiB, up to {asked['keep']} batches held by each consumer, "
        f"{asked['pause'] * 1000:.0f} ms between puts and {asked['linger'] * 1000:.0f} ms for a batch on average, "
        f"seed {asked['seed']}. All processes together took {run['cores_used']} cores.\n\n"
        f"{totals['steps']:,} steps (partitions), {totals['puts']:,} puts, {totals['gets']:,} gets, "
        f"{totals['rows_read']:,} rows, {totals['bytes_checked']:,} bytes compared on arrival and "
        f"{totals['bytes_rechecked']:,} once more when they were let go of."
    )


def _moments(samples: Sequence[Mapping[str, Any]]) -> str:
    names = list(samples[-1]["processes"])
    rows = []
    for at in range(_MOMENTS):
        sample = samples[round(at * (len(samples) - 1) / (_MOMENTS - 1))]
        cells = [f"{sample['at']:.0f}", str(sample["steps"])]
        for name in names:
            used, end = sample["processes"][name], sample["ends"].get(name)
            cell = f"{used['rss'] / MIB:.0f} / {used['fds']} / {used['threads']}"
            consumes = end and name != "producer"
            cells.append(f"{cell}; {end['kept_bytes'] >> 20}, {end['held'] >> 20}" if consumes else cell)
        rows.append((*cells, f"{sample['store']['nbytes'] >> 20}"))
    return _table(("s", "steps", *names, "store MiB"), rows)


def _growth(found: Iterable[Mapping[str, Any]]) -> str:
    rows = []
    for one in found:
        scale = MIB if one["what"] == "rss" else 1
        figures = (f"{one[key] / scale:,.0f}" for key in ("middle", "last", "allowed"))
        what = "resident MiB" if one["what"] == "rss" else one["what"]
        rows.append((one["process"], what, *figures, _WORDS[one["ok"]]))
    return _table(("process", "", "middle third", "last third", "allowed more", ""), rows)


def _rungs(last: Mapping[str, Any]) -> str:
    rows = []
    for name, end in last["ends"].items():
        moved = ", ".join(
            f"{rung} {values:,} ({nbytes / 1e9:.2f} GB)" for rung, (values, nbytes) in end["rungs"].items()
        )
        blocks = f"{end['allocations']} ({end['allocated'] / MIB:.0f} MiB)"
        rows.append((name, moved, blocks, str(end["registrations"]), str(end["misses"]), str(end["retired"])))
    return _table(("process", "rungs", "fresh blocks", "registrations", "misses", "retired bytes"), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="what bench soak --json has given")
    parser.add_argument("-o", "--output", type=Path, help="the page; default: stdout")
    args = parser.parse_args()
    text = page(json.loads(args.run.read_text(encoding="utf-8"))) + "\n"
    if args.output is None:
        sys.stdout.write(text)
    else:
        args.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
