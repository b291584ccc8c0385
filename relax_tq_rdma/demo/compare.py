"""``demo --compare``: today's path and the chosen one on one seed, identical bit for bit or it fails."""

from __future__ import annotations

import ctypes
import json
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from relax_tq_rdma.demo import signals
from relax_tq_rdma.demo.options import Options, without_plugin
from relax_tq_rdma.demo.output import differences, print_json
from relax_tq_rdma.errors import TransferError
from relax_tq_rdma.transport.report import Decision

SCHEMA = "relax-tq-rdma/demo-compare/1"
_STOP_SECONDS = 60.0
_PR_SET_PDEATHSIG = 1


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
    for difference in found:
        print(f"relax-tq-rdma: error: the two paths differ: {difference}", file=sys.stderr)
    return 1 if found else 0


def _run(name: str, argv: Sequence[str]) -> dict[str, Any]:
    print(f"--- {name}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "relax_tq_rdma.cli", "demo", *argv, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=_die_with_parent) as child:
        try:
            output, _ = child.communicate()
        except KeyboardInterrupt:
            _stop(child)
            raise
    if child.returncode != 0:
        raise TransferError(f"{name} failed with exit code {child.returncode}, so there is nothing to compare")
    document: dict[str, Any] = json.loads(output)
    return document


def _stop(child: subprocess.Popen[bytes]) -> None:
    """Let the run clean up after itself, within a deadline."""
    with signals.ignored():
        child.terminate()
        try:
            child.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()


def _die_with_parent() -> None:
    """In the child: get SIGTERM, and so clean up, when this process is killed outright."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _print_table(today: dict[str, Any], chosen: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "today's path", "chosen path", "")
    for title, a, b in [
        ("backend", _rung(today), _rung(chosen)),
        ("first loss", today["losses"][0], chosen["losses"][0]),
        ("last loss", today["losses"][-1], chosen["losses"][-1]),
        ("payload digest", today["payload_digest"], chosen["payload_digest"]),
    ]:
        table.add_row(title, str(a)[:20], str(b)[:20], "identical" if a == b else "differs")
    for title, key in [("put", "put_s"), ("get", "get_s"), ("fan-out", "fanout_s"), ("step", "step_s")]:
        table.add_row(f"{title}, median s", _median(today, key), _median(chosen, key), "")
    Console().print(table)


def _rung(document: dict[str, Any]) -> str:
    return msgspec.convert(document["decision"], Decision).rung


def _median(document: dict[str, Any], key: str) -> str:
    return f"{statistics.median(step[key] for step in document['steps']):.3f}"
