"""``demo --compare``: today's path and the chosen one on one seed, identical bit for bit or it fails."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from relax_tq_rdma.demo.options import Options, without_plugin
from relax_tq_rdma.demo.output import differences, print_json
from relax_tq_rdma.demo.session import run_driver
from relax_tq_rdma.errors import TransferError
from relax_tq_rdma.transport.report import Decision
from relax_tq_rdma.words import count

SCHEMA = "relax-tq-rdma/demo-compare/1"


def compare(argv: Sequence[str], options: Options) -> int:
    """Run both and print a table, or one JSON document with ``--json``. Returns 0 when identical, else 1.

    Raises:
        TransferError: one of the two runs failed; its own message went to stderr before.
    """
    chosen_argv = [word for word in argv if word not in ("--compare", "--json")]
    today = _run("today's path", without_plugin(chosen_argv))
    chosen = _run("chosen path", chosen_argv)
    found = differences(today, chosen)
    if options.json:
        document = {"schema": SCHEMA, "identical": not found, "differences": found, "today": today, "chosen": chosen}
        print_json(document)
    else:
        _print_table(today, chosen)
    print(_verdict(today, chosen, found), file=sys.stderr if options.json else sys.stdout, flush=True)
    return 1 if found else 0


def _run(name: str, argv: Sequence[str]) -> dict[str, Any]:
    print(f"--- {name}", file=sys.stderr, flush=True)
    code, output = run_driver([*argv, "--json"], capture=True)
    if code != 0:
        raise TransferError(f"{name} failed with exit code {code}, so there is nothing to compare")
    document: dict[str, Any] = json.loads(output)
    return document


def _print_table(today: dict[str, Any], chosen: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "today's path", "chosen path", "")
    table.add_row("runs on", _rung(today), _rung(chosen), "")  # to differ here is what was asked for
    for title, a, b in [
        ("first loss", today["losses"][0], chosen["losses"][0]),
        ("last loss", today["losses"][-1], chosen["losses"][-1]),
        ("payload digest", today["payload_digest"], chosen["payload_digest"]),
    ]:
        table.add_row(title, str(a)[:20], str(b)[:20], "identical" if a == b else "DIFFERS")
    for title, key in [("put", "put_s"), ("get", "get_s"), ("fan-out", "fanout_s"), ("step", "step_s")]:
        table.add_row(f"{title}, median s", _median(today, key), _median(chosen, key), "")
    Console().print(table)


def _verdict(today: dict[str, Any], chosen: dict[str, Any], found: Sequence[str]) -> str:
    if found:
        return f"NOT identical: {'; '.join(found)}"
    what = f"every loss and every byte of the payload of {count(len(today['steps']), 'step')}"
    return f"identical: {what}, today's path on {_rung(today)}, the chosen one on {_rung(chosen)}{_fall(chosen)}"


def _rung(document: dict[str, Any]) -> str:
    return _decision(document).rung


def _fall(document: dict[str, Any]) -> str:
    fallbacks = _decision(document).fallbacks
    return f" after a fallback from {fallbacks[0].from_}" if fallbacks else ""


def _decision(document: dict[str, Any]) -> Decision:
    return msgspec.convert(document["decision"], Decision)


def _median(document: dict[str, Any], key: str) -> str:
    return f"{statistics.median(step[key] for step in document['steps']):.3f}"
