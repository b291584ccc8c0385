"""One event loop thread a process, shared by everything that calls coroutines from synchronous code."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any


class AsyncLoopThread:
    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="async-loop", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=5)


_shared: AsyncLoopThread | None = None
_lock = threading.Lock()


def get_async_loop() -> AsyncLoopThread:
    global _shared
    with _lock:
        if _shared is None:
            _shared = AsyncLoopThread()
        return _shared


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run on the shared loop and wait. Not from that loop's own thread."""
    return get_async_loop().run(coroutine)


def stop_async_loop() -> None:
    """The next :func:`run` starts a new loop."""
    global _shared
    with _lock:
        if _shared is not None:
            _shared.stop()
        _shared = None
