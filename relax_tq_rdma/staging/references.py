"""Sources of deduplicated rows: read once in a process, kept for the other rows that refer to them (RFC §4.4, L3b).

A group is split over batches and ranks, so a referrer may come long after its source. A source is known by the put and
the ordinal that its referrers note, never by its index alone: indexes are reused (FC-47).
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from relax_tq_rdma.payload import Allocator, Row, StaleReferenceError, check_source, stale

SourceId = tuple[bytes, int]
"""Put id and ordinal in that put."""


@dataclass(frozen=True)
class _Kept:
    row: Row
    place: tuple[str, int]  # partition and global index


class SourceCache:
    """Sources in memory of their own, at most ``limit`` bytes; the least recently used one goes first. Thread-safe."""

    def __init__(self, limit: int, allocate: Allocator) -> None:
        self._limit, self._allocate = limit, allocate
        self._lock = threading.Lock()
        self._kept: OrderedDict[SourceId, _Kept] = OrderedDict()
        self.nbytes = 0
        """Bytes of the rows that are kept."""

    def get(self, source: SourceId) -> Row | None:
        with self._lock:
            kept = self._kept.get(source)
            if kept is None:
                return None
            self._kept.move_to_end(source)
            return kept.row

    def keep(self, source: SourceId, row: Row, partition: str, index: int) -> Row:
        """Keep a copy of a row, if it fits at all.

        Returns:
            The copy, whose memory no consumer has; ``row`` itself when it is larger than the cache.
        """
        if row.nbytes > self._limit:
            return row
        with self._lock:
            known = self._kept.get(source)
        if known is not None:
            return known.row
        copy = row.copied(self._allocate)
        with self._lock:
            known = self._kept.setdefault(source, _Kept(copy, (partition, index)))
            if known.row is copy:
                self.nbytes += copy.nbytes
                while self.nbytes > self._limit:
                    self._drop(next(iter(self._kept)))
        return known.row

    def clear(self, partitions: Iterable[str], indexes: Iterable[int]) -> None:
        """Forget the sources that were stored at these places: what is cleared must not be served any more."""
        places = set(zip(partitions, indexes, strict=True))
        with self._lock:
            for source in [source for source, kept in self._kept.items() if kept.place in places]:
                self._drop(source)

    def _drop(self, source: SourceId) -> None:
        self.nbytes -= self._kept.pop(source).row.nbytes


@dataclass(frozen=True)
class Wanted:
    """A source outside a batch: where it was, and one of the rows that refer to it (all positions, and the first row).

    ``partition`` is the referrers' own: a source is always in the same put.
    """

    source: SourceId
    index: int
    partition: str
    referrer: Row
    positions: list[int]


@dataclass(frozen=True)
class Served:
    """A wanted source; ``was_read``: from the store, just now, by whoever got this."""

    want: Wanted
    row: Row
    was_read: bool


Fetch = Callable[[Sequence[Wanted]], Awaitable[Sequence[Row | None]]]
"""Reads sources from the store; ``None``: what is there is no encoded row.

Raises:
    StaleReferenceError: nothing is stored there any more.
"""


class SourceReader:
    """Reads each source at most once, also when several gets want it at the same time; its own loop each may have."""

    def __init__(self, cache: SourceCache, patience: float = 90.0) -> None:
        """
        Args:
            cache: where sources are kept.
            patience: seconds to wait for a source that another get is reading, before reading it too.
        """
        self.cache = cache
        self._patience = patience
        self._reading: dict[SourceId, Future[Row]] = {}
        self._lock = threading.Lock()

    async def serve(self, wanted: Sequence[Wanted], fetch: Fetch) -> list[Served]:
        """Every wanted source: from the cache, from a get that is reading it already, or read now.

        Raises:
            StaleReferenceError: a source was cleared or overwritten while rows that refer to it were in use.
        """
        served: list[Served] = []
        mine: list[tuple[Wanted, Future[Row]]] = []
        others: list[tuple[Wanted, Future[Row]]] = []
        for want in wanted:
            kept = self.cache.get(want.source)
            if kept is not None:
                served.append(Served(want, kept, False))
                continue
            with self._lock:
                promise = self._reading.get(want.source)
                if promise is None:
                    promise = self._reading[want.source] = Future()
                    promise.set_running_or_notify_cancel()  # a waiter that is cancelled must not cancel it for others
                    mine.append((want, promise))
                else:
                    others.append((want, promise))
        if mine:
            served += await self._read(mine, fetch)
        for want, promise in others:
            try:
                row = await asyncio.wait_for(asyncio.wrap_future(promise), self._patience)
            except _GivenUp:  # by a get that failed or was cancelled: now it is this one's turn
                served += await self.serve([want], fetch)
            except asyncio.TimeoutError:  # its loop may have ended in mid-read
                self._forget([(want, promise)])
                served += await self.serve([want], fetch)
            else:
                served.append(Served(want, row, False))
        for one in served:
            check_source(one.want.referrer, one.row)
        return served

    async def _read(self, mine: Sequence[tuple[Wanted, Future[Row]]], fetch: Fetch) -> list[Served]:
        """Read sources and tell everyone who waits for them.

        A failure is this get's own: the others read for themselves. (A promise that held the exception would also close
        a cycle through its traceback, and what was read would stay on loan until a garbage collection.)
        """
        served = []
        try:
            rows = await fetch([want for want, _ in mine])
            for (want, promise), row in zip(mine, rows, strict=True):
                check_source(want.referrer, row)
                assert row is not None  # check_source saw to that
                kept = await asyncio.to_thread(self.cache.keep, want.source, row, want.partition, want.index)
                promise.set_result(kept)
                served.append(Served(want, kept, True))
        finally:
            self._forget(mine)
            for _, promise in mine:
                if not promise.done():
                    promise.set_exception(_GivenUp())
        return served

    def _forget(self, promises: Sequence[tuple[Wanted, Future[Row]]]) -> None:
        with self._lock:
            for want, promise in promises:
                if self._reading.get(want.source) is promise:
                    del self._reading[want.source]


class _GivenUp(Exception):
    """The get that was to read a source failed or was cancelled."""


def wanted_sources(
    rows: Sequence[Row | None], fetch: Mapping[int, Sequence[int]], partitions: Sequence[str]
) -> list[Wanted]:
    """What has to be read, by the row that is meant and not by its index alone: that may be another put's by now.

    Args:
        rows: of a batch.
        fetch: global index of a source -> positions of the rows that refer to it.
        partitions: of the rows.
    """
    found: dict[SourceId, Wanted] = {}
    for index, positions in fetch.items():
        for position in positions:
            row = rows[position]
            assert row is not None
            assert row.reference is not None  # plan_resolution saw to both
            source = (row.reference.put, row.reference.ord)
            want = found.setdefault(source, Wanted(source, index, partitions[position], row, []))
            want.positions.append(position)
    return list(found.values())


def vanished(want: Wanted) -> StaleReferenceError:
    """The error for a source that is not there."""
    return stale(want.referrer, "nothing encoded is")
