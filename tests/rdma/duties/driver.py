"""A job's driver: the product's own start and end over plain processes, and what can be asked of it between."""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
import sys
import urllib.request
from typing import Any

import msgspec

from tests.rdma.duties.state import STATE


def start(flags: list[str], nodes: list[dict[str, Any]], cluster: str) -> dict[str, Any]:
    """Start a job as its driver: the product's own start path over plain processes.

    Returns:
        ``line`` (the start line), ``decision``, ``fallbacks``, ``said`` (all lines), ``conf`` (to join with), ``job``.
    """
    from relax_tq_rdma import accounting
    from relax_tq_rdma.seams import tq_state
    from relax_tq_rdma.settings import Settings
    from relax_tq_rdma.transport.start import start_job
    from tests.rdma.nodes import TestNode
    from tests.rdma.plain_port import PlainPort, plain_conf

    settings, job, said = Settings.from_flags(flags), secrets.token_hex(8), list[str]()
    port = PlainPort(settings, job, [TestNode(**node) for node in nodes], cluster)

    def say(line: str) -> None:
        said.append(line)
        print(line, flush=True)

    accounting.configure(settings.accounting, job=job)
    with port, tq_state.expected_bootstrap():
        started = start_job(settings, {}, port, job=job, emit=say, on_fallback=accounting.record_fallback)
    STATE.update(port=port, started=started)
    return {
        "line": started.line,
        "job": job,
        "master": started.master,
        "decision": msgspec.to_builtins(started.decision),
        "fallbacks": [msgspec.to_builtins(one) for one in started.decision.fallbacks],
        "said": said,
        "conf": plain_conf(started.conf),
    }


def start_or_exit(flags: list[str], nodes: list[dict[str, Any]], cluster: str) -> None:
    """As a job's command does it: a start that fails is told on stderr and ends the process with its exit code."""
    from relax_tq_rdma.errors import DataplaneError, UsageError

    try:
        start(flags, nodes, cluster)
    except DataplaneError as exc:
        print(f"relax-tq-rdma: error: {exc}", file=sys.stderr, flush=True)
        os._exit(2 if isinstance(exc, UsageError) else 1)
    os._exit(0)


def close_job(limit: float = 30.0) -> str:
    """Close the job; returns what could not be removed."""
    from relax_tq_rdma.transport.start import close_job as close

    return close(STATE.pop("started"), STATE.pop("port"), limit=limit)


def fallback_counts() -> dict[str, int]:
    """``dataplane_fallback_total`` of this process, by its labels."""
    from relax_tq_rdma import accounting

    ledger = accounting.ledger()
    counters = ledger.totals().counters if ledger is not None else {}
    return {f"{name} {','.join(labels)}": value for (name, labels), value in counters.items() if "fallback" in name}


def master_page(word: str) -> list[str]:
    """Lines of the job-owned master's metrics that begin with a word."""
    address = STATE["port"]._master.metrics_address
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as page:
        return [line for line in page.read().decode().splitlines() if line.startswith(word)]


def doctor(flags: list[str]) -> dict[str, Any]:
    """``relax-tq-rdma doctor --json`` in this process: exit code and what it printed."""
    from relax_tq_rdma.doctor.cli import run

    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = run(["--json", *flags])
    return {"code": code, "said": json.loads(out.getvalue())}
