"""One value of a put or a get: its names, and what a reader must know of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from relax_tq_rdma.staging.errors import StoreFault

Meta = dict[str, Any]
"""What a reader must know of one value; it travels in TransferQueue's ``custom_backend_meta``.

``generation``: of the put; then ``dtype`` and ``shape`` (a tensor), ``encoded_size`` in bytes (an encoded row) or
``packed_size`` in bytes (anything else); ``n_chunks`` for what TransferQueue's GDR path has cut.
"""


@dataclass(frozen=True, eq=False)
class Value:
    """``key`` is TransferQueue's (``index@field``), ``stored`` the store's; ``meta`` is empty when nothing is known."""

    position: int
    key: str
    stored: str
    meta: Meta
    value: Any = None

    @property
    def is_known(self) -> bool:
        """Whether it was put by a process with the plugin."""
        return "generation" in self.meta

    @property
    def is_packed(self) -> bool:
        return "packed_size" in self.meta

    @property
    def is_encoded(self) -> bool:
        return "encoded_size" in self.meta

    @property
    def field(self) -> str:
        return self.key.partition("@")[2]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a tensor; an encoded row and a packed value are bytes."""
        size = self.meta.get("encoded_size", self.meta.get("packed_size"))
        return tuple(self.meta["shape"]) if size is None else (int(size),)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def chunks(self) -> int:
        """Pieces a tensor was cut into; 0 when it is whole."""
        return int(self.meta.get("n_chunks", 0))

    @property
    def dtype(self) -> torch.dtype:
        if self.is_packed or self.is_encoded:
            return torch.uint8
        dtype = getattr(torch, str(self.meta.get("dtype")), None)
        if not isinstance(dtype, torch.dtype):
            raise StoreFault(
                f"stored with dtype {self.meta.get('dtype')!r}, which this torch does not know",
                "install the same torch on every node",
                [self.key],
            )
        return dtype

    def as_dense(self) -> torch.Tensor:
        """The tensor as plain numbers, wherever and with whatever strides they lie: no gradient, nothing lazy.

        Raises:
            StoreFault: it has no such bytes; the message names its kind.
        """
        tensor: torch.Tensor = self.value
        kinds = {
            "nested": tensor.is_nested,
            "sparse": tensor.layout is not torch.strided,
            "quantised": tensor.is_quantized,
            "meta": tensor.is_meta,
        }
        kind = next((name for name, found in kinds.items() if found), "")
        if kind:
            raise StoreFault(f"a {kind} tensor cannot be one row's value", "put it as a dense tensor", [self.key])
        return tensor.detach().resolve_conj().resolve_neg()


def tensor_meta(tensor: torch.Tensor) -> Meta:
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
