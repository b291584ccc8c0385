"""Memory on loan: tensors whose end is noticed, so that the memory under them can be used again.

A view, a slice, a numpy array or a DataLoader batch made of such a tensor keeps it, so "the last one is gone" is exact.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np
import torch

T = TypeVar("T")


def lend(memory: memoryview, give_back: Callable[[], None]) -> torch.Tensor:
    """A 1-D uint8 tensor over writable ``memory``; ``give_back`` is called once when no view of it is left.

    The call comes from whatever thread drops the last view, also from within a garbage collection: it must not wait.
    It comes a moment before ``memory`` itself is let go of.
    """
    array = np.frombuffer(memory, np.uint8)
    weakref.finalize(array, give_back).atexit = False
    lent: torch.Tensor = torch.from_numpy(array)
    return lent


class Inbox(Generic[T]):
    """Takes what comes back at any moment, and has it handled under a lock without ever waiting for that lock.

    A garbage collection may run inside the lock's own block, so a finalizer that waited would wait for ever.
    """

    def __init__(self, lock: threading.Lock, handle: Callable[[T], None]) -> None:
        self._lock, self._handle = lock, handle
        self._items: deque[T] = deque()

    def drop(self, item: T) -> None:
        self._items.append(item)
        self.settle()

    def settle(self) -> None:
        """Handle what lies here; to be called after each use of the lock, for what came meanwhile."""
        while self._items and self._lock.acquire(blocking=False):
            try:
                self.empty()
            finally:
                self._lock.release()

    def empty(self) -> None:
        """Handle what lies here, for one who has the lock."""
        while self._items:
            self._handle(self._items.popleft())
