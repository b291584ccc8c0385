"""The process groups of one rank and the collectives the demo needs. gloo, CPU tensors."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from relax_tq_rdma.demo.mesh import Axis, Mesh

AXES: tuple[Axis, ...] = ("tp", "cp", "dp", "pp")


class Comm:
    """Groups of one rank: one per mesh axis and the whole cohort (TP x PP x CP).

    Constructed by every rank at the same time, after ``torch.distributed.init_process_group``. Collectives on a group
    of one do nothing.
    """

    def __init__(self, mesh: Mesh, rank: int, limit: timedelta) -> None:
        self.mesh = mesh
        self.rank = rank
        self.coords = mesh.coords(rank)
        self._members: dict[str, list[int]] = {}
        self._groups: dict[str, Any] = {}
        for name, axes in [*((axis, (axis,)) for axis in AXES), ("cohort", ("tp", "cp", "pp"))]:
            for members in mesh.groups(*axes):
                group = dist.new_group(members, timeout=limit) if len(members) > 1 else None
                if rank in members:
                    self._members[name], self._groups[name] = members, group

    def sum_(self, tensor: torch.Tensor, group: str) -> torch.Tensor:
        """All-reduce in place."""
        if self._groups[group] is not None:
            dist.all_reduce(tensor, group=self._groups[group])
        return tensor

    def minimum(self, values: list[int], group: str) -> list[int]:
        """Element-wise minimum over the group: how ranks agree."""
        tensor = torch.tensor(values)
        if self._groups[group] is not None:
            dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self._groups[group])
        return [int(v) for v in tensor]

    def broadcast_bytes(self, tensor: torch.Tensor, group: str) -> None:
        """Broadcast a contiguous tensor of any dtype, in place, from the group's first rank."""
        if self._groups[group] is not None and tensor.numel():
            raw = tensor.reshape(-1).view(torch.uint8)
            dist.broadcast(raw, src=self._members[group][0], group=self._groups[group])

    def broadcast_object(self, value: Any, group: str) -> Any:
        """Broadcast a picklable value from the group's first rank."""
        if self._groups[group] is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=self._members[group][0], group=self._groups[group])
        return box[0]

    def gather(self, value: Any, group: str) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        if self._groups[group] is None:
            return [value]
        values: list[Any] = [None] * len(self._members[group])
        dist.all_gather_object(values, value, group=self._groups[group])
        return values

    def send(self, tensor: torch.Tensor, stage: int) -> None:
        """Send to pipeline stage ``stage``."""
        dist.send(tensor.contiguous(), dst=self._members["pp"][stage])

    def receive(self, tensor: torch.Tensor, stage: int) -> torch.Tensor:
        """Fill ``tensor`` from pipeline stage ``stage``."""
        dist.recv(tensor, src=self._members["pp"][stage])
        return tensor

    def share_from_last_stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """Broadcast in place from the last pipeline stage to all stages."""
        if self._groups["pp"] is not None:
            dist.broadcast(tensor, src=self._members["pp"][-1], group=self._groups["pp"])
        return tensor

    def barrier(self) -> None:
        """Wait for every rank of the job."""
        if self.mesh.world > 1:
            dist.barrier()


class CohortComm:
    """The cohort of a :class:`Comm`, see :class:`relax_tq_rdma.fanout.lockstep.Cohort`."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def minimum(self, values: Sequence[int]) -> list[int]:
        return self._comm.minimum(list(values), "cohort")

    def gather(self, text: str) -> list[str]:
        return self._comm.gather(text, "cohort")
