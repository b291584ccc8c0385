"""``verbose``: one JSON line per field of a step, in a file of this process (format: ``docs/reference/metrics.md``)."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec

from relax_tq_rdma.accounting.notes import reason, say_once
from relax_tq_rdma.accounting.records import StepSummary

SCHEMA = 1


class Journal:
    """Appends to ``path``. A folder that cannot be written or a full disk costs one warning, never an error."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, summary: StepSummary) -> None:
        head = {"schema": SCHEMA, "step": summary.step, "update": summary.update}
        lines = [msgspec.json.encode(head | msgspec.to_builtins(flow)) + b"\n" for flow in summary.fields]
        if summary.pool is not None:
            pool = {"staged": summary.staged, "pool": summary.pool}
            lines.append(msgspec.json.encode(head | pool) + b"\n")
        if not lines:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _append(self.path, b"".join(lines))
        except OSError as exc:
            say_once(
                "journal",
                f"the per-field accounting of this process is not written to {self.path} ({reason(exc)}): "
                "set RTQ_ACCOUNTING_DIR to a folder that can be written",
            )


def _append(path: Path, data: bytes) -> None:
    """Append all of it or nothing: half a line on a full disk would spoil the next one too.

    Raises:
        OSError: the file cannot be written.
    """
    with open(path, "ab", buffering=0) as file:
        start = file.tell()
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            with suppress(OSError):
                file.truncate(start)
            raise
