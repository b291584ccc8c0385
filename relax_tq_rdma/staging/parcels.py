"""Values on their way into the store: how many bytes each has there, and how they are written (design §6, RFC F2)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from transfer_queue.utils import serial_utils

from relax_tq_rdma.accounting import Path
from relax_tq_rdma.payload import PlannedRow
from relax_tq_rdma.payload.format import aligned
from relax_tq_rdma.staging.values import Meta, Value, tensor_meta


@dataclass(frozen=True, eq=False)
class Parcel:
    """A value to be stored. ``content`` is a tensor, a planned row, or TransferQueue's frames of anything else."""

    one: Value
    nbytes: int
    meta: Meta
    content: Any

    @property
    def path(self) -> Path:
        return "slow" if isinstance(self.content, list) else "fast"

    def write(self, memory: torch.Tensor) -> None:
        """Write a tensor or frames into 1-D uint8 memory of exactly ``nbytes``."""
        if isinstance(self.content, list):
            serial_utils.pack_into(memory.numpy().data, self.content)
        elif self.nbytes:
            with torch.no_grad():
                memory.view(self.content.dtype).view(self.content.shape).copy_(self.content)


def parcel(one: Value) -> Parcel:
    """
    Raises:
        StoreFault: the value is a tensor that has no plain bytes.
    """
    value = one.value
    if isinstance(value, PlannedRow):
        return Parcel(one, value.nbytes, {"encoded_size": value.nbytes}, value)
    if isinstance(value, torch.Tensor):
        dense = one.as_dense()
        return Parcel(one, dense.nbytes, tensor_meta(dense), dense)
    frames = serial_utils.encode(value)
    size = serial_utils.calc_packed_size(frames)
    return Parcel(one, size, {"packed_size": size}, frames)


def room_for(parcels: Iterable[Parcel]) -> int:
    """Bytes that :func:`write_all` needs."""
    return sum(aligned(one.nbytes) for one in parcels)


def write_all(parcels: Sequence[Parcel], memory: torch.Tensor) -> list[torch.Tensor]:
    """Write parcels one after the other, each at a multiple of 64.

    Args:
        memory: contiguous 1-D uint8 CPU tensor, its storage offset a multiple of 64.

    Returns:
        For each parcel its bytes, a view of ``memory``.
    """
    views: list[torch.Tensor] = []
    at = 0
    for kind, group in groupby(parcels, _owner):
        some = list(group)
        if kind:  # a column writes its rows end to end, which is at multiples of 64
            column = some[0].content.column
            views += column.write([one.content.ordinal for one in some], memory[at:])
            at += sum(one.nbytes for one in some)
            continue
        for one in some:
            views.append(memory[at : at + one.nbytes])
            one.write(views[-1])
            at += aligned(one.nbytes)
    return views


def _owner(one: Parcel) -> int:
    """Tells rows of one column from those of another; 0 for what is no row."""
    return id(one.content.column) if isinstance(one.content, PlannedRow) else 0
