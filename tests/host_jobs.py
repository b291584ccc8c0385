"""Whole jobs on the stand-in host, as a user would start them, and what they leave behind."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STANDIN = Path(__file__).parent / "host" / "standin"
ASYNC = ["--fully-async", "--max-staleness", "1", "--use-dynamic-batch-size"]
HYBRID = ["--hybrid", "--max-staleness", "1"]
COLOCATE: list[str] = []
SMALL = [
    *("--num-rollout", "2", "--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--global-batch-size", "8"),
    *("--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2"),
    *("--multimodal-keys", '{"image": "images"}', "--standin-image-max-tokens", "24"),
]
"""Two rollouts of four prompts (the last is text only), two answers each, on two tensor-parallel ranks."""


@dataclass(frozen=True)
class HostRun:
    """A job that has ended. ``output`` is what its driver printed, ``records`` what its processes noted."""

    code: int
    output: str
    records: list[dict[str, Any]] = field(repr=False)

    def kind(self, name: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["kind"] == name]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Loss, gradient norm, reward, samples and digests of every step: what must not depend on the plugin."""
        return [{k: v for k, v in record.items() if k not in ("kind", "pid")} for record in self.kind("step")]

    @property
    def start_line(self) -> str:
        """The plugin's line; empty without the plugin."""
        lines = [line for line in self.output.splitlines() if line.startswith("[dataplane] backend=")]
        return lines[0] if lines else ""


@dataclass
class HostJob:
    """A job under way."""

    process: subprocess.Popen[str]
    results: Path
    log: Path

    def records(self) -> list[dict[str, Any]]:
        if not self.results.exists():
            return []
        whole = self.results.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def wait(self, timeout: float = 200) -> HostRun:
        """Raises ``AssertionError`` with what there is to read when the job has not ended by then."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            kinds = [record["kind"] for record in self.records()]
            text = f"the job did not end within {timeout:g} s; noted: {kinds}; printed:\n{self.log.read_text()[-4000:]}"
            raise AssertionError(text) from None
        return HostRun(self.process.returncode, self.log.read_text(), self.records())
