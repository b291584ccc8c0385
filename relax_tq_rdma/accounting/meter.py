"""Measures a batch: logical bytes, bytes that are no copies, and the path TransferQueue takes, per field (RFC §4.1).

What counts as a byte (``docs/reference/metrics.md`` repeats it):

- tensors and numpy arrays: ``numel * element_size``, whatever memory they view; sparse tensors: their parts;
- ``bytes`` and the like: their length; ``str``: its UTF-8 length;
- ``bool``: 1; ``int`` and ``float``: 8; ``complex``: 16; ``None``: 0; numpy scalars: their item size;
- dicts, lists, tuples and sets: the sum of what they hold, keys not counted;
- anything else: 0, and one more in ``unmeasured``; so is the inner end of a container that holds itself.

Unique bytes by identity: memory that several leaves share counts once, to the byte, and so does an object that occurs
again (the objects are held meanwhile, so identity is exact). Numbers have no identity: each occurrence counts.
Unique bytes by content: leaves with equal dtype, shape and bytes count once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase

from relax_tq_rdma.accounting.extent import Comb, comb, covered
from relax_tq_rdma.accounting.names import Path, printable
from relax_tq_rdma.accounting.paths import FastRows
from relax_tq_rdma.accounting.records import Batch, FieldStats

_NUMBERS: dict[type, int] = {bool: 1, int: 8, float: 8, complex: 16}


def measure_batch(
    data: Mapping[str, Any] | TensorDictBase, *, content: bool = False, fast: FastRows | None = None
) -> Batch:
    """Measure every field of a batch.

    Args:
        data: field name to column. A column is a dense or nested tensor, a ``NonTensorStack`` or list of rows, a numpy
            array or a nested container whose first dimension is the batch.
        content: tell copies by content (blake2b-128; reads every byte) instead of by memory identity.
        fast: rows that took the fast path although they are no tensors.
    """
    fields: list[FieldStats] = []
    for name in data.keys():  # noqa: SIM118  a TensorDict iterates over rows, not keys
        fields += _field(printable(str(name)), data[name], content, (fast or {}).get(str(name), frozenset()))
    rows = data.batch_size[0] if isinstance(data, TensorDictBase) and data.batch_size else _rows(fields)
    return Batch(rows=rows, fields=tuple(fields), unique_by="content" if content else "identity")


def _rows(fields: Iterable[FieldStats]) -> int:
    rows: dict[str, int] = {}
    for stats in fields:
        rows[stats.name] = rows.get(stats.name, 0) + stats.rows
    return max(rows.values(), default=0)


def _field(name: str, column: Any, content: bool, carried: frozenset[int]) -> list[FieldStats]:
    """One entry per path that rows of the column take; a mixed column has two."""
    if isinstance(column, torch.Tensor):
        meter = _Meter(content)
        for piece in _pieces(column, content):
            meter.add(piece)
        return [meter.stats(name, "fast", column.size(0) if column.dim() else 1)]
    if isinstance(column, (np.ndarray, TensorDictBase, Mapping)) and not isinstance(column, NonTensorStack):
        meter = _Meter(content)
        meter.add(column)
        return [meter.stats(name, "slow", _length(column))]
    rows = _as_rows(column)
    fast: list[Any] = []
    slow: list[Any] = []
    for ordinal, row in enumerate(rows):
        (fast if ordinal in carried or isinstance(row, torch.Tensor) else slow).append(row)
    meter = _Meter(content)
    found = []
    for path, part in (("fast", fast), ("slow", slow)):
        if part or (path == "slow" and not rows):
            for row in part:
                meter.add(row)
            found.append(meter.stats(name, path, len(part)))  # type: ignore[arg-type]
    return found


def _pieces(column: Any, content: bool) -> tuple[torch.Tensor, ...]:
    """Rows, or as little as has the same bytes: each row taken from a jagged tensor costs 10 us, ``values()`` 180."""
    if not column.is_nested and not (content and column.dim()):
        return (column,)
    if column.layout == torch.jagged and not content and column.lengths() is None:
        return (column._values,)  # without lengths there are no holes: torch splits the values into the rows
    return tuple(column.unbind())


def _as_rows(column: Any) -> Sequence[Any]:
    """The rows as TransferQueue's ``_generate_values`` takes them."""
    if isinstance(column, NonTensorStack):
        return column.tolist()  # type: ignore[no-any-return]
    return column if isinstance(column, (list, tuple)) else [column]


def _length(column: Any) -> int:
    if isinstance(column, np.ndarray):
        return column.shape[0] if column.ndim else 1
    if isinstance(column, TensorDictBase):
        return column.batch_size[0] if column.batch_size else 1
    return 1


class _Meter:
    """Adds up values. :meth:`stats` returns what was added since the last call, without copies of anything earlier."""

    def __init__(self, content: bool) -> None:
        self._content = content
        self._bytes = self._unmeasured = self._unique_seen = 0
        self._dtypes: set[Any] = set()
        self._own = 0  # unique bytes that need no comparison
        self._spans: dict[Any, list[tuple[int, int]]] = {}  # by device: memory that a leaf fills from end to end
        self._combs: dict[Any, list[Comb]] = {}  # by device: strided memory
        self._objects: dict[int, tuple[Any, int, int]] = {}  # id: (the object, held; its bytes; its unmeasured leaves)
        self._open: set[int] = set()  # containers being walked
        self._digests: set[bytes] = set()
        self._hashed: dict[Any, Any] = {}  # memory already hashed: the holder

    def stats(self, name: str, path: Path, rows: int) -> FieldStats:
        unique = self._own + sum(
            covered(self._spans.get(device, ()), self._combs.get(device, ()))
            for device in self._spans.keys() | self._combs.keys()
        )
        stats = FieldStats(
            name=name,
            path=path,
            rows=rows,
            bytes=self._bytes,
            unique_bytes=unique - self._unique_seen,
            dtypes=tuple(sorted(str(dtype).removeprefix("torch.") for dtype in self._dtypes)),
            unmeasured=self._unmeasured,
        )
        self._bytes = self._unmeasured = 0
        self._unique_seen = unique
        self._dtypes = set()
        return stats

    def add(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._tensor(value)
        elif type(value) is dict:  # the common row; the general rule is below
            self._container(value, value.values())
        elif value is None:
            pass
        elif isinstance(value, np.ndarray):
            self._array(value)
        elif isinstance(value, np.generic):
            self._dtypes.add(value.dtype)
            self._number(value.nbytes)
        elif isinstance(value, (str, bytes, bytearray, memoryview)):
            self._text(value)
        elif (size := _number_size(value)) is not None:
            self._number(size)
        elif (children := _children(value)) is not None:
            self._container(value, children)
        else:
            self._unmeasured += 1

    # --- leaves -------------------------------------------------------------------------------------------------------

    def _tensor(self, tensor: torch.Tensor) -> None:
        if tensor.is_nested:
            for row in tensor.unbind():
                self._tensor(row)
            return
        if tensor.layout != torch.strided:
            parts = _sparse_parts(tensor)
            if parts is None:
                self._unmeasured += 1
            for part in parts or ():
                self._tensor(part)
            return
        size = tensor.nbytes  # numel x element_size, of the view
        self._bytes += size
        self._dtypes.add(tensor.dtype)
        if size == 0:
            return
        try:
            address = tensor.data_ptr()
            device = None if tensor.is_cpu else tensor.device
            if self._content:
                key = (device, address, tensor.shape, tensor.stride(), tensor.dtype)
                self._hash(key, tensor, size, lambda: _tensor_digest(tensor))
            elif address == 0:  # a meta tensor has no memory
                self._own += size
            elif tensor.is_contiguous():
                self._spans.setdefault(device, []).append((address, address + size))
            else:
                item = tensor.element_size()
                self._view(device, comb(address, item, tensor.shape, [s * item for s in tensor.stride()]))
        except (RuntimeError, NotImplementedError, TypeError):
            self._own += size  # no readable memory behind it (fake, functional or opaque tensors)

    def _array(self, array: np.ndarray[Any, Any]) -> None:
        if array.dtype == object:
            self._container(array, array.ravel().tolist())
            return
        self._bytes += array.nbytes
        self._dtypes.add(array.dtype)
        if array.nbytes == 0:
            return
        address = array.__array_interface__["data"][0]
        if self._content:
            key = (None, address, array.shape, array.strides, array.dtype.str)
            self._hash(key, array, array.nbytes, lambda: _array_digest(array))
        else:
            self._view(None, comb(address, array.itemsize, array.shape, array.strides))

    def _text(self, value: str | bytes | bytearray | memoryview) -> None:
        if id(value) in self._objects:
            self._bytes += self._objects[id(value)][1]
            return
        raw = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        size = raw.nbytes if isinstance(raw, memoryview) else len(raw)
        self._bytes += size
        self._objects[id(value)] = (value, size, 0)
        if self._content:
            kind = "str" if isinstance(value, str) else "bytes"
            self._hash((kind, id(value)), value, size, lambda: _digest(kind, bytes(raw)))
        else:
            self._own += size

    def _number(self, size: int) -> None:
        self._bytes += size
        self._own += size

    def _container(self, value: Any, children: Iterable[Any]) -> None:
        key = id(value)
        if key in self._open:
            self._unmeasured += 1
            return
        if (known := self._objects.get(key)) is not None:
            self._bytes += known[1]
            self._unmeasured += known[2]
            return
        size, unmeasured = self._bytes, self._unmeasured
        self._open.add(key)
        for child in children:
            self.add(child)
        self._open.discard(key)
        self._objects[key] = (value, self._bytes - size, self._unmeasured - unmeasured)

    # --- uniqueness ---------------------------------------------------------------------------------------------------

    def _view(self, device: Any, view: Comb) -> None:
        if view.sizes:
            self._combs.setdefault(device, []).append(view)
        else:
            self._spans.setdefault(device, []).append((view.start, view.end))

    def _hash(self, key: Any, holder: Any, size: int, digest: Any) -> None:
        if key in self._hashed:
            return
        self._hashed[key] = holder
        found = digest()
        if found not in self._digests:
            self._digests.add(found)
            self._own += size


def _number_size(value: Any) -> int | None:
    size = _NUMBERS.get(type(value))
    if size is not None:
        return size
    return next((n for kind, n in _NUMBERS.items() if isinstance(value, kind)), None)


def _children(value: Any) -> Iterable[Any] | None:
    if isinstance(value, NonTensorStack):
        return value.tolist()  # type: ignore[no-any-return]
    if isinstance(value, NonTensorData):
        return (value.data,)
    if isinstance(value, (Mapping, TensorDictBase)):
        return value.values()
    if isinstance(value, (list, tuple, AbstractSet)):
        return value
    return None


def _sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return None


def _tensor_digest(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
    return _digest(f"{tensor.dtype}{tuple(tensor.shape)}", plain.reshape(-1).view(torch.uint8).numpy())


def _array_digest(array: np.ndarray[Any, Any]) -> bytes:
    return _digest(f"{array.dtype.str}{array.shape}", np.ascontiguousarray(array).tobytes())


def _digest(kind: str, raw: Any) -> bytes:
    digest = hashlib.blake2b(kind.encode(), digest_size=16)
    digest.update(raw)
    return digest.digest()
