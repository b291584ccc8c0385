"""Ordinary memory that is used again once its last view is gone (RFC §4.6, L5b: no fresh cold pages in every get)."""

from __future__ import annotations

import mmap
import threading
from bisect import bisect_left, insort
from contextlib import suppress
from functools import partial

import numpy as np
import torch

from relax_tq_rdma.payload.encode import ordinary_memory
from relax_tq_rdma.staging.loans import Inbox, lend

SMALL_BYTES = 64 * 1024
"""Below this the allocator of the C library uses memory again by itself."""

MAPPED_BYTES = 256 * 1024
"""From here on a block is a mapping of its own: large blocks of all sizes that come and go leave the C library's heap
full of holes (a gigabyte in half an hour, measured)."""

_STEPS = 16  # sizes a power of two is cut into: at most 1/16 of a block is unused
_SLACK = 1.125  # a free block may be larger than what is asked for by this factor

_Free = tuple[int, int, torch.Tensor]  # size, serial number of its return, block


class Recycled:
    """Hands out byte tensors; blocks of those that died are kept for later ones. Safe to use from several threads.

    Args:
        keep: most bytes of free blocks that are kept; beyond that the one that lay longest goes.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._lock = threading.Lock()
        self._free: list[_Free] = []
        self._back: Inbox[torch.Tensor] = Inbox(self._lock, self._returned)
        self._serial = 0
        self.allocations = 0
        """Fresh blocks so far."""
        self.allocated_bytes = 0
        """Bytes of the fresh blocks so far."""
        self.free_bytes = 0
        self.used_bytes = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """A contiguous 1-D uint8 CPU tensor of ``nbytes``, 64-byte aligned, its content left over from others."""
        if nbytes < SMALL_BYTES:
            return ordinary_memory(nbytes)
        with self._lock:
            self._back.empty()
            block = self._reuse(nbytes)
            if block is None:
                size = _rounded(nbytes)
                self.allocations += 1
                self.allocated_bytes += size
            else:
                size = block.numel()
            self.used_bytes += size
        self._back.settle()
        if block is None:
            try:
                block = _fresh(size)
            except BaseException:
                with self._lock:
                    self.used_bytes -= size
                raise
        return lend(block.numpy().data[:nbytes], partial(self._back.drop, block))

    def _reuse(self, nbytes: int) -> torch.Tensor | None:
        at = bisect_left(self._free, (nbytes,))
        if at == len(self._free) or self._free[at][0] > nbytes * _SLACK:
            return None
        size, _, block = self._free.pop(at)
        self.free_bytes -= size
        return block

    def _returned(self, block: torch.Tensor) -> None:
        size = block.numel()
        self.used_bytes -= size
        self._serial += 1
        insort(self._free, (size, self._serial, block))
        self.free_bytes += size
        while self.free_bytes > self._keep:
            oldest = min(range(len(self._free)), key=lambda at: self._free[at][1])
            self.free_bytes -= self._free.pop(oldest)[0]


def _fresh(size: int) -> torch.Tensor:
    if size < MAPPED_BYTES:
        return ordinary_memory(size)
    try:
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as exc:
        raise MemoryError(f"{size} bytes of memory cannot be had: {exc}") from exc
    with suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(mapping, np.uint8))


def _rounded(nbytes: int) -> int:
    step = max(64, (1 << (nbytes - 1).bit_length()) // (2 * _STEPS))
    return -(-nbytes // step) * step
