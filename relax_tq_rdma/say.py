"""Lines for people on standard error: where the job's log is."""

from __future__ import annotations

import sys
from contextlib import suppress


def say(line: str) -> None:
    """Print a line. A full disk under the log, or a stream that is closed, costs the line and never the job."""
    with suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)
