"""What a row consists of: its header entries, its payload leaves and where they go, or why it must stay as it is.

Nothing is copied here. A row that cannot come back exactly is refused with its reason, never approximated
(FC-35 to FC-44).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Union

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from relax_tq_rdma.payload.dtypes import NUMPY_NAMES, NUMPY_SCALARS, TORCH_NAMES
from relax_tq_rdma.payload.format import (
    MAX_DIMENSIONS,
    MAX_HEADER_BYTES,
    ArrayEntry,
    Bytes,
    DictEntry,
    Entry,
    Key,
    ListEntry,
    RawEntry,
    ScalarEntry,
    TensorEntry,
    TupleEntry,
    aligned,
    encode_entries,
)

MAX_DEPTH = 64
MAX_NESTED = 1 << 16  # a list that holds a list twice, that holds a list twice, ... has no end when written out

_SCALARS = frozenset({type(None), bool, int, float, str, bytes})  # exact types: a subclass would come back as its base
_KEYS = frozenset({type(None), bool, int, str})

Leaf = tuple[Union[Tensor, np.ndarray[Any, Any]], int, int]  # noqa: UP007
"""Source, offset in the data section, bytes."""


class Unrepresentable(Exception):
    """A row that the format cannot hold exactly. The text is the reason; callers keep the original object."""


class Unsendable(Unrepresentable):
    """A value without plain bytes, which the way of raw rows cannot carry either (FC-42)."""


class RowPlan(NamedTuple):
    """``entries`` is the encoded entry list (None for a None row), ``size`` the bytes of the data section.

    ``leaves`` references the row's own tensors and arrays, so nothing is freed while the plan is held.
    """

    entries: bytes | None
    leaves: list[Leaf]
    size: int


def plan_row(row: object) -> RowPlan:
    """Plan one row: a ``dict`` or ``None``.

    Raises:
        Unrepresentable: with the reason, led by the key it is about.
    """
    if row is None:
        return RowPlan(None, [], 0)
    if type(row) is not dict:
        raise Unrepresentable(f"the row is a {_name(row)}, not a dict")
    walk = _Walk()
    entries: list[Entry] = []
    for key, value in row.items():
        if type(key) not in _KEYS:
            raise Unrepresentable(f"a key of type {_name(key)}")
        try:
            entries.append(walk.entry(value, key, 0))
        except Unrepresentable as exc:
            raise type(exc)(f"{key!r}: {exc}") from None
    return RowPlan(_encode(entries), walk.leaves, walk.size)


def explain(row: object) -> str | None:
    """Why ``encode_rows`` leaves this row as it is; None when it can be encoded."""
    try:
        plan_row(row)
    except Unrepresentable as exc:
        return str(exc)
    return None


def leaf_bytes(leaf: Tensor | np.ndarray[Any, Any]) -> Bytes:
    """A leaf's logical bytes in C order, in host memory; a view where it lies there and is contiguous."""
    if isinstance(leaf, Tensor):
        plain = leaf.detach().resolve_conj().resolve_neg().cpu().contiguous()
        # not reshape(-1): a contiguous tensor of one element may keep a stride that no byte view can have
        flat: Bytes = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy()
        return flat
    return np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)


class _Walk:
    """One pass over a row: collects leaves in order and hands out their offsets."""

    __slots__ = ("leaves", "size", "values")

    def __init__(self) -> None:
        self.leaves: list[Leaf] = []
        self.size = 0
        self.values = 0

    def entry(self, value: Any, key: Key, depth: int) -> Entry:
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            return self._tensor(value, key)
        if kind in _SCALARS:
            return RawEntry(value, key)
        if kind is np.ndarray:
            return self._array(value, key)
        if kind is list or kind is tuple or kind is dict:
            return self._container(value, key, depth)
        name = NUMPY_SCALARS.get(kind)
        if name is None:
            raise Unrepresentable(_why_not(value))
        return ScalarEntry(name, value.tobytes(), key)

    def _tensor(self, tensor: Tensor, key: Key) -> TensorEntry:
        name = TORCH_NAMES.get(tensor.dtype)
        if (
            name is None
            or tensor.layout is not torch.strided
            or tensor.is_nested
            or not (tensor.is_cpu or tensor.is_cuda)
        ):
            has_bytes = (
                tensor.layout in (torch.strided, torch.jagged) and not tensor.is_meta and not tensor.is_quantized
            )
            raise (Unrepresentable if has_bytes else Unsendable)(_why_not(tensor))
        if tensor.dim() > MAX_DIMENSIONS:
            raise Unrepresentable(f"a tensor of {tensor.dim()} dimensions")
        nbytes = tensor.nbytes
        if nbytes and not tensor.data_ptr():
            raise Unrepresentable("a tensor whose storage was freed")
        return TensorEntry(name, tensor.shape, self._place(tensor, nbytes), nbytes, key)

    def _array(self, array: np.ndarray[Any, Any], key: Key) -> ArrayEntry:
        name = NUMPY_NAMES.get(array.dtype)
        if name is None or array.dtype.metadata:
            raise Unrepresentable(_why_not(array))
        return ArrayEntry(name, array.shape, self._place(array, array.nbytes), array.nbytes, key)

    def _place(self, source: Tensor | np.ndarray[Any, Any], nbytes: int) -> int:
        offset = self.size
        if nbytes:
            self.leaves.append((source, offset, nbytes))
            self.size = aligned(offset + nbytes)
        return offset

    def _container(self, value: Any, key: Key, depth: int) -> Entry:
        if depth == MAX_DEPTH:
            raise Unrepresentable(f"nested deeper than {MAX_DEPTH} levels, or it contains itself")
        if type(value) is tuple:
            return TupleEntry(self._items(list(value), None, depth), key)
        if type(value) is list:
            return self._items(value, key, depth)
        self._count(len(value))
        if not _KEYS.issuperset(map(type, value)):
            raise Unrepresentable("a dict with keys that are not str, int, bool or None")
        items = [self.entry(item, name, depth + 1) for name, item in value.items()]
        plain = {item.key: item.value for item in items if type(item) is RawEntry}
        return RawEntry(plain, key) if len(plain) == len(items) else DictEntry(items, key)

    def _items(self, values: list[Any], key: Key, depth: int) -> RawEntry | ListEntry:
        if _SCALARS.issuperset(map(type, values)):
            return RawEntry(values, key)
        self._count(len(values))
        items = [self.entry(item, None, depth + 1) for item in values]
        plain = [item.value for item in items if type(item) is RawEntry]
        return RawEntry(plain, key) if len(plain) == len(items) else ListEntry(items, key)

    def _count(self, values: int) -> None:
        self.values += values
        if self.values > MAX_NESTED:
            raise Unrepresentable(f"more than {MAX_NESTED} nested values")


def _encode(entries: list[Entry]) -> bytes:
    try:
        body = encode_entries(entries)
    except (OverflowError, ValueError, RecursionError) as exc:  # UnicodeEncodeError is a ValueError
        raise Unrepresentable(f"{_culprit(entries)!r}: a value that msgpack cannot hold ({exc})") from None
    if len(body) > MAX_HEADER_BYTES - 1024:  # room for the header's own fields
        raise Unrepresentable(f"non-tensor values of {len(body)} bytes, a header holds {MAX_HEADER_BYTES}")
    return body


def _culprit(entries: list[Entry]) -> Key:
    for entry in entries:
        try:
            encode_entries([entry])
        except (OverflowError, ValueError, RecursionError):
            return entry.key
    return None


def _why_not(value: Any) -> str:
    """The reason for a value that no entry kind holds, by the name its user knows it by."""
    if isinstance(value, np.ndarray):
        if type(value) is not np.ndarray:
            return f"numpy subclass {_name(value)}"
        return f"numpy array of dtype {value.dtype}" + (" with metadata" if value.dtype.metadata else "")
    if not isinstance(value, Tensor):
        return f"a value of type {_name(value)}"
    if value.layout is not torch.strided:
        return f"{str(value.layout).removeprefix('torch.')} tensor"
    if value.is_nested:
        return "nested tensor"
    if type(value) not in (Tensor, Parameter):
        return f"tensor subclass {_name(value)}"
    if value.is_quantized:
        return f"quantised tensor of dtype {value.dtype}"
    if not (value.is_cpu or value.is_cuda):
        return f"{value.device.type} tensor"
    return f"tensor of dtype {value.dtype}"


def _name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
