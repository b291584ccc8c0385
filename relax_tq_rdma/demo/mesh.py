"""Mesh maths: which ranks form a cohort and the groups inside it. Pure; the process groups are made in ``comm.py``.

Ranks are laid out as in Megatron: TP varies fastest, then CP, then DP, and PP slowest. A cohort is the TP x PP x CP
ranks of one DP rank: they all train on the same rows (RFC §4.5).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Literal

Axis = Literal["tp", "cp", "dp", "pp"]
_LAYOUT: tuple[Axis, ...] = ("tp", "cp", "dp", "pp")  # fastest first


@dataclass(frozen=True)
class Coords:
    """Where a rank sits, 0-based on each axis."""

    tp: int
    cp: int
    dp: int
    pp: int

    @property
    def is_fetcher(self) -> bool:
        """The one rank of a cohort that fetches when the payload is broadcast."""
        return self.tp == self.cp == self.pp == 0


@dataclass(frozen=True)
class Mesh:
    """Sizes of the four axes."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def cohort(self) -> int:
        return self.tp * self.cp * self.pp

    def coords(self, rank: int) -> Coords:
        """Raises ``ValueError`` for a rank outside the mesh."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is outside a mesh of {self.world}")
        at: dict[str, int] = {}
        for axis in _LAYOUT:
            rank, at[axis] = divmod(rank, getattr(self, axis))
        return Coords(**at)

    def rank(self, coords: Coords) -> int:
        rank = 0
        for axis in reversed(_LAYOUT):
            rank = rank * getattr(self, axis) + getattr(coords, axis)
        return rank

    def groups(self, *axes: Axis) -> list[list[int]]:
        """All groups of ranks that differ only on ``axes``; every rank is in exactly one, in ascending order.

        The order of the list is the same in every process, as ``torch.distributed.new_group`` demands.
        """
        fixed = [axis for axis in _LAYOUT if axis not in axes]
        groups: dict[tuple[int, ...], list[int]] = {
            at: [] for at in product(*(range(getattr(self, axis)) for axis in fixed))
        }
        for rank in range(self.world):
            coords = self.coords(rank)
            groups[tuple(getattr(coords, axis) for axis in fixed)].append(rank)
        return list(groups.values())
