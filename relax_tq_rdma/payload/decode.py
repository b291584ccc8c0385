"""Rows back into dicts, without a copy, every tensor with its own storage (design §6)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Union

import numpy as np
import torch
from torch import Tensor

from relax_tq_rdma.payload.build import DeviceBuilder, HostBuilder, PiecesBuilder
from relax_tq_rdma.payload.encode import Allocator, Piece, ordinary_memory
from relax_tq_rdma.payload.format import (
    Frame,
    Header,
    Reference,
    RowFormatError,
    frame_nbytes,
    is_row,
    parse_frame,
    payload_bytes,
    payload_crc,
)

Memory = Union[memoryview, "tuple[memoryview, ...]", Tensor]
"""A row in host memory, the same in pieces that follow one another, or a row on a device."""

_HEAD_BYTES = 4096  # of a row on a device: nearly every header fits, so one small copy reads it


def decode_row(row: Tensor | memoryview, *, copy: bool = False) -> dict[Any, Any] | None:
    """Decode one row.

    Args:
        row: a whole encoded row, a contiguous 1-D uint8 tensor (CPU or CUDA) or a memoryview.
        copy: give the result memory of its own (one copy of the row) instead of the row's. Read-only memory is always
            copied, because a tensor over it could be written to.

    Returns:
        The dict that was encoded, or None for a None row. Tensors come back detached and contiguous, ``nn.Parameter``
        as a plain tensor, on the row's device; arrays come back in C order and in host memory.

    Raises:
        RowFormatError: foreign, truncated, damaged, of a newer version, or a reference (see ``resolve.py``).
    """
    return open_row(row).decode(copy=copy)


def open_row(row: Tensor | memoryview) -> Row:
    """Read and check a row's header; the payload is not touched. Arguments and errors as ``decode_row``."""
    if isinstance(row, Tensor) and not row.is_cpu:
        return Row(_checked(row), _device_frame(row))
    view = _view(row)
    return Row(view, parse_frame(view, len(view)))


def open_pieces(pieces: Sequence[Piece]) -> Row:
    """As :func:`open_row`, for a row in host memory that is cut into pieces (``ColumnPlan.pieces``).

    Pieces of ``bytes`` are small and cannot be written to: they are copied, so that the others need not be.
    """
    views = tuple(map(_piece_view, pieces))
    frame = parse_frame(views[0] if views else memoryview(b""), sum(map(len, views)))
    return Row(views[0] if len(views) == 1 else views, frame)


def _piece_view(piece: Piece) -> memoryview:
    if isinstance(piece, bytes):
        return memoryview(bytearray(piece))
    if isinstance(piece, np.ndarray) and piece.dtype == np.uint8:
        return _flat_view(piece.data)
    found = f"an array of {piece.dtype}" if isinstance(piece, np.ndarray) else f"a {type(piece).__name__}"
    raise RowFormatError(f"a piece of a row is bytes or a uint8 array, this is {found}")


def _checked(row: Tensor) -> Tensor:
    if row.dtype is not torch.uint8 or row.dim() != 1 or not row.is_contiguous():
        raise RowFormatError(
            f"a row is a contiguous 1-D uint8 tensor, this is {row.dtype} of shape {tuple(row.shape)} "
            f"and strides {row.stride()}"
        )
    return row


def is_encoded(value: object) -> bool:
    """Whether a value a store gave back is an encoded row (of any version) rather than an original object."""
    if isinstance(value, Tensor):
        return value.dtype is torch.uint8 and value.dim() == 1 and is_row(bytes(value[:4].tolist()))
    return isinstance(value, memoryview) and value.c_contiguous and is_row(bytes(_flat_view(value)[:4]))


class Row:
    """An encoded row whose header was read and checked."""

    __slots__ = ("_memory", "frame")

    def __init__(self, memory: Memory, frame: Frame) -> None:
        self._memory = memory
        self.frame = frame

    @property
    def header(self) -> Header:
        return self.frame.header

    @property
    def nbytes(self) -> int:
        """Length of the row in bytes."""
        return self.frame.nbytes

    @property
    def reference(self) -> Reference | None:
        """What the row refers to, when it holds no payload of its own."""
        return self.frame.header.ref

    @property
    def payload_bytes(self) -> int:
        """Bytes of the row's tensors and arrays, without padding; 0 for a reference."""
        return sum(map(payload_bytes, self.frame.header.entries or ()))

    def copied(self, allocate: Allocator = ordinary_memory) -> Row:
        """The same row in host memory of its own, in one piece."""
        memory = self._memory
        return Row(memory.cpu().numpy().data if isinstance(memory, Tensor) else _joined(memory, allocate), self.frame)

    def verify(self) -> None:
        """Check the payload's checksum, if the row has one.

        Raises:
            RowFormatError: a bit of the payload has changed.
        """
        if self.frame.header.checksum:
            _verify(self._memory)

    def decode(self, *, copy: bool = False, allocate: Allocator = ordinary_memory) -> dict[Any, Any] | None:
        """The row's value; see ``decode_row``. Each call with ``copy`` gives independent memory, from ``allocate``."""
        memory, frame = self._memory, self.frame
        header = frame.header
        self.verify()
        if header.none:
            return None
        if header.ref is not None:
            raise RowFormatError(
                f"the row is a reference to global index {header.ref.index}: decode the row stored there in its place"
            )
        builder: HostBuilder | PiecesBuilder | DeviceBuilder
        if isinstance(memory, Tensor):
            builder = DeviceBuilder(memory.clone() if copy else memory, frame)
        else:
            if copy or (memory.readonly if isinstance(memory, memoryview) else any(part.readonly for part in memory)):
                memory = _joined(memory, allocate)
            builder = HostBuilder(memory, frame) if isinstance(memory, memoryview) else PiecesBuilder(memory, frame)
        try:
            return builder.build(header.entries or [])
        except (ValueError, TypeError, RuntimeError, OverflowError) as exc:  # RecursionError is a RuntimeError
            raise RowFormatError(f"the row's header describes a value that cannot exist: {exc}") from None


def _view(row: Tensor | memoryview) -> memoryview:
    if isinstance(row, Tensor):
        return _checked(row).cpu().numpy().data
    if isinstance(row, memoryview):
        return _flat_view(row)
    raise RowFormatError(f"a row is a tensor or a memoryview, this is a {type(row).__name__}")


def _flat_view(row: memoryview) -> memoryview:
    if not row.c_contiguous:
        raise RowFormatError("a row is contiguous bytes, this memoryview has gaps")
    if not row.nbytes:
        return memoryview(b"")  # one of several dimensions cannot be cast
    return row if row.format == "B" and row.ndim == 1 else row.cast("B")


def _joined(memory: memoryview | tuple[memoryview, ...], allocate: Allocator) -> memoryview:
    """A copy of the row's bytes in one piece."""
    views = (memory,) if isinstance(memory, memoryview) else memory
    fresh = allocate(sum(map(len, views)))
    at = 0
    for view in views:
        source, part = np.frombuffer(view, np.uint8), fresh[at : at + len(view)]
        if view.readonly:
            np.copyto(part.numpy(), source)
        else:
            part.copy_(torch.from_numpy(source))  # several threads; torch takes no read-only memory
        at += len(view)
    return fresh.numpy().data


def _device_frame(row: Tensor) -> Frame:
    total = row.numel()
    head = row[:_HEAD_BYTES].cpu().numpy().data
    needed = frame_nbytes(head, total)
    if needed > len(head):
        head = row[:needed].cpu().numpy().data
    return parse_frame(head, total)


def _verify(memory: Memory) -> None:
    if isinstance(memory, Tensor):
        row = memory.cpu().numpy()
    else:
        row = np.frombuffer(memory if isinstance(memory, memoryview) else b"".join(memory), np.uint8)
    if payload_crc(row) != row[-4:].tobytes():
        raise RowFormatError("the row's payload is damaged: its crc32c does not match")
