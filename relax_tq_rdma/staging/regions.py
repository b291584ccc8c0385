"""Memory registered with the engine, shared by the calls that use it.

The engine refuses to register memory twice, or two regions that overlap (-600, measured), and upstream ignores that:
under RDMA the second of two puts that share a tensor would fail, or lose its registration when the first one ends. Here
a region counts its users. Memory that the engine may still touch, or may still hold registered, is kept for the life of
the process and never used again (FC-33).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from relax_tq_rdma.staging.errors import OK, meaning

logger = logging.getLogger(__name__)

Span = tuple[int, int]
"""First address and the one past the last."""


class Overlap(Exception):
    """Part of the memory is in a region that cannot be shared: use a copy of it."""


class Engine(Protocol):
    """What is needed of a :class:`relax_tq_rdma.staging.store.CheckedStore`."""

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Raises when the memory could not be registered."""

    def unregister_buffer(self, buffer_ptr: int) -> int:
        """Returns the engine's code."""


@dataclass
class _Region:
    users: int
    memory: Any  # all of the region's, also when the user that brought it is gone before the others
    closed: bool = False  # no new users, never unregistered


class Held:
    """What one call holds registered; ``new`` of its regions it had to register itself."""

    def __init__(self, regions: Sequence[_Region]) -> None:
        self._regions = regions
        self.new = sum(region.users == 1 for region in regions)

    def retire(self) -> None:
        """A transfer failed, and nobody knows whether it has ended."""
        for region in self._regions:
            region.closed = True


class Regions:
    """Registered regions of one store. Safe to use from several threads."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._regions: dict[Span, _Region] = {}
        self.registered = 0
        """How many regions were registered so far."""

    @property
    def retired_bytes(self) -> int:
        """Bytes of regions that are kept for the life of the process."""
        with self._lock:
            return sum(end - first for (first, end), region in self._regions.items() if region.closed)

    @contextmanager
    def hold(self, pointers: Sequence[int], sizes: Sequence[int], memory: Any) -> Iterator[Held]:
        """Keep the given pieces registered inside the block.

        Args:
            pointers: address of each piece.
            sizes: bytes of each; a piece of none is skipped.
            memory: whatever owns those addresses.

        Raises:
            Overlap: a part belongs to a region that only partly covers it, or that is retired.
            StoreFault: the engine refused to register.
        """
        spans: list[Span] = []
        try:
            for span in join(pointers, sizes):
                spans.append(self._acquire(span, memory))
            yield Held([self._regions[span] for span in spans])
        finally:
            for span in spans:
                self._release(span)

    def _acquire(self, span: Span, memory: Any) -> Span:
        first, end = span
        with self._lock:
            for known, region in self._regions.items():
                if not region.closed and known[0] <= first and end <= known[1]:
                    region.users += 1
                    return known
                if first < known[1] and known[0] < end:
                    raise Overlap
            try:
                self._engine.register_buffer(first, end - first)
            except BaseException:
                # Of several NICs, the first may have it registered all the same.
                self._regions[span] = _Region(users=0, memory=memory, closed=True)
                raise
            self.registered += 1
            self._regions[span] = _Region(users=1, memory=memory)
            return span

    def _release(self, span: Span) -> None:
        with self._lock:
            region = self._regions[span]
            region.users -= 1
            if region.users or region.closed:
                return
            code = self._engine.unregister_buffer(span[0])
            if code == OK:
                del self._regions[span]
                return
            region.closed = True
            logger.warning("a buffer of %d bytes cannot be unregistered, %s: kept", span[1] - span[0], meaning(code))


def join(pointers: Sequence[int], sizes: Sequence[int]) -> list[Span]:
    """Touching and overlapping pieces as one span each, in address order."""
    joined: list[Span] = []
    for first, end in sorted((pointer, pointer + size) for pointer, size in zip(pointers, sizes, strict=True) if size):
        if joined and first <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((first, end))
    return joined
