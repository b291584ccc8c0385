"""One value of a put or a get: its names, what a reader must know of it, and its bytes in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transfer_queue.utils.tensor_utils import allocate_empty_tensors

from relax_tq_rdma.staging.errors import StoreFault

Meta = dict[str, Any]
"""What a reader must know of one value; it travels in TransferQueue's ``custom_backend_meta``.

``generation``: of the put; then ``dtype`` and ``shape`` (a tensor) or ``packed_size`` in bytes (anything else), and
``n_chunks`` for a tensor that TransferQueue's GDR path has cut.
"""


@dataclass(frozen=True)
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
    def packed_size(self) -> int:
        return int(self.meta["packed_size"])

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.meta["shape"])

    @property
    def chunks(self) -> int:
        """Pieces a tensor was cut into; 0 when it is whole."""
        return int(self.meta.get("n_chunks", 0))

    @property
    def dtype(self) -> torch.dtype:
        dtype = getattr(torch, str(self.meta.get("dtype")), None)
        if not isinstance(dtype, torch.dtype):
            raise StoreFault(
                f"stored with dtype {self.meta.get('dtype')!r}, which this torch does not know",
                "install the same torch on every node",
                [self.key],
            )
        return dtype

    def as_memory(self) -> torch.Tensor:
        """The tensor's logical bytes as they lie in memory: contiguous, on the CPU, without gradient.

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
        return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def tensor_meta(tensor: torch.Tensor) -> Meta:
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def empty_tensors(values: Sequence[Value]) -> list[torch.Tensor]:
    """Memory for tensor values, as upstream lays it out: one block for each dtype."""
    tensors: list[torch.Tensor] = allocate_empty_tensors([v.dtype for v in values], [v.shape for v in values])[0]
    return tensors


def byte_buffers(sizes: Sequence[int]) -> list[torch.Tensor]:
    """Byte tensors side by side in one block."""
    buffers: list[torch.Tensor] = allocate_empty_tensors([torch.uint8] * len(sizes), [(size,) for size in sizes])[0]
    return buffers
