"""Where the values of a get are read to: tensors of a column side by side, rows each by itself (design §7)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from transfer_queue.utils import serial_utils

from relax_tq_rdma import accounting
from relax_tq_rdma.payload.encode import ordinary_memory
from relax_tq_rdma.payload.format import aligned
from relax_tq_rdma.staging.rows import EncodedRow
from relax_tq_rdma.staging.values import Value


@dataclass(frozen=True, eq=False)
class Place:
    """``memory``: 1-D uint8, exactly the value's bytes; ``lent``: the pool's memory that it is (part of), if any."""

    one: Value
    memory: torch.Tensor
    lent: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.memory.numel()


Allocate = Callable[[int], tuple[torch.Tensor, bool]]
"""Bytes wanted -> a 1-D uint8 tensor of them, and whether the pool has lent it."""


def columns(values: Sequence[Value], allocate: Allocate) -> list[Place]:
    """Places of tensors: the rows of a field lie side by side in one block for each dtype, in the order of the keys.

    Upstream's own layout is like it, so a column can be offered as one jagged tensor without a copy.
    """
    places = []
    for _, group in groupby(values, lambda one: (one.field, one.dtype)):
        run = list(group)
        sizes = [one.nbytes for one in run]
        block, lent = allocate(sum(sizes))
        parts = torch.split_with_sizes(block, sizes)
        places += [Place(one, part, block if lent else None) for one, part in zip(run, parts, strict=True)]
    return places


def single(values: Sequence[Value], allocate: Allocate) -> list[Place]:
    """A place of its own for each value: one that is kept for long keeps nothing else."""
    places = []
    for one in values:
        memory, lent = allocate(one.nbytes)
        places.append(Place(one, memory, memory if lent else None))
    return places


def side_by_side(values: Sequence[Value]) -> list[Place]:
    """Places of bytes in one fresh block, so that it is one region to register; each with a storage of its own."""
    block = ordinary_memory(sum(aligned(one.nbytes) for one in values)).numpy()
    places, at = [], 0
    for one in values:
        places.append(Place(one, torch.from_numpy(block[at : at + one.nbytes])))
        at += aligned(one.nbytes)
    return places


def unpack(places: Sequence[Place]) -> dict[int, Any]:
    """Each value that was read, by its position. What was packed may keep its place, as views of it."""
    packed = [place for place in places if place.one.is_packed]
    with accounting.stage("decode"):
        decoded = serial_utils.batch_decode_from([place.memory for place in packed])
    values = dict(zip((place.one.position for place in packed), decoded, strict=True))
    for place in places:
        one = place.one
        if one.is_encoded:
            values[one.position] = EncodedRow(place.memory)
        elif not one.is_packed:
            values[one.position] = place.memory.view(one.dtype).view(one.shape)
    return values
