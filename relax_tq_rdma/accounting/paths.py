"""Which path rows took below the accounting, and the assertion that the bytes that matter took the fast one.

A layer may carry plain rows as bytes, so their type no longer tells the path. It says so inside the manager's call, and
the accounting around that call listens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from relax_tq_rdma.accounting.records import FieldFlow, StepSummary
from relax_tq_rdma.errors import DataplaneError

FastRows = dict[str, frozenset[int]]
"""Field -> ordinals of the rows of a batch that took the fast path although they are no tensors."""

_listening: ContextVar[FastRows | None] = ContextVar("fast_rows", default=None)


class SlowPathError(DataplaneError):
    """The largest field of a step was serialised as objects."""


def took_fast_path(field: str, ordinals: Iterable[int]) -> None:
    """These rows of the batch in hand crossed as bytes: nothing was serialised, nothing copied twice."""
    heard = _listening.get()
    if heard is not None:
        heard[field] = frozenset(ordinals)


@contextmanager
def listening() -> Iterator[FastRows]:
    """Collects what :func:`took_fast_path` says inside the block (in the same task)."""
    heard: FastRows = {}
    token = _listening.set(heard)
    try:
        yield heard
    finally:
        _listening.reset(token)


def slow_path(summary: StepSummary) -> str | None:
    """What is wrong with the paths of a step: a sentence, or ``None`` when its largest field took the fast path."""
    sums: dict[str, int] = {}
    for flow in summary.fields:
        sums[flow.field] = sums.get(flow.field, 0) + flow.bytes
    if not sums:
        return None
    largest = max(sums, key=sums.__getitem__)
    slow = [flow for flow in summary.fields if flow.field == largest and flow.path == "slow" and flow.bytes]
    if not slow:
        return None
    return f"step {summary.step}: the largest field, {largest}, took the slow path: {_sums(slow)}"


def assert_fast_path(summary: StepSummary) -> None:
    """Assert that the largest field of a step took the tensor path, for tests and for the verbose mode (RFC F2).

    Raises:
        SlowPathError: it did not, or nothing moved in that step.
    """
    if not any(flow.bytes for flow in summary.fields):
        raise SlowPathError(f"step {summary.step}: nothing moved, so no path was taken")
    problem = slow_path(summary)
    if problem is not None:
        raise SlowPathError(problem)


def _sums(flows: Iterable[FieldFlow]) -> str:
    return ", ".join(f"{flow.bytes} bytes in {flow.rows} rows of {flow.direction}" for flow in flows)
