"""Parallel state with Megatron's function names, over gloo groups. Layout as in ``relax_tq_rdma.demo.mesh``."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from relax_tq_rdma.demo.mesh import Axis, Coords, Mesh

_AXES: dict[str, tuple[Axis, ...]] = {"tp": ("tp",), "cp": ("cp",), "dp": ("dp",), "pp": ("pp",), "tp_cp": ("tp", "cp")}
_mesh = Mesh()
_at = Coords(0, 0, 0, 0)
_groups: dict[str, Any] = {}


def initialize_model_parallel(mesh: Mesh, rank: int, timeout: timedelta) -> None:
    """Called by every rank at once, after ``init_process_group``."""
    global _mesh, _at
    _mesh, _at = mesh, mesh.coords(rank)
    for name, axes in _AXES.items():
        for members in mesh.groups(*axes):
            group = dist.new_group(members, timeout=timeout)
            if rank in members:
                _groups[name] = group


def destroy_model_parallel() -> None:
    _groups.clear()


def get_tensor_model_parallel_group() -> Any:
    return _groups["tp"]


def get_context_parallel_group() -> Any:
    return _groups["cp"]


def get_pipeline_model_parallel_group() -> Any:
    return _groups["pp"]


def get_data_parallel_group(with_context_parallel: bool = False) -> Any:
    return _groups["dp"]


def get_tensor_and_context_parallel_group() -> Any:
    return _groups["tp_cp"]


def get_tensor_model_parallel_rank() -> int:
    return _at.tp


def get_context_parallel_rank() -> int:
    return _at.cp


def get_pipeline_model_parallel_rank() -> int:
    return _at.pp


def get_data_parallel_rank(with_context_parallel: bool = False) -> int:
    return _at.dp * _mesh.cp + _at.cp if with_context_parallel else _at.dp


def get_tensor_model_parallel_world_size() -> int:
    return _mesh.tp


def get_context_parallel_world_size() -> int:
    return _mesh.cp


def get_pipeline_model_parallel_world_size() -> int:
    return _mesh.pp


def get_data_parallel_world_size(with_context_parallel: bool = False) -> int:
    return _mesh.dp * _mesh.cp if with_context_parallel else _mesh.dp


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    return None


def is_pipeline_last_stage(ignore_virtual: bool = False) -> bool:
    return _at.pp == _mesh.pp - 1
