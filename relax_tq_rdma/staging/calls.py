"""Native calls with a deadline.

A call into the engine cannot be interrupted: with a frozen peer a read takes 30 to 60 s, and nothing promises that
it ever returns (FC-27). So each one runs in a thread of its own, and whoever asked stops waiting in time. The abandoned
thread keeps the memory it was given alive until the engine lets go of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Abandoned(Exception):
    """The call did not return in time and is still running."""


def bounded(call: Callable[[], T], limit: float, *, hold: Any = None) -> T:
    """Run ``call`` for at most ``limit`` seconds.

    Args:
        call: must let go of the GIL while it blocks; Mooncake's data calls do (its ``setup`` and ``close`` do not).
        limit: seconds.
        hold: kept alive as long as the call runs, also after it was abandoned.

    Raises:
        Abandoned: it did not return in time.
        BaseException: whatever ``call`` raised.
    """
    outcome: list[tuple[bool, Any]] = []

    def run(held: Any) -> None:
        try:
            outcome.append((True, call()))
        except BaseException as exc:
            outcome.append((False, exc))

    # A daemon: a call that never returns must not keep the process from ending.
    thread = threading.Thread(target=run, args=(hold,), daemon=True, name="store-call")
    thread.start()
    thread.join(limit)
    if not outcome:
        raise Abandoned
    returned, value = outcome[0]
    if not returned:
        raise value
    result: T = value
    return result
