"""Names of element types in row headers. Part of the format: a name keeps its meaning for ever.

A type that is not here is refused by name when a row is written (FC-40); nothing is widened or reinterpreted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

# Whole-byte types whose elements are plain values. Left out: quantised types (their scale is not in the bytes),
# sub-byte and packed types, and the opaque bits types.
_TORCH_ONLY = (
    *("bfloat16", "complex32"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
_TORCH_NAMES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
    *_TORCH_ONLY,
)


class TorchKind(NamedTuple):
    """A torch element type, and numpy's name for the same where there is one."""

    dtype: torch.dtype
    itemsize: int
    numpy: np.dtype[Any] | None


def _kinds() -> dict[str, TorchKind]:
    kinds = {}
    for name in _TORCH_NAMES:
        dtype = getattr(torch, name, None)
        if dtype is not None:  # older versions lack some
            twin = None if name in _TORCH_ONLY else np.dtype(name)
            kinds[name] = TorchKind(dtype, dtype.itemsize, twin)
    return kinds


TORCH_KINDS: dict[str, TorchKind] = _kinds()
"""Name in a header -> element type."""

TORCH_NAMES: dict[torch.dtype, str] = {kind.dtype: name for name, kind in TORCH_KINDS.items()}

# numpy: numeric kinds of fixed meaning. Left out: longdouble (another format on another CPU), strings, dates, records,
# objects.
_NUMPY_CODES = ("b1", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16")

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    dtype.str: dtype for code in _NUMPY_CODES for order in "<>" if (dtype := np.dtype(order + code))
}
"""Array-interface code in a header -> dtype, both byte orders."""

NUMPY_NAMES: dict[np.dtype[Any], str] = {dtype: name for name, dtype in NUMPY_DTYPES.items()}

NUMPY_SCALARS: dict[type, str] = {np.dtype(code).type: np.dtype(code).str for code in _NUMPY_CODES}
"""Exact scalar class -> code. A twin class of the same code (``np.longlong``) would come back changed: not here."""
