"""Work of one put or get in batches, a few at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from transfer_queue.storage.clients import mooncake_client as upstream

from relax_tq_rdma.payload.format import aligned

Job = Callable[[], None]


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


S = TypeVar("S", bound=_Sized)


def run_all(jobs: Sequence[Job], workers: int) -> None:
    """Raises the first failure, after everything that had begun has ended: memory is not let go of under a transfer."""
    with ThreadPoolExecutor(workers, thread_name_prefix="mooncake-store") as pool:
        futures = deque(pool.submit(job) for job in jobs)
        try:
            # A failure's traceback holds this frame. If it held the failed future too, that would be a cycle, and the
            # memory of the failed transfers would stay on loan until a garbage collection.
            while futures:
                futures.popleft().result()
        finally:
            while futures:
                futures.popleft().cancel()


def cut(items: Sequence[S], *, budget: int = 0, room: int = 0) -> list[Sequence[S]]:
    """Cut into batches, in order: of ``budget`` bytes, or of TransferQueue's number of keys when that is 0.

    Args:
        budget: ``--tq-batch-bytes-budget``.
        room: bytes of the memory that a batch shares, 0: any. An item that is larger is a batch by itself. Batches that
            the room alone limits are about equal, rather than full ones and a rest.
    """
    sizes = [aligned(item.nbytes) for item in items]
    if room and not budget:
        room = min(room, sum(sizes) // -(-sum(sizes) // room) + max(sizes)) if any(sizes) else room
    most_bytes = min((limit for limit in (budget, room) if limit), default=0)
    most_items = len(items) if budget else upstream.BATCH_SIZE_LIMIT
    batches: list[Sequence[S]] = []
    start = size = 0
    for at, need in enumerate(sizes):
        if at > start and (at - start == most_items or (most_bytes and size + need > most_bytes)):
            batches.append(items[start:at])
            start, size = at, 0
        size += need
    return [*batches, items[start:]] if items else []
