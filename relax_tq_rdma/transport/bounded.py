"""Calls that may block for good: in a thread that is left alone, or, where they hold the GIL, under a last resort."""

from __future__ import annotations

import contextlib
import faulthandler
import threading
from collections.abc import Callable, Iterator
from typing import Any

_LAST_RESORT_SECONDS = 3.0
"""How long after its limit a call that holds the GIL is ended together with this process; before the caller's 5 s."""


class Background:
    """One call in a daemon thread: whoever waits can stop waiting."""

    def __init__(self, call: Callable[[], Any], name: str) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True, name=name)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def wait(self, limit: float) -> bool:
        """Whether the call has ended, within ``limit`` seconds."""
        self._thread.join(max(0.0, limit))
        return not self.running

    def _run(self) -> None:
        try:
            self.result = self._call()
        except BaseException as exc:
            self.error = exc


@contextlib.contextmanager
def if_longer(seconds: float, call: Callable[[], object]) -> Iterator[None]:
    """Make a call, in a thread of its own, when the block takes longer than that."""
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def last_resort(limit: float) -> Iterator[None]:
    """End this process, with the stacks on stderr, when a native call keeps the GIL far beyond the limit.

    Only a native thread can do that. The job-owned master and all actors of the job end with the process.
    """
    faulthandler.dump_traceback_later(limit + _LAST_RESORT_SECONDS, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
