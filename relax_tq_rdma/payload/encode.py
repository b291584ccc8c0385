"""All rows of a put, planned first and then written once (RFC §4.3; design §6).

Each payload byte is copied exactly once: from its tensor, whatever its strides or device, to its place in the arena.
"""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Union

import numpy as np
import torch
from torch import Tensor

from relax_tq_rdma.payload.dedup import find_sources
from relax_tq_rdma.payload.format import (
    ALIGN,
    CHECKSUM_BLOCK,
    PUT_ID_BYTES,
    Bytes,
    Reference,
    aligned,
    encode_frame,
    payload_crc,
)
from relax_tq_rdma.payload.plan import Leaf, RowPlan, Unrepresentable, Unsendable, leaf_bytes, plan_row

Allocator = Callable[[int], Tensor]
"""Bytes wanted -> a contiguous 1-D CPU uint8 tensor of at least that many, e.g. over a staging lease."""

PIECE_BYTES = 64 * 1024
"""From here on a tensor is worth a message part of its own: below, copying it costs less than one more part."""

INLINE_BYTES = 16 * 1024
"""Packed bytes up to here are ``bytes``, which a message holds in its head: for a row's header alone a tenth of what a
part of its own costs, at this size about as much (5 against 41 us, 42 against 49)."""

Piece = Union[Bytes, bytes]  # noqa: UP007

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


class _Frame(NamedTuple):
    """Everything of a row before its data, and the bytes of its data section."""

    head: bytes
    size: int


@dataclass(frozen=True)
class ColumnPlan:
    """One put's rows, measured but not yet written: who owns the memory decides where and in which pieces.

    Attributes:
        rows: the rows as given; they must not change until they are written.
        put: 128-bit id of this put.
        reasons: row ordinal -> why the row stays as it is.
        refused: ordinals of those that have no plain bytes, so that raw they cannot be carried either (FC-42).
        sources: row ordinal -> ordinal of the row that holds its bytes; itself unless the row is a reference.
    """

    rows: Sequence[object]
    put: bytes
    reasons: dict[int, str]
    refused: set[int]
    sources: list[int]
    checksum: bool
    _plans: list[RowPlan | None]
    _frames: dict[int, _Frame]

    @property
    def encoded(self) -> list[int]:
        """Ordinals of the rows that can be written, in order."""
        return list(self._frames)

    @property
    def devices(self) -> set[torch.device]:
        """Of the tensors that are yet to be read."""
        leaves = (leaf for plan in self._plans if plan is not None for leaf, _, _ in plan.leaves)
        return {leaf.device for leaf in leaves if isinstance(leaf, Tensor)}

    def is_encoded(self, ordinal: int) -> bool:
        return ordinal in self._frames

    def nbytes(self, ordinal: int) -> int:
        """Length of an encoded row in bytes, a multiple of 64."""
        frame = self._frames[ordinal]
        return len(frame.head) + frame.size

    def payload_bytes(self, ordinal: int) -> int:
        """Tensor and array bytes of a row, whether it is written or only refers to them."""
        plan = self._plans[ordinal]
        return 0 if plan is None else sum(nbytes for _, _, nbytes in plan.leaves)

    def write(self, ordinals: Sequence[int], arena: Tensor) -> list[Tensor]:
        """Write rows end to end from the start of ``arena``; each payload byte is copied once.

        Args:
            ordinals: of encoded rows.
            arena: contiguous 1-D CPU uint8, its storage offset a multiple of 64. Every byte of the rows is written:
                padding is zero, never old memory.

        Returns:
            Per ordinal its row, a view of ``arena``.
        """
        sizes = [self.nbytes(ordinal) for ordinal in ordinals]
        writer = _Writer(arena, sum(sizes))
        at = 0
        with torch.no_grad():
            for ordinal, nbytes in zip(ordinals, sizes, strict=True):
                plan, frame = self._plans[ordinal], self._frames[ordinal]
                assert plan is not None
                leaves = plan.leaves if self.sources[ordinal] == ordinal else []
                writer.write_row(at, frame.head, leaves, frame.size, self.checksum)
                at += nbytes
        return list(torch.split_with_sizes(writer.tensor, sizes))

    def pieces(self, ordinal: int) -> list[Piece]:
        """A row cut so that its large tensors need not be copied: the bytes of the pieces in order are the row.

        The first one holds the whole header. A large tensor that is contiguous in host memory is a piece by itself, a
        1-D uint8 array over the caller's memory; what lies between is packed, into ``bytes`` where it is little. A row
        with a checksum is packed whole.
        """
        plan, frame = self._plans[ordinal], self._frames[ordinal]
        assert plan is not None
        if self.checksum:
            (row,) = self.write([ordinal], ordinary_memory(self.nbytes(ordinal)))
            return [_packed(row.numpy())]
        pieces: list[Piece] = []
        packed, at = bytearray(frame.head), 0  # ``at``: of the packed bytes in the row
        for source, offset, nbytes in plan.leaves if self.sources[ordinal] == ordinal else ():
            begin = len(frame.head) + offset
            packed += bytes(begin - at - len(packed))
            if nbytes < PIECE_BYTES:
                packed += leaf_bytes(source).data
                continue
            pieces += [_packed(packed), leaf_bytes(source)] if packed else [leaf_bytes(source)]
            packed, at = bytearray(), begin + nbytes
        packed += bytes(self.nbytes(ordinal) - at - len(packed))
        return [*pieces, _packed(packed)] if packed else pieces

    def planned(self) -> list[Any]:
        """Per row a :class:`PlannedRow`, or the original object where ``reasons`` says why."""
        return [PlannedRow(self, n) if self.is_encoded(n) else row for n, row in enumerate(self.rows)]


@dataclass(frozen=True)
class PlannedRow:
    """An encoded row that is yet to be written: ``column.write([ordinal, ...], arena)``."""

    column: ColumnPlan
    ordinal: int

    @property
    def nbytes(self) -> int:
        return self.column.nbytes(self.ordinal)


def plan_column(
    rows: Sequence[object],
    *,
    put_id: bytes | None = None,
    dedup_indexes: Sequence[int] | None = None,
    checksum: bool = False,
) -> ColumnPlan:
    """Plan the rows (``dict`` or None) of one column of one put. Nothing is copied.

    Args:
        rows: not changed; a row that cannot be represented exactly is passed through.
        put_id: 16 bytes; random by default.
        dedup_indexes: the rows' global indexes; given, rows equal to an earlier one become references (RFC §4.4, L3b).
        checksum: add a crc32c of the payload to each row.
    """
    if dedup_indexes is not None and len(dedup_indexes) != len(rows):
        raise ValueError(f"{len(rows)} rows but {len(dedup_indexes)} indexes")
    put = os.urandom(PUT_ID_BYTES) if put_id is None else put_id
    if len(put) != PUT_ID_BYTES:
        raise ValueError(f"a put id is {PUT_ID_BYTES} bytes, not {len(put)}")
    plans, reasons, refused = _plan_all(rows)
    sources = list(range(len(rows))) if dedup_indexes is None else find_sources(plans)
    frames = _frames(plans, sources, dedup_indexes, put, checksum)
    return ColumnPlan(rows, put, reasons, refused, sources, checksum, plans, frames)


def encode_column(
    rows: Sequence[object],
    *,
    put_id: bytes | None = None,
    dedup_indexes: Sequence[int] | None = None,
    checksum: bool = False,
    arena_allocator: Allocator | None = None,
) -> EncodedColumn:
    """Encode the rows of one column of one put into one arena.

    Args:
        arena_allocator: where the arena comes from; ordinary memory by default. The others: see :func:`plan_column`.
    """
    plan = plan_column(rows, put_id=put_id, dedup_indexes=dedup_indexes, checksum=checksum)
    offsets = [0]
    for ordinal in plan.encoded:
        offsets.append(offsets[-1] + plan.nbytes(ordinal))
    allocate = arena_allocator if arena_allocator is not None and offsets[-1] else ordinary_memory
    arena = allocate(offsets[-1])
    out = list(rows)
    for ordinal, view in zip(plan.encoded, plan.write(plan.encoded, arena), strict=True):
        out[ordinal] = view
    return EncodedColumn(out, arena[: offsets[-1]], offsets, plan.put, plan.reasons, plan.sources)


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


def _packed(data: bytearray | Bytes) -> Piece:
    return bytes(data) if len(data) <= INLINE_BYTES else np.frombuffer(data, np.uint8)


def ordinary_memory(nbytes: int) -> Tensor:
    """A fresh 1-D uint8 CPU tensor."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def _plan_all(rows: Sequence[object]) -> tuple[list[RowPlan | None], dict[int, str], set[int]]:
    plans: list[RowPlan | None] = []
    reasons: dict[int, str] = {}
    refused: set[int] = set()
    for ordinal, row in enumerate(rows):
        try:
            plans.append(plan_row(row))
        except Unrepresentable as exc:
            plans.append(None)
            reasons[ordinal] = str(exc)
            if isinstance(exc, Unsendable):
                refused.add(ordinal)
    return plans, reasons, refused


def _frames(
    plans: list[RowPlan | None], sources: list[int], indexes: Sequence[int] | None, put: bytes, checksum: bool
) -> dict[int, _Frame]:
    """The frame of each row that can be encoded, by its ordinal."""
    extra = CHECKSUM_BLOCK if checksum else 0
    uses = Counter(sources)
    frames: dict[int, _Frame] = {}
    for ordinal, plan in enumerate(plans):
        if plan is None:
            continue
        source = sources[ordinal]
        if source == ordinal or indexes is None:
            size = plan.size + extra
            head = encode_frame(put, ordinal, size, entries=plan.entries, refs=uses[ordinal] - 1, checksum=checksum)
        else:
            size = extra
            held = frames[source]
            ref = Reference(int(indexes[source]), len(held.head) + held.size, put, source)
            head = encode_frame(put, ordinal, size, entries=None, ref=ref, checksum=checksum)
        frames[ordinal] = _Frame(head, size)
    return frames


class _Writer:
    """The one copy into the put's memory."""

    def __init__(self, arena: Tensor, nbytes: int) -> None:
        if arena.dtype is not torch.uint8 or arena.dim() != 1 or not arena.is_cpu or not arena.is_contiguous():
            raise ValueError("an arena must be a contiguous 1-D uint8 CPU tensor")
        if arena.numel() < nbytes or arena.storage_offset() % ALIGN:
            raise ValueError(
                f"an arena of {arena.numel()} bytes at storage offset {arena.storage_offset()} cannot hold "
                f"{nbytes} bytes aligned to {ALIGN}"
            )
        self.tensor = arena[:nbytes]
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
