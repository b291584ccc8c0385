"""An exception of another process in one line: its cause, without stack traces, colours and addresses."""

from __future__ import annotations

import re

from relax_tq_rdma.errors import DataplaneError


def describe(error: BaseException) -> str:
    """``Type: message`` of the cause; our own errors speak for themselves.

    Ray wraps the traceback of a task or of a failed constructor into its message: the cause is the last line of it.
    """
    if isinstance(error, DataplaneError):
        return str(error)
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines() if line.strip()]
    remote = next((line for line in reversed(lines) if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)), "")
    if remote and len(lines) > 1:
        return _clip(re.sub(r"^relax_tq_rdma\.errors\.\w+: ", "", remote))
    return _clip(f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__)


def _clip(text: str, limit: int = 300) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
