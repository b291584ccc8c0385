"""The staging pool: the client's registered local buffer, on loan to transfers and to consumers (design §7, RFC §4.6).

Most of it is lent to consumers by Mooncake's own ``BufferPool``: what a get reads into such a lease is offered as it
lies there, and the memory comes back by itself when the last view of it dies, also after the store is closed (a lease
keeps its memory, measured). A quarter, the low-water mark, is never
lent: transfers that are over soon borrow it. So neither puts nor gets ever depend on when a consumer lets go.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from relax_tq_rdma.payload.format import ALIGN, aligned
from relax_tq_rdma.staging.errors import StoreFault
from relax_tq_rdma.staging.loans import Inbox, lend
from relax_tq_rdma.staging.reserve import Borrowed, Reserve
from relax_tq_rdma.transport.memory import shown

logger = logging.getLogger(__name__)

PAGE = 4096
MADV_HUGEPAGE, MADV_POPULATE_WRITE = 14, 23  # the kernel's asm-generic/mman-common.h; mmap does not name the second
WARM_BYTES = 16 * 1024 * 1024
"""Pages brought in one call: it ends soon when the process does."""

RESERVE_SHARE = 4
"""One part in four is the reserve."""
PIECES = 4
"""Pieces of the reserve that transfers at work at the same time want: batches are cut to this."""


class Pool:
    """Registered memory of one process. Safe to use from several threads."""

    def __init__(self, native: Any, capacity: int) -> None:
        """
        Args:
            native: Mooncake's ``BufferPool`` over nothing but the local buffer. Only ``acquire(size, block=False)`` is
                used: one that waits may wait for ever (measured).
            capacity: bytes of the local buffer that are the pool's. The rest is headroom: with everything leased the
                store's own byte calls fail (measured).

        Raises:
            StoreFault: the local buffer is smaller than the reserve.
        """
        self._native = native
        self.capacity = capacity
        self._lock = threading.Lock()
        self._back: Inbox[int] = Inbox(self._lock, self._returned)
        self._retired: list[torch.Tensor] = []
        self._lent = self._lent_retired = 0
        self.peak = 0
        """Most bytes lent at one time."""
        self.warm = threading.Event()
        """Set once the pages are there."""
        self._warm()
        size = capacity // RESERVE_SHARE // ALIGN * ALIGN
        try:
            lease = native.acquire(size, block=False)
        except RuntimeError as exc:
            raise StoreFault(
                f"the staging pool cannot take {shown(size)} from Mooncake's local buffer ({exc})",
                "use a local buffer that is larger than --tq-host-staging-mb",
            ) from exc
        self.reserve = Reserve(torch.from_numpy(np.frombuffer(lease.buffer, np.uint8)))
        self.low_water = size
        self.piece = size // PIECES // ALIGN * ALIGN

    @property
    def held(self) -> int:
        """Bytes lent to consumers now."""
        return self._lent - self._lent_retired

    @property
    def retired(self) -> int:
        """Bytes that are never handed out again, because a transfer into or out of them may still be running."""
        return self._lent_retired + self.reserve.retired

    def lend(self, nbytes: int) -> torch.Tensor | None:
        """A contiguous 1-D uint8 tensor of ``nbytes``, for as long as any view of it lives; ``None``: not now."""
        cost = aligned(nbytes)
        with self._lock:
            self._back.empty()
            if self._lent + cost > self.capacity - self.low_water:
                return None
            self._lent += cost
            self.peak = max(self.peak, self.held)
        self._back.settle()
        try:
            lease = self._native.acquire(nbytes, block=False)
        except RuntimeError:  # free, but not in one piece
            self._back.drop(cost)
            return None
        return lend(lease.buffer, partial(self._back.drop, cost))

    @contextmanager
    def borrow(self, nbytes: int, wait: float) -> Iterator[Borrowed | None]:
        """Memory for one transfer; ``None`` when there is none within ``wait`` seconds, or never can be.

        Raises:
            StoreFault: so much is retired that the pool is of no use any more.
        """
        self._check()
        with self.reserve.borrow(nbytes, wait) as piece:
            if piece is not None:
                yield piece
                return
        lent = self.lend(nbytes)  # too large for the reserve, or that is busy: then of what consumers do not hold now
        if lent is None:
            free, size = shown(self.reserve.free), shown(self.reserve.size)
            logger.info("no staging memory of %s within %g s (%s of %s free)", shown(nbytes), wait, free, size)
            yield None
            return
        piece = Borrowed(lent)
        try:
            yield piece
        finally:
            if piece.retired:
                self.retire(lent)

    def retire(self, lent: torch.Tensor) -> None:
        """Keep lent memory for the life of the process: a transfer into it failed, and may still be running."""
        with self._lock:
            if not any(lent is known for known in self._retired):
                self._retired.append(lent)
                self._lent_retired += aligned(lent.numel())
        self._back.settle()

    def _check(self) -> None:
        left = min(self.reserve.size - self.reserve.retired - self.piece, self.capacity - self.retired - self.low_water)
        if left < 0:
            raise StoreFault(
                f"the staging pool is used up: {shown(self.retired)} of {shown(self.capacity)} are out of use, "
                "because transfers that failed there may still be running",
                "find out why they failed (see the errors before this one), then restart the job",
            )

    def _returned(self, cost: int) -> None:
        self._lent -= cost

    def _warm(self) -> None:
        """Have the kernel bring all pages, while transfers may already use them.

        A first transfer into cold pages takes four times as long (measured); yet bringing a GiB takes a second on an
        idle machine and 20 on a busy one, so no put and no get waits for it. Huge pages where the kernel has some: a
        read into small ones takes 8 % longer (measured). Where the card has pinned the buffer, all pages are there.
        """
        try:
            lease = self._native.acquire(self.capacity, block=False)
        except RuntimeError:
            self.warm.set()
            return
        start = np.frombuffer(lease.buffer, np.uint8).ctypes.data
        del lease  # the addresses stay the pool's; populating changes no byte of whoever has them by then
        arguments = (start, start + self.capacity, self.warm)
        threading.Thread(target=_populate, args=arguments, daemon=True, name="staging-pool-warm").start()


def _populate(start: int, end: int, done: threading.Event) -> None:
    """``madvise`` piece by piece; a kernel before 5.14 refuses to bring pages, and they come when used."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    first, last = -(-start // PAGE) * PAGE, end // PAGE * PAGE
    try:
        madvise(first, last - first, MADV_HUGEPAGE)
        for at in range(first, last, WARM_BYTES):
            if madvise(at, min(WARM_BYTES, last - at), MADV_POPULATE_WRITE):
                return
    finally:
        done.set()
