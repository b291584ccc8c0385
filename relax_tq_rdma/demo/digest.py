"""Payload digests: blake2b over canonical bytes, so that two runs can be compared bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch

from relax_tq_rdma.demo.rows import Row

_BYTES = 16


def row_digest(row: Row) -> bytes:
    """16 bytes over every field of a row: name, kind, dtype, shape, bytes. Dict order counts, column order does not."""
    state = hashlib.blake2b(digest_size=_BYTES)
    for name in sorted(row):
        _feed(state, name, row[name])
    return state.digest()


def combined(digests: Iterable[bytes]) -> str:
    """Hex digest over digests in the order given (rows in sample order, or steps)."""
    state = hashlib.blake2b(digest_size=_BYTES)
    for digest in digests:
        state.update(digest)
    return state.hexdigest()


def _feed(state: Any, name: str, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        state.update(f"{name}=tensor {value.dtype} {tuple(value.shape)}\n".encode())
        state.update(tensor_bytes(value))
    elif isinstance(value, dict):
        state.update(f"{name}=dict {len(value)}\n".encode())
        for key, entry in value.items():
            _feed(state, key, entry)
    elif isinstance(value, (list, tuple)):
        state.update(f"{name}=list {len(value)}\n".encode())
        for entry in value:
            _feed(state, "", entry)
    elif value is None or isinstance(value, (bool, int, float, str)):
        state.update(f"{name}={type(value).__name__} {value!r}\n".encode())
    else:
        raise TypeError(f"field {name} holds a {type(value).__name__}, which has no canonical bytes")


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The values of a CPU tensor in row-major order, without a copy when it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)
