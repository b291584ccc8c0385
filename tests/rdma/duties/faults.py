"""What is done to a member's memory and to its engine, and what is seen of both."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from tests.rdma.duties.state import STATE, manager

SABOTAGE = "RTQ_RDMA_SABOTAGE"
"""``tcp``: the engine of every process of the agent is set up with TCP while everything above it believes in RDMA. Then
no job may start, and the tests of the wire must fail."""

POISON = 0xA5


def count_registrations() -> None:
    """Count calls of ``register_buffer`` from now on, at the native store itself."""
    STATE["registrations"] = 0
    native = _native()

    def counted(pointer: int, size: int, inner: Callable[[int, int], int] = native.register_buffer) -> int:
        STATE["registrations"] += 1
        return inner(pointer, size)

    _replace("register_buffer", counted)


def registered() -> int:
    """Memory regions that the engine of this process was asked to register, counted at the native store."""
    return int(STATE["registrations"])


def fail_next(call: str, code: int, times: int) -> None:
    """Let the next calls of the native store report ``code`` for every value without doing anything."""
    native = _native()
    inner = getattr(native.behind if isinstance(native, _Before) else native, call)
    left = [times]
    STATE["calls"] = 0

    def failing(keys: Any, *more: Any, **named: Any) -> Any:
        STATE["calls"] += 1
        if left[0] > 0:
            left[0] -= 1
            return [code] * len(keys)
        return inner(keys, *more, **named)

    _replace(call, failing)


def calls() -> int:
    """Calls of the store since :func:`fail_next`."""
    return int(STATE["calls"])


def poison_spare_memory() -> int:
    """Overwrite every byte of the staging pool that nobody holds; returns how many."""
    pool = manager().storage_client._staging._pool
    leases = []
    while (lent := pool.lend(2**20)) is not None:
        lent.fill_(POISON)
        leases.append(lent)
    with pool.borrow(2**20, 5.0) as piece:
        piece.memory.fill_(POISON)
    return len(leases) * 2**20


def retired_spans() -> list[list[int]]:
    """First and last address of all memory of this process that is out of use for good."""
    client = manager().storage_client
    pool, regions = client._staging._pool, client._transfer.regions
    spans = [[lent.data_ptr(), lent.data_ptr() + lent.numel() - 1] for lent in pool._retired] if pool else []
    return spans + [[first, end - 1] for (first, end), region in regions._regions.items() if region.closed]


def kept_spans(keep: str) -> list[list[int]]:
    """First and last address of every tensor that an earlier get kept."""
    import torch

    rows = [row for column in STATE["kept"][keep].values() for row in column]
    tensors = [value for row in rows for value in (row.values() if isinstance(row, dict) else [row])]
    return [
        [one.data_ptr(), one.data_ptr() + one.nbytes - 1]
        for one in tensors
        if isinstance(one, torch.Tensor) and one.nbytes
    ]


def sabotage() -> None:
    """Obey :data:`SABOTAGE`, before any member is made."""
    if os.environ.get(SABOTAGE) != "tcp":
        return
    from relax_tq_rdma.seams import tq_bare

    def wrap(native: Any) -> Any:
        class OnTcp(native):  # type: ignore[misc]
            def setup(self, *arguments: Any) -> Any:
                first = ["tcp" if value == "rdma" else value for value in arguments[:5]]
                return super().setup(*first, "", *arguments[6:])

            def allocate_and_mount_segment(self, size: int, protocol: str, *more: Any) -> Any:
                return super().allocate_and_mount_segment(size, "tcp", *more)

        return OnTcp

    tq_bare.replace_mooncake_store(wrap)


def _native() -> Any:
    return manager().storage_client._store._native


def _replace(name: str, function: Callable[..., Any]) -> None:
    """Put a function before one of the native store's, for this process."""
    store = manager().storage_client._store
    if not isinstance(store._native, _Before):
        store._native = _Before(store._native)
    setattr(store._native, name, function)


class _Before:
    """The native store with some calls replaced."""

    def __init__(self, native: Any) -> None:
        self.behind = native

    def __getattr__(self, name: str) -> Any:
        return getattr(self.behind, name)
