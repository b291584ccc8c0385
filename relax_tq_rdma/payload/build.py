"""Header entries into values over a row's memory.

A built tensor or array is a view of the row's memory and keeps it alive, yet its storage is exactly its own bytes: so
``pickle``, ``deepcopy``, ``torch.save`` and Ray carry those and nothing else of the arena.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relax_tq_rdma.payload.dtypes import NUMPY_DTYPES, TORCH_KINDS, TorchKind
from relax_tq_rdma.payload.format import (
    ALIGN,
    CHECKSUM_BLOCK,
    MAX_DIMENSIONS,
    ArrayEntry,
    DictEntry,
    Entry,
    Frame,
    ListEntry,
    RawEntry,
    RowFormatError,
    ScalarEntry,
    TensorEntry,
    TupleEntry,
)

SMALL_BYTES = 4096
LARGE_BYTES = 1 << 20
"""A tensor of up to the former in a piece of memory from the latter on is copied out of it."""

_NUMPY_DIMENSIONS = 32  # of numpy 1; numpy 2 has 64
_CPU = torch.device("cpu")


class _Builder(ABC):
    """One pass over a row's entries. Everything a header can claim is checked before memory is touched."""

    __slots__ = ("_end", "_limit", "_start")

    def __init__(self, frame: Frame) -> None:
        header = frame.header
        self._start = frame.start
        self._limit = header.size - CHECKSUM_BLOCK if header.checksum else header.size
        self._end = 0  # of the entries built so far: a later one must not overlap them

    @abstractmethod
    def _tensor_at(self, at: int, kind: TorchKind, entry: TensorEntry) -> Tensor: ...

    @abstractmethod
    def _array_at(self, at: int, dtype: np.dtype[Any], entry: ArrayEntry) -> np.ndarray[Any, Any]: ...

    @property
    def _device(self) -> torch.device:
        return _CPU

    def build(self, entries: list[Entry]) -> dict[Any, Any]:
        out = {entry.key: _BUILD[type(entry)](self, entry) for entry in entries}
        if len(out) != len(entries):
            raise RowFormatError("the row's header names a key twice")
        return out

    def _raw(self, entry: RawEntry) -> Any:
        return entry.value

    def _tensor(self, entry: TensorEntry) -> Tensor:
        kind = TORCH_KINDS.get(entry.dtype)
        if kind is None:
            raise RowFormatError(f"{entry.key!r} has dtype {entry.dtype!r}, which this torch version does not have")
        at = self._place(entry, kind.itemsize)
        if at is None:
            return torch.empty(entry.shape, dtype=kind.dtype, device=self._device)
        return self._tensor_at(at, kind, entry)

    def _array(self, entry: ArrayEntry) -> np.ndarray[Any, Any]:
        dtype = NUMPY_DTYPES.get(entry.dtype)
        if dtype is None:
            raise RowFormatError(f"{entry.key!r} has the unknown numpy dtype {entry.dtype!r}")
        at = self._place(entry, dtype.itemsize)
        return np.empty(entry.shape, dtype) if at is None else self._array_at(at, dtype, entry)

    def _list(self, entry: ListEntry) -> list[Any]:
        return [_BUILD[type(item)](self, item) for item in entry.items]

    def _dict(self, entry: DictEntry) -> dict[Any, Any]:
        return self.build(entry.items)

    def _tuple(self, entry: TupleEntry) -> tuple[Any, ...]:
        items = _BUILD[type(entry.of)](self, entry.of)
        if type(items) is not list:
            raise RowFormatError("the row's header has a tuple that is not made of a list")
        return tuple(items)

    def _scalar(self, entry: ScalarEntry) -> Any:
        dtype = NUMPY_DTYPES.get(entry.dtype)
        if dtype is None or len(entry.value) != dtype.itemsize:
            raise RowFormatError(f"{entry.key!r}: {len(entry.value)} bytes are not a numpy scalar {entry.dtype!r}")
        return np.frombuffer(entry.value, dtype)[0]

    def _place(self, entry: TensorEntry | ArrayEntry, itemsize: int) -> int | None:
        """Where in the row the bytes are, None if there are none.

        Checked: the shape fits the bytes, and they lie in the data section, aligned, after those of the entry before.
        """
        offset, nbytes = entry.offset, entry.nbytes
        if len(entry.shape) > MAX_DIMENSIONS:
            raise RowFormatError(f"{entry.key!r}: {len(entry.shape)} dimensions, a row holds {MAX_DIMENSIONS}")
        if prod(entry.shape) * itemsize != nbytes:
            raise RowFormatError(f"{entry.key!r}: shape {entry.shape} of {entry.dtype} is not {nbytes} bytes")
        if not nbytes:
            return None
        end = offset + nbytes
        if offset < self._end or offset % ALIGN or end > self._limit:
            raise RowFormatError(
                f"{entry.key!r}: bytes {offset} to {end} are misaligned, overlap another entry or leave the row's "
                f"{self._limit} bytes of data"
            )
        self._end = end
        return self._start + offset


_BUILD: dict[type, Callable[[_Builder, Any], Any]] = {
    TensorEntry: _Builder._tensor,
    ArrayEntry: _Builder._array,
    ScalarEntry: _Builder._scalar,
    RawEntry: _Builder._raw,
    ListEntry: _Builder._list,
    TupleEntry: _Builder._tuple,
    DictEntry: _Builder._dict,
}


class HostBuilder(_Builder):
    """Values over a row in host memory."""

    __slots__ = ("_view",)

    def __init__(self, view: memoryview, frame: Frame) -> None:
        super().__init__(frame)
        self._view = view

    def _tensor_at(self, at: int, kind: TorchKind, entry: TensorEntry) -> Tensor:
        return _host_tensor(self._view, at, kind, entry)

    def _array_at(self, at: int, dtype: np.dtype[Any], entry: ArrayEntry) -> np.ndarray[Any, Any]:
        array: np.ndarray[Any, Any] = np.ndarray(entry.shape, dtype, self._view, at)
        return array


class PiecesBuilder(_Builder):
    """Values over a row in host memory that is cut into pieces."""

    __slots__ = ("_starts", "_views")

    def __init__(self, views: Sequence[memoryview], frame: Frame) -> None:
        super().__init__(frame)
        self._views = views
        self._starts = [0, *accumulate(map(len, views[:-1]))]

    def _tensor_at(self, at: int, kind: TorchKind, entry: TensorEntry) -> Tensor:
        return _host_tensor(*self._locate(at, entry), kind, entry)

    def _array_at(self, at: int, dtype: np.dtype[Any], entry: ArrayEntry) -> np.ndarray[Any, Any]:
        array: np.ndarray[Any, Any] = np.ndarray(entry.shape, dtype, *self._locate(at, entry))
        return array

    def _locate(self, at: int, entry: TensorEntry | ArrayEntry) -> tuple[memoryview, int]:
        """The piece that holds an entry's bytes, and where in it they begin."""
        place = bisect_right(self._starts, at) - 1
        view, at = self._views[place], at - self._starts[place]
        if at + entry.nbytes > len(view):
            raise RowFormatError(f"{entry.key!r}: its bytes are cut in two by the end of a piece of the row")
        return view, at


def _host_tensor(view: memoryview, at: int, kind: TorchKind, entry: TensorEntry) -> Tensor:
    dtype, itemsize, twin = kind
    if entry.nbytes <= SMALL_BYTES < LARGE_BYTES <= len(view):
        # A view of it would keep the whole row: a few bytes kept for long must not hold megabytes.
        view, at = memoryview(bytearray(view[at : at + entry.nbytes])), 0
    if twin is not None and len(entry.shape) <= _NUMPY_DIMENSIONS:
        # half the cost of frombuffer for a shape of several dimensions
        return torch.from_numpy(np.ndarray(entry.shape, twin, view, at))
    flat = torch.frombuffer(view, dtype=dtype, count=entry.nbytes // itemsize, offset=at)
    # to as many elements, so it sets the shape only; a view would hold on to a base tensor
    return flat.resize_(entry.shape)


class DeviceBuilder(_Builder):
    """Values over a row in device memory: tensors stay there, arrays are copied to the host."""

    __slots__ = ("_row",)

    def __init__(self, row: Tensor, frame: Frame) -> None:
        super().__init__(frame)
        self._row = row

    @property
    def _device(self) -> torch.device:
        return self._row.device

    def _tensor_at(self, at: int, kind: TorchKind, entry: TensorEntry) -> Tensor:
        begin = self._row.storage_offset() + at
        own: Any = self._row.untyped_storage()[begin : begin + entry.nbytes]  # its own storage over the same memory
        return torch.empty(0, dtype=kind.dtype, device=self._row.device).set_(own).resize_(entry.shape)

    def _array_at(self, at: int, dtype: np.dtype[Any], entry: ArrayEntry) -> np.ndarray[Any, Any]:
        data: np.ndarray[Any, Any] = self._row[at : at + entry.nbytes].cpu().numpy()
        return data.view(dtype).reshape(entry.shape)
