"""The step line: ``[dataplane] step=train_3 put_rows=64 ...``, one a step (grammar: ``docs/reference/metrics.md``).

``line = "[dataplane]" (SP key "=" value)+``; a value is a word without blanks and quotes, or a JSON string.
"""

from __future__ import annotations

import json
import re

from relax_tq_rdma.accounting.records import Flow, StepSummary
from relax_tq_rdma.summary import PREFIX

_WORD = re.compile(r'[^\s"=]+')
_PAIR = re.compile(r' (\w+)=("(?:[^"\\]|\\.)*"|[^\s"=]+)')


def step_line(summary: StepSummary, *, node: str = "", pid: int | None = None) -> str:
    """The line of one step. Bytes are exact, times are seconds, ``GBps`` is 10^9 bytes a second."""
    pairs = {"step": summary.step}
    if summary.update > 1:
        pairs["update"] = str(summary.update)
    pairs |= _flow("put", summary.put)
    if summary.put.bytes:
        unique = summary.put.unique_bytes
        pairs["unique_bytes"] = str(unique)
        pairs["redundancy"] = f"{summary.put.bytes / unique:.1f}x" if unique else "-"
        pairs["unique_by"] = summary.unique_by
    pairs |= _flow("get", summary.get)
    if summary.effective_s is not None:
        pairs["effective_bytes"] = str(summary.effective_bytes)
        pairs["effective_s"] = _seconds(summary.effective_s)
        pairs["effective_GBps"] = _rate(summary.effective_bytes, summary.effective_s)
    pairs |= {f"{name}_s": _seconds(s) for name, s in summary.stages.items() if name not in ("put", "get")}
    pairs |= {f"{one.direction}_{one.rung}_bytes": str(one.bytes) for one in summary.staged}
    if summary.pool is not None:
        pairs |= {"pool_held_bytes": str(summary.pool.held), "pool_peak_bytes": str(summary.pool.peak)}
        if summary.pool.retired:
            pairs["pool_retired_bytes"] = str(summary.pool.retired)
        if summary.pool.advised_mb:
            pairs["advised_host_staging_mb"] = str(summary.pool.advised_mb)
    if summary.unmeasured:
        pairs["unmeasured"] = str(summary.unmeasured)
    if summary.raw_rows:
        pairs["raw_rows"] = str(summary.raw_rows)
    if node:
        pairs["node"] = node
    if pid is not None:
        pairs["pid"] = str(pid)
    return f"{PREFIX} " + " ".join(f"{key}={_value(text)}" for key, text in pairs.items())


def parse_step_line(line: str) -> dict[str, str]:
    """The pairs of a step line, as text.

    Raises:
        ValueError: the text is no step line.
    """
    line = line.strip()
    body = line[len(PREFIX) :]
    pairs = {m[1]: json.loads(m[2]) if m[2].startswith('"') else m[2] for m in _PAIR.finditer(body)}
    if not line.startswith(f"{PREFIX} step=") or _PAIR.sub("", body):
        raise ValueError(f"not a step line: {line[:200]!r}")
    return pairs


def _flow(direction: str, flow: Flow) -> dict[str, str]:
    """Pairs of one direction; none when nothing moved and nothing failed."""
    pairs: dict[str, str] = {}
    if flow.rows or flow.bytes:
        pairs[f"{direction}_rows"] = str(flow.rows)
        pairs[f"{direction}_bytes"] = str(flow.bytes)
        pairs[f"{direction}_fast_bytes"] = str(flow.fast_bytes)
        pairs[f"{direction}_slow_bytes"] = str(flow.slow_bytes)
        if flow.wire_bytes is not None:
            pairs[f"{direction}_wire_bytes"] = str(flow.wire_bytes)
            pairs[f"{direction}_saved_bytes"] = str(flow.saved_bytes)
        pairs[f"{direction}_s"] = _seconds(flow.seconds)
        pairs[f"{direction}_GBps"] = _rate(flow.bytes, flow.seconds)
    if flow.failed:
        pairs[f"{direction}_failed"] = str(flow.failed)
    if flow.retried:
        pairs[f"{direction}_retried"] = str(flow.retried)
    return pairs


def _seconds(value: float) -> str:
    return f"{value:.4f}"


def _rate(size: int, seconds: float) -> str:
    return f"{size / seconds / 1e9:.3f}" if seconds > 0 else "-"


def _value(text: str) -> str:
    return text if _WORD.fullmatch(text) else json.dumps(text)
