"""Distinct bytes of views, against counting every byte one by one."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_tq_rdma.accounting import extent
from relax_tq_rdma.accounting.extent import Comb, comb, covered

BASE = 1 << 40  # addresses are big numbers


def addressed(address: int, itemsize: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> set[int]:
    """Every byte of the view, the slow way."""
    starts = (
        address + sum(i * s for i, s in zip(index, strides, strict=True))
        for index in itertools.product(*(range(n) for n in sizes))
    )
    return {start + k for start in starts for k in range(itemsize)}


views = st.integers(0, 3).flatmap(
    lambda dims: st.tuples(
        st.integers(0, 60).map(lambda offset: BASE + offset),
        st.sampled_from([1, 2, 4, 8]),
        st.tuples(*[st.integers(1, 5)] * dims),
        st.tuples(*[st.integers(-12, 12)] * dims),
    )
)


@given(st.lists(views, max_size=5))
@settings(deadline=None, max_examples=400)
def test_covered_equals_the_set_of_addressed_bytes(found):
    expected = set().union(*(addressed(*view) for view in found)) if found else set()
    combs = [comb(*view) for view in found]
    spans = [(c.start, c.end) for c in combs if not c.sizes]
    assert covered(spans, [c for c in combs if c.sizes]) == len(expected)


@given(views)
@settings(deadline=None, max_examples=200)
def test_a_comb_spans_exactly_its_view(view):
    bytes_ = addressed(*view)
    found = comb(*view)
    assert (found.start, found.end) == (min(bytes_), max(bytes_) + 1)


@pytest.mark.parametrize(
    ("sizes", "strides", "expected"),
    [
        ((4, 8), (32, 4), Comb(0, 128)),  # contiguous
        ((8, 4), (4, 32), Comb(0, 128)),  # transposed: the same memory
        ((64, 4, 8), (0, 32, 4), Comb(0, 128)),  # expanded 64 times
        ((4,), (12,), Comb(0, 4, (4,), (12,))),  # every third
    ],
)
def test_a_comb_is_canonical(sizes, strides, expected):
    assert comb(0, 4, sizes, strides) == expected


def test_huge_interleaved_views_are_counted_one_by_one(monkeypatch):
    monkeypatch.setattr(extent, "MASK_LIMIT", 16)
    even, odd = comb(0, 1, (10,), (2,)), comb(1, 1, (10,), (2,))
    assert covered([], [even, odd]) == 20
