"""Any sequence of put, get, drop, clear, fail and close, with a model of what must come back.

One machine for a fake and a real store: subclasses say how to make a client, how to make a transfer fail, and what must
be true of the store.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from relax_tq_rdma.payload import decode_row, plan_column
from relax_tq_rdma.staging.errors import StoreFault
from relax_tq_rdma.staging.rows import EncodedRow

STAGED = {"host_staging": True, "host_staging_mb": 16}
"""12 MiB can be lent, 4 are the reserve."""

SIZES = st.sampled_from([0, 1, 1000, 30_000, 262_144, 300_000, 1_200_000, 3_500_000])
"""Floats: nothing, packed closely, recycled, at the edge of lending, above the reserve, above the pool."""

KINDS = st.sampled_from(["row", "tensor", "object"])


def value_of(kind: str, size: int, mark: int) -> Any:
    tensor = torch.full((size,), float(mark))
    return tensor if kind == "tensor" else {"pixels": tensor, "mark": mark}


def same(got: Any, kind: str, size: int, mark: int) -> bool:
    if kind == "row":
        assert isinstance(got, EncodedRow)
        got = decode_row(got.memory)
    tensor = got if kind == "tensor" else got["pixels"]
    return bool(tensor.shape == (size,) and (tensor == mark).all()) and (kind == "tensor" or got["mark"] == mark)


class StagingMachine(RuleBasedStateMachine):
    puts = Bundle("puts")

    def __init__(self) -> None:
        super().__init__()
        self.client = self.make_client()
        self.mark = 0
        self.stored: dict[int, tuple[list[str], list[Any], list[tuple[str, int, int]]]] = {}
        self.held: list[tuple[list[Any], list[tuple[str, int, int]]]] = []
        self.closed = False

    def make_client(self) -> Any:
        raise NotImplementedError

    def fail_next(self) -> None:
        """Let the next transfer fail for good."""
        raise NotImplementedError

    def heal(self) -> None:
        """No transfer fails from here on."""
        raise NotImplementedError

    @precondition(lambda self: not self.closed)
    @rule(target=puts, values=st.lists(st.tuples(KINDS, SIZES), min_size=1, max_size=5))
    def put(self, values: list[tuple[str, int]]) -> int:
        self.mark += 1
        keys, metas = self._put(values)
        self.stored[self.mark] = (keys, metas, [(kind, size, self.mark) for kind, size in values])
        return self.mark

    def _put(self, values: list[tuple[str, int]]) -> tuple[list[str], list[Any]]:
        keys = [f"{i}@f{i % 2}" for i in range(len(values))]
        contents = [value_of(kind, size, self.mark) for kind, size in values]
        planned = plan_column([content for content, (kind, _) in zip(contents, values, strict=True) if kind == "row"])
        rows = iter(planned.planned())
        contents = [next(rows) if kind == "row" else c for c, (kind, _) in zip(contents, values, strict=True)]
        return keys, self.client.put(keys, contents)

    @precondition(lambda self: not self.closed)
    @rule(which=puts)
    def get(self, which: int) -> None:
        if which in self.stored:
            keys, metas, wanted = self.stored[which]
            self.held.append((self.client.get(keys, custom_backend_meta=metas), wanted))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data: Any) -> None:
        self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop_part(self, data: Any) -> None:
        """One value of a batch is kept, the others go."""
        at = data.draw(st.integers(0, len(self.held) - 1))
        got, wanted = self.held.pop(at)
        one = data.draw(st.integers(0, len(got) - 1))
        self.held.append(([got[one]], [wanted[one]]))

    @precondition(lambda self: not self.closed)
    @rule(which=puts)
    def clear(self, which: int) -> None:
        if which in self.stored:
            keys, metas, _ = self.stored.pop(which)
            self.client.clear(keys, custom_backend_meta=metas)

    @precondition(lambda self: not self.closed)
    @rule(which=puts)
    def get_what_fails(self, which: int) -> None:
        if which not in self.stored or not any(size for _, size, _ in self.stored[which][2]):
            return
        keys, metas, wanted = self.stored[which]
        self.fail_next()
        try:
            self.held.append((self.client.get(keys, custom_backend_meta=metas), wanted))
        except StoreFault:
            pass
        finally:
            self.heal()

    @precondition(lambda self: not self.closed)
    @rule(values=st.lists(st.tuples(KINDS, SIZES), min_size=1, max_size=5))
    def put_what_fails(self, values: list[tuple[str, int]]) -> None:
        self.mark += 1
        self.fail_next()
        try:
            keys, metas = self._put(values)
            self.client.clear(keys, custom_backend_meta=metas)
        except StoreFault:
            pass
        finally:
            self.heal()

    @rule()
    def close(self) -> None:
        self.close_client()
        self.closed = True

    def close_client(self) -> None:
        self.client.close()

    @invariant()
    def what_is_held_is_what_was_put(self) -> None:
        for got, wanted in self.held:
            assert all(same(value, *one) for value, one in zip(got, wanted, strict=True))

    @invariant()
    def counts_agree(self) -> None:
        counts = self.client.staging_counts()
        assert 0 <= counts.held <= counts.peak <= max(0, counts.capacity * 3 // 4)
        assert counts.retired == 0

    def teardown(self) -> None:
        self.held.clear()
        gc.collect()
        assert self.client.staging_counts().held == 0
        self.close_client()
        super().teardown()
