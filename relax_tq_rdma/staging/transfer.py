"""Moving one batch of values between memory and the store, until each has arrived or one is given up."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from relax_tq_rdma import accounting
from relax_tq_rdma.accounting import Direction, Path
from relax_tq_rdma.staging import retry
from relax_tq_rdma.staging.errors import GONE, NO_SPACE, OK, Restated, StoreFault, meaning
from relax_tq_rdma.staging.gate import Gate
from relax_tq_rdma.staging.regions import Regions
from relax_tq_rdma.staging.segment import LARGE_PUT_BYTES, Segment
from relax_tq_rdma.staging.store import CheckedStore
from relax_tq_rdma.staging.turns import Turns

logger = logging.getLogger(__name__)


class Buffer(Protocol):
    """Memory of a value; a contiguous CPU tensor is one."""

    @property
    def nbytes(self) -> int: ...

    def data_ptr(self) -> int: ...


def about(keys: Sequence[str]) -> Restated[StoreFault]:
    """A fault inside the block that names no keys is about these."""
    return Restated(StoreFault, lambda fault: fault if fault.keys else fault.about(keys))


@contextmanager
def retiring(retire: Callable[[], None]) -> Iterator[None]:
    """Memory of a transfer inside the block is retired, unless the transfer is surely over."""
    try:
        yield
    except BaseException as exc:
        if not (isinstance(exc, StoreFault) and exc.settled):
            retire()
        raise


def filled(keys: Sequence[str], buffers: Sequence[Buffer]) -> tuple[list[str], list[int], list[int]]:
    """Keys, addresses and sizes of the buffers that have any bytes."""
    return some_bytes(keys, [buffer.data_ptr() for buffer in buffers], [buffer.nbytes for buffer in buffers])


def some_bytes(
    keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int]
) -> tuple[list[str], list[int], list[int]]:
    """Those that have any bytes: the store takes no empty values (-600)."""
    kept = [one for one in zip(keys, pointers, sizes, strict=True) if one[2]]
    return [key for key, _, _ in kept], [pointer for _, pointer, _ in kept], [size for _, _, size in kept]


@dataclass(frozen=True)
class Transfer:
    """The store with what it takes to move batches. Safe to use from several threads.

    Keys are the store's, each only ever written once. Every method raises
    :class:`~relax_tq_rdma.staging.errors.StoreFault` with the keys that failed.
    """

    store: CheckedStore
    regions: Regions
    segment: Segment
    replicas: Any
    """The store's ``ReplicateConfig`` for values."""
    master: str
    wait_limit: float
    """Seconds a put waits for room, or for a dead process's segment to be dropped."""
    turns: Turns
    gate: Gate
    """Once it is shut, nothing more is tried."""

    def write(self, keys: Sequence[str], buffers: Sequence[Buffer], path: Path) -> None:
        """Store each buffer. May also raise :class:`~relax_tq_rdma.staging.regions.Overlap`: then write a copy.

        ``path`` is for the accounting: ``fast`` for tensors, ``slow`` for what had to be packed.
        """
        with about(keys), self._registered("put", path, buffers):
            self.upsert(*filled(keys, buffers), hold=buffers)

    def read(self, keys: Sequence[str], buffers: Sequence[Buffer], path: Path) -> None:
        """Fill each buffer with exactly as many bytes as it has."""
        with about(keys), self._registered("get", path, buffers):
            self.fetch(*filled(keys, buffers), hold=buffers)

    def upsert(self, keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int], hold: Any = None) -> None:
        """Store registered memory; ``hold`` is kept alive while the engine may read it."""
        if sum(sizes) >= LARGE_PUT_BYTES:
            self.segment.ensure()
        size_of = dict(zip(keys, sizes, strict=True))

        def put(keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int]) -> dict[str, int]:
            with self.turns.take():
                codes = self.store.batch_upsert_from(keys, pointers, sizes, config=self.replicas, hold=hold)
            return {key: code for key, code in zip(keys, codes, strict=True) if code != OK}

        def judge(failed: Mapping[str, int], tries: int, waited: float) -> float:
            full = [key for key, code in failed.items() if code == NO_SPACE]
            if full and self.segment.grow(sum(size_of[key] for key in full)):
                return 0.0  # nobody's segment had room, so this process has brought one
            too_large = [key for key in full if size_of[key] > self.segment.size]
            pause = retry.pause_before_put(set(failed.values()), tries, waited, self.wait_limit)
            if pause is None or too_large:
                self._give_up_put(failed, too_large, size_of, waited)
            return pause

        self._until_done("put", put, judge, keys, pointers, sizes)

    def fetch(self, keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int], hold: Any = None) -> None:
        """Read into registered memory; ``hold`` is kept alive while the engine may write it."""

        def get(keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int]) -> list[int]:
            with self.turns.take():
                return self.store.batch_get_into(keys, pointers, sizes, hold=hold)

        self._until_sizes_fit(get, keys, pointers, sizes)

    def expect(self, keys: Sequence[str], sizes: Sequence[int]) -> None:
        """See that values have exactly these sizes, before memory is taken for them."""
        with about(keys):
            self._until_sizes_fit(lambda keys, *_: self.store.sizes(keys), keys, [0] * len(keys), sizes)

    def _until_sizes_fit(
        self,
        ask: Callable[[Sequence[str], Sequence[int], Sequence[int]], list[int]],
        keys: Sequence[str],
        pointers: Sequence[int],
        sizes: Sequence[int],
    ) -> None:
        size_of = dict(zip(keys, sizes, strict=True))

        def attempt(keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int]) -> dict[str, int]:
            found = ask(keys, pointers, sizes)
            return {key: count for key, count in zip(keys, found, strict=True) if count != size_of[key]}

        def judge(failed: Mapping[str, int], tries: int, waited: float) -> float:
            pause = retry.pause_before_get(set(failed.values()), tries, waited)
            if pause is None:
                self._give_up_get(failed, size_of)
            return pause

        self._until_done("get", attempt, judge, keys, pointers, sizes)

    def remove(self, keys: Sequence[str]) -> None:
        """Remove values; what is not there is fine."""

        def drop(keys: Sequence[str], *_: Sequence[int]) -> dict[str, int]:
            codes = self.store.batch_remove(keys)
            return {key: code for key, code in zip(keys, codes, strict=True) if code != OK and code not in GONE}

        def judge(failed: Mapping[str, int], tries: int, waited: float) -> float:
            pause = retry.pause_before_get(set(failed.values()), tries, waited)
            if pause is None:
                code = next(iter(failed.values()))
                raise StoreFault(*retry.remove_problem(code, self.master), failed)
            return pause

        self._until_done(None, drop, judge, keys, [0] * len(keys), [0] * len(keys))

    @contextmanager
    def _registered(self, direction: Direction, path: Path, buffers: Sequence[Buffer]) -> Iterator[None]:
        pointers, sizes = [buffer.data_ptr() for buffer in buffers], [buffer.nbytes for buffer in buffers]
        started = time.perf_counter()
        with self.regions.hold(pointers, sizes, buffers) as held:
            if held.new:
                accounting.record_register(direction, path, time.perf_counter() - started, held.new)
            with retiring(held.retire):
                yield

    def _until_done(
        self,
        direction: Direction | None,
        attempt: Callable[[Sequence[str], Sequence[int], Sequence[int]], dict[str, int]],
        judge: Callable[[Mapping[str, int], int, float], float],
        keys: Sequence[str],
        pointers: Sequence[int],
        sizes: Sequence[int],
    ) -> None:
        """Repeat ``attempt`` with what failed, after the pause that ``judge`` gives; ``judge`` raises to give up."""
        left = list(zip(keys, pointers, sizes, strict=True))
        tries, began = 0, time.monotonic()
        while left:
            with about([one[0] for one in left]):
                self.gate.check()
                failed = attempt([one[0] for one in left], [one[1] for one in left], [one[2] for one in left])
            left = [one for one in left if one[0] in failed]
            if left:
                tries += 1
                pause = judge(failed, tries, time.monotonic() - began)
                if direction is not None and pause > 0:
                    accounting.record_retry(direction)
                logger.info("%d values failed with %s, trying again", len(failed), meaning(next(iter(failed.values()))))
                time.sleep(pause)

    def _give_up_put(
        self, failed: Mapping[str, int], too_large: Sequence[str], size_of: Mapping[str, int], waited: float
    ) -> NoReturn:
        codes = list(failed.values())
        code = NO_SPACE if too_large else max(codes, key=codes.count)
        keys = too_large or [key for key, found in failed.items() if found == code]
        need = max(size_of[key] for key in too_large) if too_large else sum(size_of[key] for key in keys)
        cause, remedy = retry.write_problem(code, need, waited, self.segment.size, self.master)
        raise StoreFault(cause, remedy, keys, code=code, settled=retry.is_settled(codes))

    def _give_up_get(self, failed: Mapping[str, int], size_of: Mapping[str, int]) -> NoReturn:
        # Of several codes the one that explains most: gone for good, then a wrong length, then the rest.
        key = min(failed, key=lambda key: (failed[key] not in GONE, failed[key] < 0))
        cause, remedy = retry.read_problem(failed[key], size_of[key], self.master)
        same = [other for other, code in failed.items() if code == failed[key]]
        raise StoreFault(cause, remedy, same, code=failed[key], settled=retry.is_settled(failed.values()))
