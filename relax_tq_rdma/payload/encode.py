"""All rows of a put, written once into one arena (RFC §4.3; design §6).

Each payload byte is copied exactly once: from its tensor, whatever its strides or device, to its place in the arena.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relax_tq_rdma.payload.dedup import find_sources
from relax_tq_rdma.payload.format import (
    ALIGN,
    CHECKSUM_BLOCK,
    PUT_ID_BYTES,
    Reference,
    aligned,
    encode_frame,
    payload_crc,
)
from relax_tq_rdma.payload.plan import Leaf, RowPlan, Unrepresentable, plan_row

Allocator = Callable[[int], Tensor]
"""Bytes wanted -> a contiguous 1-D CPU uint8 tensor of at least that many, e.g. over a staging lease."""

_ZEROS = bytes(ALIGN)
_SMALL = 1 << 18  # up to here one memmove beats torch's dispatch, 0.9 against 4 us for a small tensor


@dataclass(frozen=True)
class EncodedColumn:
    """One put's rows.

    Attributes:
        rows: per row a 1-D uint8 tensor (a view of ``arena``), or the original object where ``reasons`` says why.
        arena: 1-D uint8, the encoded rows end to end.
        offsets: where in ``arena`` each encoded row begins, and the end of the last.
        put: 128-bit id of this put.
        reasons: row ordinal -> why the row stayed as it was.
        sources: row ordinal -> ordinal of the row that holds its bytes; itself unless the row is a reference.
    """

    rows: list[Any]
    arena: Tensor
    offsets: list[int]
    put: bytes
    reasons: dict[int, str]
    sources: list[int]

    def jagged(self) -> Tensor:
        """The encoded rows as one ``torch.jagged`` nested tensor over the arena, without a copy (RFC §4.3)."""
        offsets = torch.tensor(self.offsets, dtype=torch.int64, device="cpu")
        nested: Tensor = torch.nested.nested_tensor_from_jagged(self.arena, offsets)
        return nested


def encode_column(
    rows: Sequence[object],
    *,
    put_id: bytes | None = None,
    dedup_indexes: Sequence[int] | None = None,
    checksum: bool = False,
    arena_allocator: Allocator | None = None,
) -> EncodedColumn:
    """Encode the rows (``dict`` or None) of one column of one put.

    Args:
        rows: not changed; a row that cannot be represented exactly is passed through.
        put_id: 16 bytes; random by default.
        dedup_indexes: the rows' global indexes; given, rows equal to an earlier one become references (RFC §4.4, L3b).
        checksum: add a crc32c of the payload to each row.
        arena_allocator: where the arena comes from; ordinary memory by default.
    """
    if dedup_indexes is not None and len(dedup_indexes) != len(rows):
        raise ValueError(f"{len(rows)} rows but {len(dedup_indexes)} indexes")
    put = os.urandom(PUT_ID_BYTES) if put_id is None else put_id
    if len(put) != PUT_ID_BYTES:
        raise ValueError(f"a put id is {PUT_ID_BYTES} bytes, not {len(put)}")

    plans, reasons = _plan_all(rows)
    sources = list(range(len(rows))) if dedup_indexes is None else find_sources(plans)
    frames = _frames(plans, sources, dedup_indexes, put, checksum)
    sizes = [len(frame) + size for _, frame, size in frames]
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + size)

    arena = _Arena(offsets[-1], arena_allocator)
    with torch.no_grad():
        for (ordinal, frame, size), at in zip(frames, offsets, strict=False):
            plan = plans[ordinal]
            own = plan is not None and sources[ordinal] == ordinal
            arena.write_row(at, frame, plan.leaves if plan is not None and own else [], size, checksum)

    out = list(rows)
    for (ordinal, _, _), view in zip(frames, torch.split_with_sizes(arena.tensor, sizes), strict=True):
        out[ordinal] = view
    return EncodedColumn(out, arena.tensor, offsets, put, reasons, sources)


def encode_rows(
    rows: Sequence[object],
    *,
    put_id: bytes | None = None,
    dedup_indexes: Sequence[int] | None = None,
    checksum: bool = False,
    arena_allocator: Allocator | None = None,
) -> list[Any]:
    """``encode_column(...).rows``: per row a 1-D uint8 tensor, or the original object (``explain`` says why)."""
    return encode_column(
        rows, put_id=put_id, dedup_indexes=dedup_indexes, checksum=checksum, arena_allocator=arena_allocator
    ).rows


def _plan_all(rows: Sequence[object]) -> tuple[list[RowPlan | None], dict[int, str]]:
    plans: list[RowPlan | None] = []
    reasons: dict[int, str] = {}
    for ordinal, row in enumerate(rows):
        try:
            plans.append(plan_row(row))
        except Unrepresentable as exc:
            plans.append(None)
            reasons[ordinal] = str(exc)
    return plans, reasons


def _frames(
    plans: list[RowPlan | None], sources: list[int], indexes: Sequence[int] | None, put: bytes, checksum: bool
) -> list[tuple[int, bytes, int]]:
    """Per encoded row: ordinal, everything before its data, bytes of its data section."""
    extra = CHECKSUM_BLOCK if checksum else 0
    frames: list[tuple[int, bytes, int]] = []
    nbytes: dict[int, int] = {}
    for ordinal, plan in enumerate(plans):
        if plan is None:
            continue
        source = sources[ordinal]
        if source == ordinal or indexes is None:
            size = plan.size + extra
            frame = encode_frame(put, ordinal, size, entries=plan.entries, checksum=checksum)
        else:
            size = extra
            ref = Reference(int(indexes[source]), nbytes[source], put, source)
            frame = encode_frame(put, ordinal, size, entries=None, ref=ref, checksum=checksum)
        nbytes[ordinal] = len(frame) + size
        frames.append((ordinal, frame, size))
    return frames


class _Arena:
    """The put's buffer and the one copy into it. Every byte of it is written: padding is zero, never old memory."""

    def __init__(self, nbytes: int, allocate: Allocator | None) -> None:
        if allocate is None or not nbytes:
            tensor = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        else:
            tensor = allocate(nbytes)
        if tensor.dtype is not torch.uint8 or tensor.dim() != 1 or not tensor.is_cpu or not tensor.is_contiguous():
            raise ValueError("an arena must be a contiguous 1-D uint8 CPU tensor")
        if tensor.numel() < nbytes or tensor.storage_offset() % ALIGN:
            raise ValueError(
                f"an arena of {tensor.numel()} bytes at storage offset {tensor.storage_offset()} cannot hold "
                f"{nbytes} bytes aligned to {ALIGN}"
            )
        self.tensor = tensor[:nbytes]
        self._address = self.tensor.data_ptr()
        self._array = self.tensor.numpy()
        self._bytes = self._array.data
        self._typed: dict[torch.dtype, Tensor] = {}

    def write_row(self, at: int, frame: bytes, leaves: list[Leaf], size: int, checksum: bool) -> None:
        start = at + len(frame)
        self._bytes[at:start] = frame
        filled = 0
        for source, offset, nbytes in leaves:
            if isinstance(source, Tensor):
                self._copy_tensor(source, start + offset, nbytes)
            else:
                np.copyto(np.ndarray(source.shape, source.dtype, self._bytes, start + offset), source)
            filled = aligned(offset + nbytes)
            self._bytes[start + offset + nbytes : start + filled] = _ZEROS[: filled - offset - nbytes]
        if checksum:
            row = self._array[at : start + size]
            row[-CHECKSUM_BLOCK:] = 0
            self._bytes[start + size - 4 : start + size] = payload_crc(row)

    def _copy_tensor(self, source: Tensor, at: int, nbytes: int) -> None:
        contiguous = source.is_contiguous()
        if nbytes < _SMALL and contiguous and source.is_cpu and not source.is_neg() and not source.is_conj():
            ctypes.memmove(self._address + at, source.data_ptr(), nbytes)
            return
        if not source.is_cpu:
            # a strided copy between devices drops a lazy conjugation or negation (seen with torch 2.11 on CUDA)
            source = source.resolve_conj().resolve_neg()
            contiguous = source.is_contiguous()
        # One copy_ resolves strides, lazy conjugation and device, keeps every bit and uses several threads.
        typed = self._typed.get(source.dtype)
        if typed is None:
            typed = self._typed[source.dtype] = self.tensor.view(source.dtype)
        strides = source.stride() if contiguous else _contiguous_strides(source.shape)
        origin = self.tensor.storage_offset() + at
        typed.as_strided(source.shape, strides, origin // source.itemsize).copy_(source)


def _contiguous_strides(shape: Sequence[int]) -> list[int]:
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return strides
