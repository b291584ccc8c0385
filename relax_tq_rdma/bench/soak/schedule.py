"""Which batch is put, read and cleared next. Pure: it is told what was done, and says what may be done.

A step is a partition, as in the host: several puts, read in batches that know nothing of the puts, cleared as a whole
when its last row was read. Several steps are open at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

AHEAD = 3
"""Steps that are open at the same time."""

RowId = tuple[int, int]
"""Put in its step, and row in that put."""


class Disorder(Exception):
    """A row arrived that was not expected; the text says which."""


@dataclass
class _Step:
    sizes: list[int]
    started: int = 0
    stored: int = 0
    ready: int = 0
    left: set[RowId] = field(default_factory=set)
    is_clearing: bool = False


class Schedule:
    """
    Args:
        sizes: rows of each put of a step.
        ahead: steps that may be open at the same time.
    """

    def __init__(self, sizes: Callable[[int], list[int]], ahead: int = AHEAD) -> None:
        self._sizes, self._ahead = sizes, ahead
        self._open: dict[int, _Step] = {}
        self._next = 0
        self._stopping = False
        self.cleared_steps = 0

    @property
    def is_done(self) -> bool:
        """Stopped, and every step that was begun has been read and cleared."""
        return self._stopping and not self._open

    @property
    def first_is_gone(self) -> bool:
        """The first step has been read and cleared."""
        return self._next > 0 and 0 not in self._open

    def stop(self) -> None:
        """Begin no further step."""
        self._stopping = True

    def put(self) -> tuple[int, int] | None:
        """Step and number of the next put, or ``None`` when none may begin now."""
        last = self._open.get(self._next - 1)
        if last is None or last.started == len(last.sizes):
            if self._stopping or len(self._open) >= self._ahead:
                return None
            sizes = self._sizes(self._next)
            every = {(part, row) for part, size in enumerate(sizes) for row in range(size)}
            last = self._open[self._next] = _Step(sizes, left=every)
            self._next += 1
        last.started += 1
        return self._next - 1, last.started - 1

    def stored(self, step: int, part: int) -> None:
        """A put has returned."""
        self._open[step].stored += 1
        self._open[step].ready += self._open[step].sizes[part]

    def get(self, most: int) -> tuple[int, int] | None:
        """Step and rows of a get, of the oldest step that has rows to give; ``None`` when there is none."""
        for number, step in self._open.items():
            if step.ready:
                rows = min(most, step.ready)
                step.ready -= rows
                return number, rows
        return None

    def arrived(self, step: int, rows: list[RowId]) -> None:
        """A get has returned these rows.

        Raises:
            Disorder: one of them was there before, or was never put.
        """
        left = self._open[step].left
        for row in rows:
            if row not in left:
                raise Disorder(f"row {row[1]} of put {row[0]} of step {step} arrived, but was not to come (any more)")
            left.remove(row)

    def clear(self) -> int | None:
        """A step that has been read and can be cleared."""
        for number, step in self._open.items():
            if not step.left and step.stored == len(step.sizes) and not step.is_clearing:
                step.is_clearing = True
                return number
        return None

    def cleared(self, step: int) -> None:
        """A step is gone."""
        del self._open[step]
        self.cleared_steps += 1
