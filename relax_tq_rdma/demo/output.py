"""What a demo says: progress on stderr while it runs, results on stdout, and the JSON document."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from relax_tq_rdma.transport.report import Decision

SCHEMA = "relax-tq-rdma/demo/1"


@dataclass(frozen=True)
class StepRecord:
    """One step. Seconds are wall time: ``put_s`` the producer's put, ``get_s`` the slowest ``get_data``, ``fanout_s``
    broadcasts (or, per rank, the wait for the slowest), ``step_s`` the whole trainer step with its wait for rows.
    ``bytes_unique`` counts equal tensors once."""

    step: int
    rows: int
    bytes_total: int
    bytes_unique: int
    put_s: float
    get_s: float
    fanout_s: float
    step_s: float
    payload_digest: str
    mean_reward: float


@dataclass(frozen=True)
class JobResult:
    """What a job leaves behind; ``losses`` are exact (JSON keeps every bit of a double)."""

    summary_line: str
    decision: Decision
    losses: list[float]
    payload_digest: str
    steps: list[StepRecord]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "summary_line": self.summary_line,
            "decision": msgspec.to_builtins(self.decision),
            "losses": self.losses,
            "payload_digest": self.payload_digest,
            "steps": [asdict(step) for step in self.steps],
        }


class Reporter:
    """Lines for people. With ``json`` everything but the document goes to stderr; ``quiet`` drops the progress."""

    def __init__(self, *, json: bool = False, quiet: bool = False) -> None:
        self._results = sys.stderr if json else sys.stdout
        self._quiet = quiet
        self._started = time.monotonic()

    def phase(self, text: str) -> None:
        """Something begins that may take a while."""
        if not self._quiet:
            print(f"[{time.monotonic() - self._started:5.1f} s] {text}", file=sys.stderr, flush=True)

    def line(self, text: str) -> None:
        """A result or something the user must read."""
        print(text, file=self._results, flush=True)

    @contextmanager
    def steps(self, total: int) -> Iterator[Any]:
        """A callable to tick once a step; draws a bar when stderr is a terminal."""
        if self._quiet or not sys.stderr.isatty():
            yield lambda: None
            return
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("training", total=total)
            yield lambda: progress.advance(task)


def step_line(record: StepRecord, total: int, loss: float) -> str:
    return (
        f"step {record.step + 1}/{total}  loss {loss:+.6f}  reward {record.mean_reward:.3f}  rows {record.rows}  "
        f"{record.bytes_total / 1e6:.1f} MB ({record.bytes_unique / 1e6:.1f} unique)  put {record.put_s:.2f} s  "
        f"get {record.get_s:.2f} s  fan-out {record.fanout_s:.2f} s  step {record.step_s:.2f} s"
    )


def print_json(document: dict[str, Any]) -> None:
    print(json.dumps(document, indent=2), flush=True)


def differences(today: dict[str, Any], chosen: dict[str, Any]) -> list[str]:
    """What two results of one seed disagree on, in words; empty when losses and payload are identical bit for bit."""
    found = _first_difference("loss", today["losses"], chosen["losses"])
    found += _first_difference(
        "payload digest",
        [step["payload_digest"] for step in today["steps"]],
        [step["payload_digest"] for step in chosen["steps"]],
    )
    if not found and today["payload_digest"] != chosen["payload_digest"]:
        found.append(f"payload digest: {today['payload_digest']} against {chosen['payload_digest']}")
    return found


def _first_difference(what: str, today: Sequence[Any], chosen: Sequence[Any]) -> list[str]:
    if len(today) != len(chosen):
        return [f"number of steps: {len(today)} against {len(chosen)}"]
    for step, (a, b) in enumerate(zip(today, chosen, strict=True)):
        if a != b:
            return [f"{what} of step {step}: {a} against {b}"]
    return []
