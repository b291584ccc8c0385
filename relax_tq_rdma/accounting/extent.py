"""How many distinct bytes of memory a set of array views covers. Pure; exact also where strided views interleave."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

MASK_LIMIT = 1 << 30
"""Interleaved strided views over more memory than this are counted one by one instead of through a byte mask."""


class Comb(NamedTuple):
    """``run`` bytes at every ``start + sum(i_k * strides[k])`` with ``0 <= i_k < sizes[k]``.

    Strides ascend and exceed ``run``. Without dimensions it is the plain span ``[start, start + run)``.
    """

    start: int
    run: int
    sizes: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.run + sum((n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True))


def comb(address: int, itemsize: int, sizes: Iterable[int], strides: Iterable[int]) -> Comb:
    """The memory of a non-empty view. ``strides`` are bytes and may be zero (expanded) or negative (reversed)."""
    start, dims = address, []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1 or stride == 0:
            continue
        if stride < 0:
            start, stride = start + (size - 1) * stride, -stride
        dims.append((stride, size))
    dims.sort()
    run, used = itemsize, 0
    for stride, size in dims:
        if stride > run:
            break
        run += (size - 1) * stride  # touching or overlapping runs are one longer run
        used += 1
    outer = dims[used:]
    return Comb(start, run, tuple(size for _, size in outer), tuple(stride for stride, _ in outer))


def covered(spans: Iterable[tuple[int, int]], combs: Iterable[Comb] = ()) -> int:
    """Distinct bytes that plain spans ``[start, end)`` and strided views cover together."""
    merged = _merge(spans)
    views = set(combs)
    if not views:
        return sum(end - start for start, end in merged)
    views.update(Comb(start, end - start) for start, end in merged)
    return sum(_union(group) for group in _clusters(views))


def _merge(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    low = high = -1
    for start, end in sorted(spans):
        if start > high:
            if high > low:
                merged.append((low, high))
            low, high = start, end
        elif end > high:
            high = end
    if high > low:
        merged.append((low, high))
    return merged


def _clusters(views: Iterable[Comb]) -> Iterator[list[Comb]]:
    """Groups of views whose extents overlap."""
    group: list[Comb] = []
    end = 0
    for view in sorted(views):
        if group and view.start >= end:
            yield group
            group = []
        end = max(end, view.end) if group else view.end
        group.append(view)
    if group:
        yield group


def _union(group: list[Comb]) -> int:
    if not any(view.sizes for view in group):
        # The extents overlap, and each is covered in full.
        return max(view.end for view in group) - group[0].start
    if len(group) == 1 and _nests(group[0]):
        return _sum_of_runs(group[0])
    low, high = group[0].start, max(view.end for view in group)
    if high - low > MASK_LIMIT:
        return sum(_sum_of_runs(view) for view in group)
    return _mask(group, low, high)


def _nests(view: Comb) -> bool:
    """Whether no two runs of the view can meet: every stride steps over all that lies within."""
    extent = view.run
    for size, stride in zip(view.sizes, view.strides, strict=True):
        if stride < extent:
            return False
        extent += (size - 1) * stride
    return True


def _sum_of_runs(view: Comb) -> int:
    total = view.run
    for size in view.sizes:
        total *= size
    return total


def _mask(group: list[Comb], low: int, high: int) -> int:
    import numpy as np

    mask = np.zeros(high - low, dtype=np.bool_)
    for view in group:
        shape, strides = (*view.sizes, view.run), (*view.strides, 1)
        np.lib.stride_tricks.as_strided(mask[view.start - low :], shape, strides)[...] = True
    return int(mask.sum())
