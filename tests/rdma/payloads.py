"""Payloads that producer and consumer both can make, so that bytes are compared and never sent along."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict

from tests.payload_cases import FITS, bits, raw
from tests.rdma.jobs import MIB

FIELD = "multimodal_train_inputs"

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64)
_LENGTHS = (1, 700, 33, 256)  # uneven on purpose


def make(spec: dict[str, Any]) -> dict[str, list[Any]]:
    """Field to rows.

    ``matrix``: every row that the format holds (dtypes, shapes, strides, None, text, arrays, video). ``columns``: plain
    tensor columns of five dtypes, contiguous, transposed and of uneven length. ``tier``: ``rows`` rows of ``mib`` MiB
    together, from ``seed``.
    """
    kind = spec["kind"]
    if kind == "matrix":
        return {FIELD: [build() for name, build in FITS.items() if name not in ("long string", "bomb")]}
    if kind == "columns":
        fields: dict[str, list[Any]] = {}
        for dtype in _DTYPES:
            name = str(dtype).rpartition(".")[2]
            fields[name] = [bits(dtype, (8, 24), seed) for seed in range(4)]
            fields[f"{name}_strided"] = [bits(dtype, (24, 8), seed).t()[1::2] for seed in range(4)]
            fields[f"{name}_uneven"] = [bits(dtype, (length,), length) for length in _LENGTHS]
        return fields
    assert kind == "tier", kind
    number, seed = int(spec["rows"]), int(spec.get("seed", 0))
    each = int(spec["mib"]) * MIB // number
    rows = [
        {
            "pixel_values": bits(torch.bfloat16, (each // 2,), seed * 1000 + at),
            "image_grid_thw": torch.tensor([[1, 2, at]]),
        }
        for at in range(number)
    ]
    return {FIELD: rows}


def as_batch(fields: dict[str, list[Any]]) -> TensorDict:
    """As a rollout hands it over: tensors of one shape stacked, uneven ones jagged, everything else a stack of rows."""
    return TensorDict(
        {name: _column(rows) for name, rows in fields.items()}, batch_size=len(next(iter(fields.values())))
    )


def digest(value: Any) -> str:
    """Of kind, dtype, shape and bytes of everything in a value."""
    found = hashlib.blake2b(digest_size=16)
    _feed(found, value)
    return found.hexdigest()


def _column(rows: list[Any]) -> Any:
    if not all(isinstance(row, torch.Tensor) for row in rows):
        return NonTensorStack(*rows)
    if len({row.shape for row in rows}) == 1:
        return torch.stack(rows)
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def _feed(found: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        found.update(f"tensor {value.dtype} {tuple(value.shape)} ".encode() + raw(value))
    elif isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        found.update(
            f"{type(value).__name__} {array.dtype} {array.shape} ".encode() + np.ascontiguousarray(array).tobytes()
        )
    elif isinstance(value, dict):
        found.update(f"dict {len(value)} ".encode())
        for key, item in value.items():
            _feed(found, key)
            _feed(found, item)
    elif isinstance(value, (list, tuple)):
        found.update(f"{type(value).__name__} {len(value)} ".encode())
        for item in value:
            _feed(found, item)
    else:
        found.update(f"{type(value).__name__} {value!r} ".encode())
