"""Which rows of a put hold the same bytes (RFC §4.4, L3b; FC-46).

Rows are equal when their encoded entries are (keys, order, kinds, dtypes, shapes, plain values) and every payload byte
is. The order of tests keeps the common cases cheap:

1. equal entries sort rows into classes; a row alone in its class is never hashed;
2. the same memory (address, strides) is the same payload, while the put holds the rows;
3. blake2b-128 over a bounded sample of the payload tells different images apart;
4. equal samples are confirmed by comparing all bytes. Only where different payloads share a sample is each hashed in
   full, so the work stays linear; that digest too is confirmed byte for byte. So no digest alone ever merges two rows.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from relax_tq_rdma.payload.format import Bytes
from relax_tq_rdma.payload.plan import Leaf, RowPlan, leaf_bytes

MIN_BYTES = 1024
"""Rows of less are not worth a reference: it takes 200 bytes and may cost the reader a second fetch."""

_SAMPLE_BLOCK = 1024
_SAMPLE_BLOCKS = 16

_memcmp = ctypes.CDLL(None).memcmp  # lets other threads run, and writes no result for each element, as NumPy does
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def find_sources(plans: Sequence[RowPlan | None]) -> list[int]:
    """Per row the ordinal of the first row with the same content; its own where there is none.

    Args:
        plans: one per row of a put; None for a row that stays raw. The planned tensors must not change meanwhile.
    """
    sources = list(range(len(plans)))
    classes: dict[bytes, _Class] = {}
    for ordinal, plan in enumerate(plans):
        if plan is None or plan.entries is None or plan.size + len(plan.entries) < MIN_BYTES:
            continue
        known = classes.get(plan.entries)
        if known is None:
            known = classes[plan.entries] = _Class(plans)
        sources[ordinal] = known.source_of(ordinal, plan)
    return sources


class _Class:
    """Rows with equal entries: the distinct ones so far, found by memory, by sample, by content."""

    __slots__ = ("_buckets", "_by_memory", "_first", "_plans")

    def __init__(self, plans: Sequence[RowPlan | None]) -> None:
        self._plans = plans
        self._by_memory: dict[tuple[Any, ...], int] = {}
        self._buckets: dict[bytes, _Bucket] = {}
        self._first: int | None = None

    def source_of(self, ordinal: int, plan: RowPlan) -> int:
        memory = tuple(_address(source) for source, _, _ in plan.leaves)
        source = self._by_memory.get(memory)
        if source is None:
            source = self._by_memory[memory] = self._by_content(ordinal, plan)
        return source

    def _by_content(self, ordinal: int, plan: RowPlan) -> int:
        if any(isinstance(leaf, Tensor) and not leaf.is_cpu for leaf, _, _ in plan.leaves):
            return ordinal  # hashing would copy it from the device first: identity only
        if self._first is None:
            self._first = ordinal
            return ordinal
        if not self._buckets:
            self._bucket(self._first)
        return self._bucket(ordinal).source_of(ordinal, plan.leaves)

    def _bucket(self, ordinal: int) -> _Bucket:
        plan = self._plans[ordinal]
        assert plan is not None
        sample = _digest(plan.leaves, sample=True)
        bucket = self._buckets.get(sample)
        if bucket is None:
            bucket = self._buckets[sample] = _Bucket(ordinal, plan.leaves)
        return bucket


class _Bucket:
    """Rows whose samples are equal. Nearly always one payload and its copies."""

    __slots__ = ("_by_digest", "_first", "_leaves")

    def __init__(self, first: int, leaves: list[Leaf]) -> None:
        self._first = first
        self._leaves = leaves
        self._by_digest: dict[bytes, list[tuple[int, list[Leaf]]]] | None = None

    def source_of(self, ordinal: int, leaves: list[Leaf]) -> int:
        if ordinal == self._first:
            return ordinal
        if self._by_digest is None:
            if _same_bytes(self._leaves, leaves):
                return self._first
            self._by_digest = {_digest(self._leaves): [(self._first, self._leaves)]}
        candidates = self._by_digest.setdefault(_digest(leaves), [])
        for source, other in candidates:
            if _same_bytes(other, leaves):
                return source
        candidates.append((ordinal, leaves))
        return ordinal


def _address(leaf: Tensor | np.ndarray[Any, Any]) -> tuple[Any, ...]:
    """Where a leaf's elements are. With equal dtype and shape, equal addresses are equal values."""
    if isinstance(leaf, Tensor):
        return leaf.data_ptr(), leaf.stride(), leaf.is_conj(), leaf.is_neg()
    return leaf.__array_interface__["data"][0], leaf.strides


def _digest(leaves: list[Leaf], *, sample: bool = False) -> bytes:
    state = hashlib.blake2b(digest_size=16)
    for leaf, _, nbytes in leaves:
        data = leaf_bytes(leaf)
        if sample and nbytes > _SAMPLE_BLOCK * _SAMPLE_BLOCKS:
            step = (nbytes - _SAMPLE_BLOCK) / (_SAMPLE_BLOCKS - 1)
            for block in range(_SAMPLE_BLOCKS):
                at = int(block * step)
                state.update(data[at : at + _SAMPLE_BLOCK].data)
        else:
            state.update(data.data)
    return state.digest()


def _same_bytes(left: list[Leaf], right: list[Leaf]) -> bool:
    """All payload bytes equal; both have the same dtypes and shapes."""
    return all(_equal(leaf_bytes(a), leaf_bytes(b)) for (a, _, _), (b, _, _) in zip(left, right, strict=True))


def _equal(a: Bytes, b: Bytes) -> bool:
    """Equal bytes of two contiguous arrays of one length. Ends at the first difference."""
    return not _memcmp(a.ctypes.data, b.ctypes.data, a.nbytes)
