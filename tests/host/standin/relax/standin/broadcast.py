"""From the rank that fetched to its cohort: objects by pickle, the tensors of multimodal dicts one by one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu

from relax.utils.timer import timer


def hops(broadcast_pp: bool) -> list[tuple[Any, int, int]]:
    """Group, its first rank and its size for CP, TP and, where stages share a fetch, PP: in this order."""
    groups = [mpu.get_context_parallel_group(), mpu.get_tensor_model_parallel_group()]
    if broadcast_pp:
        groups.append(mpu.get_pipeline_model_parallel_group())
    return [(group, dist.get_process_group_ranks(group)[0], dist.get_world_size(group)) for group in groups]


def broadcast_objects(values: list[Any], broadcast_pp: bool) -> list[Any]:
    for (group, source, size), name in zip(hops(broadcast_pp), ("cp", "tp", "pp"), strict=False):
        if size > 1:
            with timer(f"tgd_bcast_{name}"):
                dist.broadcast_object_list(values, src=source, group=group)
    return values


def _encode_multimodal_inputs(mm_list: list[Any]) -> tuple[list[Any], list[torch.Tensor]]:
    """A description that mirrors the list, and its tensors in traversal order."""
    tensors: list[torch.Tensor] = []

    def describe(value: Any) -> dict[str, Any]:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return {"t": "tensor", "dtype": value.dtype, "shape": tuple(value.shape)}
        if isinstance(value, list) and value and all(isinstance(entry, torch.Tensor) for entry in value):
            return {"t": "list", "items": [describe(entry) for entry in value]}
        return {"t": "raw", "value": value}

    spec = [None if entry is None else {key: describe(value) for key, value in entry.items()} for entry in mm_list]
    return spec, tensors


def _broadcast_multimodal_inputs(
    spec: list[Any] | None, send_tensors: list[torch.Tensor], is_src: bool, cuda_dev: torch.device, broadcast_pp: bool
) -> list[Any] | None:
    if spec is None:
        return None
    source = iter(send_tensors)

    def receive(entry: dict[str, Any]) -> Any:
        if entry["t"] == "raw":
            return entry["value"]
        if entry["t"] == "list":
            return [receive(item) for item in entry["items"]]
        tensor = next(source) if is_src else None
        return _bcast_known_tensor(tensor, is_src, entry["dtype"], entry["shape"], cuda_dev, broadcast_pp)

    return [None if entry is None else {key: receive(value) for key, value in entry.items()} for entry in spec]


def _bcast_known_tensor(
    tensor: torch.Tensor | None,
    is_src: bool,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    cuda_dev: torch.device,
    broadcast_pp: bool,
) -> torch.Tensor:
    """CP, TP, then PP; where nobody else listens, the tensor itself comes back."""
    listened = [hop for hop in hops(broadcast_pp) if hop[2] > 1]
    if not listened and tensor is not None:
        return tensor
    moved = tensor.contiguous().clone() if tensor is not None else torch.empty(shape, dtype=dtype, device=cuda_dev)
    if moved.numel():
        for group, source, _ in listened:
            dist.broadcast(moved.reshape(-1).view(torch.uint8), src=source, group=group)
    return moved
