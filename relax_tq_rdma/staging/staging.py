"""How the bytes of one client's puts and gets move, and through which memory (design §7, RFC §4.6).

With ``--tq-host-staging`` everything passes the pool, and a get takes the first rung that can be had:

- *lend*: read into memory of the pool that the caller then holds, for what is large;
- *copy*: read into memory borrowed for the transfer, then copied to ordinary memory that is used again;
- *call*: read into memory that is registered for this call, for what is larger than the pool can serve.

Puts know *copy* and *call*. Without the flag, or with a wheel that has no pool, all is *call*, as upstream does it.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from transfer_queue.storage.clients import mooncake_client as upstream

from relax_tq_rdma import accounting
from relax_tq_rdma.accounting import Direction, Path, StagingRung
from relax_tq_rdma.payload.encode import ordinary_memory
from relax_tq_rdma.payload.format import ALIGN, aligned
from relax_tq_rdma.staging import places as placing
from relax_tq_rdma.staging.batches import Job, cut
from relax_tq_rdma.staging.counts import StagingCounts, Tally
from relax_tq_rdma.staging.parcels import Parcel, room_for, write_all
from relax_tq_rdma.staging.places import Place
from relax_tq_rdma.staging.pool import Pool
from relax_tq_rdma.staging.recycled import Recycled
from relax_tq_rdma.staging.regions import Overlap
from relax_tq_rdma.staging.reserve import Borrowed
from relax_tq_rdma.staging.transfer import Transfer, about, filled, retiring
from relax_tq_rdma.staging.values import Value

LEND_BYTES = 1024 * 1024
"""From here on memory is worth lending: a small value that is kept for long must not hold a piece of the pool."""

WORKERS = 2
"""Batches at work at the same time: one is written or copied while the transfer of the other runs."""

WAIT_SECONDS = 5.0
"""How long a batch waits for memory that running transfers have."""


class Staging:
    """Moves values between callers and the store. Safe to use from several threads.

    Every method raises :class:`~relax_tq_rdma.staging.errors.StoreFault`.
    """

    def __init__(self, transfer: Transfer, *, capacity: int, wanted: bool, budget: int) -> None:
        """
        Args:
            transfer: the store.
            capacity: bytes of the local buffer that are the pool's; 0: no pool.
            wanted: ``--tq-host-staging``, also where there can be no pool.
            budget: ``--tq-batch-bytes-budget``.
        """
        self._transfer, self._capacity, self._wanted, self._budget = transfer, capacity, wanted, budget
        self._making = threading.Lock()
        self._made: Pool | None = None
        self._recycled = Recycled(keep=capacity)
        self._tally = Tally()
        self._most_wanted = 0

    @property
    def _pool(self) -> Pool | None:
        """Made at its first use: a process that moves nothing pays for no page of it."""
        with self._making:
            if self._made is None and self._capacity:
                self._made = Pool(self._transfer.store.buffer_pool(), self._capacity)
            return self._made

    @property
    def workers(self) -> int:
        """Jobs to run at the same time."""
        return int(upstream.MAX_BATCH_WORKER_THREADS) if self._made is None else WORKERS

    def counts(self) -> StagingCounts:
        pool, recycled, regions = self._made, self._recycled, self._transfer.regions
        return StagingCounts(
            rungs=self._tally.rungs(),
            capacity=pool.capacity if pool else 0,
            held=pool.held if pool else 0,
            peak=pool.peak if pool else 0,
            retired=pool.retired if pool else 0,
            misses=self._tally.misses,
            registrations=regions.registered,
            retired_regions=regions.retired_bytes,
            allocations=recycled.allocations,
            allocated=recycled.allocated_bytes,
            spare=recycled.free_bytes,
            wanted=self._most_wanted,
        )

    def wait_until_warm(self, seconds: float) -> bool:
        return self._made is None or self._made.warm.wait(seconds)

    def report(self) -> None:
        """Tell the accounting how the pool is; to be called after each put and get."""
        if self._wanted:
            now = self.counts()
            accounting.record_pool(
                accounting.PoolState(
                    capacity=now.capacity,
                    held=now.held,
                    peak=now.peak,
                    retired=now.retired + now.retired_regions,
                    advised_mb=now.advised_mb,
                )
            )

    # --- put ----------------------------------------------------------------------------------------------------------

    def put(self, parcels: Sequence[Parcel]) -> list[Job]:
        """The jobs that store the parcels, a batch each."""
        pool = self._pool
        jobs: list[Job] = []
        for path in ("fast", "slow"):
            some = [one for one in parcels if one.path == path]
            if pool is None:
                in_place = [one for one in some if isinstance(one.content, torch.Tensor)]
                jobs += [partial(self._put_in_place, batch) for batch in cut(in_place, budget=self._budget)]
                some = [one for one in some if not isinstance(one.content, torch.Tensor)]
            batches = cut(some, budget=self._budget, room=pool.piece if pool else 0)
            jobs += [partial(self._put, path, batch) for batch in batches]
        return jobs

    def _put_in_place(self, batch: Sequence[Parcel]) -> None:
        names = [one.one.stored for one in batch]
        memory = [one.content.cpu().contiguous() for one in batch]
        try:
            self._transfer.write(names, memory, "fast")
        except Overlap:
            self._transfer.write(names, [tensor.clone() for tensor in memory], "fast")
        self._count("put", "call", batch)

    def _put(self, path: Path, batch: Sequence[Parcel]) -> None:
        names = [one.one.stored for one in batch]
        with about(names), self._borrow(room_for(batch)) as piece:
            memory = piece.memory if piece else ordinary_memory(room_for(batch))
            with accounting.stage("encode"):
                views = write_all(batch, memory)
            if piece is None:
                self._transfer.write(names, views, path)
            else:
                with retiring(piece.retire):
                    self._transfer.upsert(*filled(names, views), hold=memory)
            self._count("put", "copy" if piece else "call", batch)

    # --- get ----------------------------------------------------------------------------------------------------------

    def places(self, values: Sequence[Value]) -> list[Place]:
        """Memory for the values, which are of one kind: tensors, encoded rows or packed."""
        started = time.perf_counter()
        pool = self._pool
        if values and not (values[0].is_packed or values[0].is_encoded):
            found = placing.columns(values, self._allocate)
        elif pool is not None:
            found = placing.single(values, self._allocate)
        else:
            found = [place for batch in cut(values, budget=self._budget) for place in placing.side_by_side(batch)]
        if values:
            accounting.record_alloc(time.perf_counter() - started)
        if pool is not None:
            self._most_wanted = max(self._most_wanted, pool.held + self._recycled.used_bytes)
        return found

    def _allocate(self, nbytes: int) -> tuple[torch.Tensor, bool]:
        pool = self._pool
        if pool is None:
            return ordinary_memory(nbytes), False
        lent = pool.lend(nbytes) if nbytes >= LEND_BYTES else None
        return (lent, True) if lent is not None else (self._recycled.take(nbytes), False)

    def get(self, places: Sequence[Place], path: Path) -> list[Job]:
        """The jobs that fill places, a batch each."""
        pool = self._pool
        lent = [place for place in places if place.lent is not None]
        others = [place for place in places if place.lent is None]
        jobs: list[Job] = [partial(self._get_lent, batch) for batch in cut(lent, budget=self._budget)]
        batches = cut(others, budget=self._budget, room=pool.piece if pool else 0)
        return jobs + [partial(self._get, path, batch) for batch in batches]

    def _get_lent(self, batch: Sequence[Place]) -> None:
        names = [place.one.stored for place in batch]
        with retiring(partial(self._retire, batch)):
            self._transfer.fetch(*filled(names, [place.memory for place in batch]), hold=batch)
        self._count("get", "lend", batch)

    def _retire(self, batch: Sequence[Place]) -> None:
        for place in batch:
            assert self._made is not None
            assert place.lent is not None
            self._made.retire(place.lent)

    def _get(self, path: Path, batch: Sequence[Place]) -> None:
        names, sizes = [place.one.stored for place in batch], [aligned(place.nbytes) for place in batch]
        with about(names), self._borrow(sum(sizes)) as piece:
            if piece is None:
                self._transfer.read(names, [place.memory for place in batch], path)
            else:
                rooms = torch.split_with_sizes(piece.memory[: sum(sizes)], sizes)
                read = [room[: place.nbytes] for room, place in zip(rooms, batch, strict=True)]
                with retiring(piece.retire):
                    self._transfer.fetch(*filled(names, read), hold=piece.memory)
                for place, source in zip(batch, read, strict=True):
                    ctypes.memmove(place.memory.data_ptr(), source.data_ptr(), place.nbytes)
            self._count("get", "copy" if piece else "call", batch)

    # --- both ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def _borrow(self, nbytes: int) -> Iterator[Borrowed | None]:
        pool = self._pool
        if pool is None:
            yield None
            return
        with pool.borrow(max(nbytes, ALIGN), WAIT_SECONDS) as piece:
            yield piece

    def _count(self, direction: Direction, rung: StagingRung, batch: Sequence[Parcel] | Sequence[Place]) -> None:
        nbytes = sum(one.nbytes for one in batch)
        self._tally.add(direction, rung, len(batch), nbytes, missed=self._wanted and rung == "call")
        if self._wanted:
            accounting.record_staged(direction, rung, len(batch), nbytes)
