"""The cohort of this rank as process groups of ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

_TEXT_BYTES = 512


class GroupCohort:
    """Ranks that are reached by reducing over ``groups`` one after the other, as a grid by its rows and columns."""

    def __init__(self, groups: Sequence[Any]) -> None:
        self._groups = [group for group in groups if dist.get_world_size(group) > 1]

    def minimum(self, values: Sequence[int]) -> list[int]:
        """Element-wise minimum over the ranks. Collective."""
        if not self._groups:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.int64, device=self._device())
        for group in self._groups:
            dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=group)
        return [int(value) for value in tensor.tolist()]

    def gather(self, text: str) -> list[str]:
        """The text of every rank, on every rank; what is beyond 512 bytes is cut off. Collective."""
        texts = [text]
        for group in self._groups:
            mine = torch.stack([_as_tensor(one) for one in texts]).to(self._device())
            of_all = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
            dist.all_gather(of_all, mine, group=group)
            texts = [_as_text(row) for rows in of_all for row in rows.cpu()]
        return texts

    def _device(self) -> torch.device:
        """Where the tensors of a collective must be: gloo takes them in host memory, NCCL on this rank's GPU."""
        if all(dist.get_backend(group) == dist.Backend.GLOO for group in self._groups):
            return torch.device("cpu")
        return torch.accelerator.current_accelerator() or torch.device("cpu")


def _as_tensor(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")), dtype=torch.uint8)


def _as_text(row: torch.Tensor) -> str:
    return bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore")
