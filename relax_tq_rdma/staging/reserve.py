"""Registered memory for transfers that are over soon: every put, and every get that copies out.

It is a part of the pool that consumers never hold, so whoever waits for it waits for running transfers only.
"""

from __future__ import annotations

import threading
import time
from bisect import insort
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from relax_tq_rdma.payload.format import aligned


class Borrowed:
    """A piece of the reserve. ``memory``: contiguous 1-D uint8, its storage offset a multiple of 64."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.retired = False

    def retire(self) -> None:
        """A transfer failed and nobody knows whether it has ended: never hand this piece out again."""
        self.retired = True


class Reserve:
    """Hands out pieces of ``memory``, first come, first served. Safe to use from several threads."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._turn = threading.Lock()  # held by the one whose turn it is, so that a large piece is not starved
        self._changed = threading.Condition()
        self._taken: list[tuple[int, int]] = []
        self.size = memory.numel()
        self.retired = 0
        """Bytes that are never handed out again."""

    @property
    def free(self) -> int:
        """Bytes that nobody has now, in one piece or several."""
        with self._changed:
            return self.size - sum(end - start for start, end in self._taken)

    @contextmanager
    def borrow(self, nbytes: int, wait: float) -> Iterator[Borrowed | None]:
        """A piece for the length of the block; ``None`` when there is none within ``wait`` seconds, or never can be."""
        start = self._take(nbytes, wait)
        if start is None:
            yield None
            return
        piece = Borrowed(self._memory[start : start + nbytes])
        try:
            yield piece
        finally:
            with self._changed:
                if piece.retired:
                    self.retired += nbytes
                else:
                    self._taken.remove((start, start + nbytes))
                    self._changed.notify_all()

    def _take(self, nbytes: int, wait: float) -> int | None:
        ends = time.monotonic() + wait
        if nbytes > self.size - self.retired or not self._turn.acquire(timeout=wait):
            return None
        try:
            with self._changed:
                while (start := self._gap(nbytes)) is None:
                    if not self._changed.wait(ends - time.monotonic()):
                        return None
                insort(self._taken, (start, start + nbytes))
                return start
        finally:
            self._turn.release()

    def _gap(self, nbytes: int) -> int | None:
        at = 0
        for start, end in self._taken:
            if start - at >= nbytes:
                return at
            at = aligned(end)
        return at if self.size - at >= nbytes else None
