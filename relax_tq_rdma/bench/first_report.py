"""The accounting report of a real demo run, and the identity of processor outputs (RFC §4.9 PR1, F3, F4).

``python -m relax_tq_rdma.bench.first_report [-o FILE]`` runs the demo with ``--dataplane-accounting verbose``, adds up
its JSON lines, compares what the image processor returns for one input on its thread path and on its process-pool path,
and writes a Markdown page. Every number on the page is measured by that run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

_GROUP = 8
_DEMO = ("--steps", "3", "--prompts", "8", "--samples-per-prompt", str(_GROUP), "--image-max-tokens", "400")
_PATIENCE = ("--tq-init-timeout-seconds", "120")
_PICTURES = 6
_TOKENS = 400
_DEMO_SECONDS = 300
_LIBRARIES = ("TransferQueue", "torch", "transformers", "pillow", "numpy", "ray")
_DOWNCAST_KEYS = ("pixel_values",)
"""What the host's pool workers cast from float32 to bfloat16; its thread path does not (contract §5)."""


def main(argv: Sequence[str]) -> int:
    """Entry point; exit status 1 when the demo fails."""
    parser = argparse.ArgumentParser(prog="python -m relax_tq_rdma.bench.first_report", description=__doc__)
    parser.add_argument("-o", "--output", type=Path, help="file to write; default: stdout")
    args = parser.parse_args(argv)
    say("comparing the processor's outputs")
    identity = processor_identity(_PICTURES, _TOKENS)
    say("running the demo")
    document, fields = run_demo()
    page = render(identity, document, fields)
    if args.output is None:
        print(page, end="")
    else:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(page, encoding="utf-8")
    return 0


def processor_identity(pictures: int, tokens: int) -> dict[str, Any]:
    """Digests of the processor's outputs for the same pictures on every path.

    Returns:
        ``outputs``: tensors compared, ``bytes`` of one set, and for each comparison how many tensors were equal bit for
        bit: ``thread_again``, ``thread_concurrent``, ``pool``, ``pool_other_worker``, ``pool_downcast``. And for one
        group whose members each ran the processor, bytes over unique bytes: ``by_identity``, ``by_content``.
    """
    jobs = [(index, tokens) for index in range(pictures)]
    once = [_process(job) for job in jobs]
    again = [_process(job) for job in jobs]
    with ThreadPoolExecutor(2) as threads:
        concurrent = list(threads.map(_process, jobs))
    spawn = multiprocessing.get_context("spawn")  # as the host's pool: nothing is inherited
    with ProcessPoolExecutor(1, mp_context=spawn) as first:
        pool = list(first.map(_process, jobs))
        cast = list(first.map(_process_downcast, jobs))
    with ProcessPoolExecutor(1, mp_context=spawn) as second:
        other = list(second.map(_process, jobs))
    return {
        "outputs": sum(map(len, once)),
        "bytes": sum(size for sample in once for _, size in sample.values()),
        "thread_again": _equal(once, again),
        "thread_concurrent": _equal(once, concurrent),
        "pool": _equal(once, pool),
        "pool_other_worker": _equal(pool, other),
        "pool_downcast": _equal(once, cast),
        "by_identity": _redundancy(jobs[0], content=False),
        "by_content": _redundancy(jobs[0], content=True),
    }


def run_demo() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One demo with verbose accounting: its JSON document, and its JSON lines (last word on each step and field)."""
    with tempfile.TemporaryDirectory(prefix="rtq-report-") as folder:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "relax_tq_rdma.cli",
                "demo",
                "--json",
                "--dataplane-accounting",
                "verbose",
                *_DEMO,
                *_PATIENCE,
            ],
            stdout=subprocess.PIPE,
            env={**os.environ, "RTQ_ACCOUNTING_DIR": folder},
            timeout=_DEMO_SECONDS,
            check=False,
        )
        if done.returncode:
            say(f"the demo failed with exit status {done.returncode}")
            raise SystemExit(1)
        newest: dict[tuple[str, ...], dict[str, Any]] = {}
        for path in sorted(Path(folder).rglob("*.jsonl")):
            for text in path.read_text(encoding="utf-8").splitlines():
                line = json.loads(text)
                # A step may be written again with more in it: the highest update of one process counts.
                key = (path.name, line["step"], line["field"], line["direction"], line["path"])
                if key not in newest or line["update"] >= newest[key]["update"]:
                    newest[key] = line
    return json.loads(done.stdout), list(newest.values())


def render(identity: Mapping[str, Any], document: Mapping[str, Any], lines: Iterable[Mapping[str, Any]]) -> str:
    """The page."""
    lines = list(lines)
    put, get = _by_field(lines, "put"), _by_field(lines, "get")
    total = sum(row["bytes"] for row in put.values())
    unique = sum(row["unique"] for row in put.values())
    largest, row = max(put.items(), key=lambda item: item[1]["bytes"])
    name, path = largest
    count = identity["outputs"]
    versions = ", ".join(f"{library} {metadata.version(library)}" for library in _LIBRARIES)
    return f"""# First accounting report

<!-- Generated by `python -m relax_tq_rdma.bench.first_report -o docs/reports/l0-first-report.md`. -->

One run of `relax-tq-rdma demo --dataplane-accounting verbose {" ".join((*_DEMO, *_PATIENCE))}` on
Python {platform.python_version()}, {versions}.
Loopback, no GPU, no RDMA: byte counts are exact, times say nothing about a cluster and are left out.

```
{document["summary_line"]}
```

## Bytes by field and path (RFC F3)

| field | path | put rows | put bytes | unique by content | redundancy | got bytes | share of put |
| --- | --- | --- | --- | --- | --- | --- | --- |
{_table(put, get, total)}

`{name}` takes the {path} path and is {row["bytes"] / total:.2%} of all bytes put: RFC F3
{"holds" if path == "slow" else "does NOT hold"}. "fast": the value reaches TransferQueue as a tensor; "slow": as a
Python object that must be serialised.

## Redundancy (RFC F4)

Of {total:,} bytes put, {unique:,} are unique by content (blake2b-128): **{total / unique:.2f} copies of each
byte**, with groups of {_GROUP} samples and one prompt in eight without a picture. This rate is the upper bound of what
L3b can save.

`verbose` compares content; `summary` only compares memory, which is cheap. For one group of {_GROUP} whose members each
ran the processor, as the host does, that gives {identity["by_content"]:.1f}x by content and
{identity["by_identity"]:.1f}x by identity.

## Are the processor's outputs for one input byte-identical? (RFC F4)

{_PICTURES} pictures, at most {_TOKENS} visual tokens each, {count} output tensors, {identity["bytes"]:,} bytes.

| compared with the first run on the thread path | equal bit for bit |
| --- | --- |
| a second run in the same thread | {identity["thread_again"]} of {count} |
| two threads at once | {identity["thread_concurrent"]} of {count} |
| a spawned pool worker, before the host's cast | {identity["pool"]} of {count} |
| a spawned pool worker, after the host casts `pixel_values` to bfloat16 | {identity["pool_downcast"]} of {count} |

A second pool worker gave the same bytes as the first for {identity["pool_other_worker"]} of {count} tensors.
{_verdict(identity)}
"""


def say(text: str) -> None:
    """Progress, on stderr."""
    print(f"[report] {text}", file=sys.stderr, flush=True)


def _process(job: tuple[int, int]) -> dict[str, tuple[str, int]]:
    return _digests(_outputs(job))


def _process_downcast(job: tuple[int, int]) -> dict[str, tuple[str, int]]:
    import torch

    outputs = _outputs(job)
    return _digests({k: v.to(torch.bfloat16) if k in _DOWNCAST_KEYS else v for k, v in outputs.items()})


def _outputs(job: tuple[int, int]) -> dict[str, Any]:
    from relax_tq_rdma.demo.processor import ImageProcessor
    from relax_tq_rdma.demo.prompts import draw_prompt

    index, tokens = job
    return ImageProcessor(tokens)({"images": [draw_prompt(0, index).image]})


def _redundancy(job: tuple[int, int], content: bool) -> float:
    from relax_tq_rdma.accounting import measure

    (stats,) = measure({"group": [_outputs(job) for _ in range(_GROUP)]}, content=content).fields
    return stats.bytes / stats.unique_bytes


def _digests(outputs: Mapping[str, Any]) -> dict[str, tuple[str, int]]:
    import hashlib

    from relax_tq_rdma.demo.digest import tensor_bytes

    return {
        key: (f"{t.dtype} {tuple(t.shape)} {hashlib.blake2b(tensor_bytes(t), digest_size=16).hexdigest()}", t.nbytes)
        for key, t in outputs.items()
    }


def _equal(one: Sequence[Mapping[str, Any]], two: Sequence[Mapping[str, Any]]) -> int:
    return sum(a[key] == b.get(key) for a, b in zip(one, two, strict=True) for key in a)


def _by_field(lines: Iterable[Mapping[str, Any]], direction: str) -> dict[tuple[str, str], dict[str, int]]:
    found: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: {"rows": 0, "bytes": 0, "unique": 0})
    for line in lines:
        if line["direction"] == direction:
            row = found[line["field"], line["path"]]
            row["rows"] += line["rows"]
            row["bytes"] += line["bytes"]
            row["unique"] += line["unique_bytes"]
    return dict(found)


def _table(
    put: Mapping[tuple[str, str], Mapping[str, int]], get: Mapping[tuple[str, str], Mapping[str, int]], total: int
) -> str:
    rows = []
    for key, row in sorted(put.items(), key=lambda item: -item[1]["bytes"]):
        got = get.get(key, {"bytes": 0})["bytes"]
        times = f"{row['bytes'] / row['unique']:.1f}x" if row["unique"] else "-"
        cells = (f"{row['rows']}", f"{row['bytes']:,}", f"{row['unique']:,}", times, f"{got:,}")
        rows.append(f"| `{key[0]}` | {key[1]} | {' | '.join(cells)} | {row['bytes'] / total:.2%} |")
    return "\n".join(rows)


def _verdict(identity: Mapping[str, Any]) -> str:
    count = identity["outputs"]
    same = all(identity[key] == count for key in ("thread_again", "thread_concurrent", "pool", "pool_other_worker"))
    first = (
        "The processor is deterministic here: before the cast, every path gives the same bytes, so copies of one group "
        "can be found by content."
        if same
        else "The processor is NOT deterministic here: do not expect content dedup to find all copies of a group."
    )
    return (
        f"{first} The host's two paths differ all the same where the pool casts: a group whose members were split over "
        "both paths would not dedupe, and its members would train on different pixels."
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
