"""A fake Mooncake store that refuses what an RDMA engine refuses, where TCP would let it pass (unregistered memory,
overlapping regions, values of no bytes). Codes are the engine's, as measured on 0.3.13.

Its pool behaves as Mooncake's: it never grows, memory comes back when the last view dies, and it is filled with a
poison value then, so that whoever still looks at it sees that.

``plan`` is a list of functions, one for each batch put or get in turn; each gets that call's codes and returns what the
caller shall see: dropped, shortened or failed.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

POISON = 0xA5
Codes = list[int]


class StrictStore:
    """The part of ``MooncakeDistributedStore`` that the data plane uses.

    ``room``: bytes that a mounted segment holds; ``mounts``: sizes of the segments mounted so far.
    """

    def __init__(self, plan: Sequence[Callable[[Codes], Codes]] = (), *, setup_code: int = 0) -> None:
        self.plan = list(plan)
        self.setup_code = setup_code
        self.regions: dict[int, int] = {}
        self.data: dict[str, bytes] = {}
        self.mounts: list[int] = []
        self.calls: list[tuple[str, list[str]]] = []
        self.refused: list[str] = []
        self.registered = 0
        self.local = np.empty(0, np.uint8)
        self.pools: list[StrictPool] = []
        self.closed = 0
        self.setup_arguments: tuple[Any, ...] = ()
        self._lock = threading.RLock()

    # --- life ---------------------------------------------------------------------------------------------------------

    def setup(self, *arguments: Any) -> int:
        self.setup_arguments = arguments
        if arguments[2]:
            self.mounts.append(arguments[2])
        self.local = _aligned(arguments[3])
        return self.setup_code

    def allocate_and_mount_segment(self, size: int, protocol: str = "tcp", location: str = "") -> dict[str, Any]:
        assert location, "under RDMA no peer can reach a segment without a location"
        self.mounts.append(size)
        return {"ret": 0, "segment_ids": [f"segment-{len(self.mounts)}"], "allocated_size": size}

    def get_hostname(self) -> str:
        return "127.0.0.1:1"

    def close(self) -> int:
        self.closed += 1
        self.regions.clear()
        return 0

    # --- memory -------------------------------------------------------------------------------------------------------

    def register_buffer(self, pointer: int, size: int) -> int:
        with self._lock:
            if not pointer or size <= 0:
                return self._refuse(-600, "zero region")
            if any(pointer < first + length and first < pointer + size for first, length in self.regions.items()):
                return self._refuse(-600, "overlap")
            self.regions[pointer] = size
            self.registered += 1
            return 0

    def unregister_buffer(self, pointer: int) -> int:
        with self._lock:
            return 0 if self.regions.pop(pointer, None) else self._refuse(-600, "unknown region")

    # --- values -------------------------------------------------------------------------------------------------------

    def batch_upsert_from(
        self, keys: list[str], pointers: list[int], sizes: list[int], config: Any = None
    ) -> list[int]:
        def put(key: str, pointer: int, size: int) -> int:
            if not self._covered(pointer, size):
                return self._refuse(-800, "unregistered source")
            taken = sum(map(len, self.data.values())) - len(self.data.get(key, b""))
            if taken + size > sum(self.mounts):
                return -200
            self.data[key] = self._read(pointer, size)
            return 0

        return self._batch("put", keys, pointers, sizes, put)

    def batch_get_into(self, keys: list[str], pointers: list[int], sizes: list[int]) -> list[int]:
        def get(key: str, pointer: int, size: int) -> int:
            value = self.data.get(key)
            if value is None:
                return -704
            if len(value) > size:
                return -600
            if not self._covered(pointer, size):
                return self._refuse(-800, "unregistered target")
            self._write(pointer, value)
            return len(value)

        return self._batch("get", keys, pointers, sizes, get)

    def batch_remove(self, keys: list[str], force: bool = False) -> list[int]:
        with self._lock:
            self.calls.append(("remove", list(keys)))
            codes = [0 if self.data.pop(key, None) is not None else -704 for key in keys]
            return codes

    def get_size(self, key: str) -> int:
        return len(self.data[key]) if key in self.data else -704

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [int(key in self.data) for key in keys]

    def _batch(
        self, name: str, keys: list[str], pointers: list[int], sizes: list[int], one: Callable[[str, int, int], int]
    ) -> list[int]:
        with self._lock:
            self.calls.append((name, list(keys)))
            if not len(keys) == len(pointers) == len(sizes):
                return [self._refuse(-600, "lengths")] * len(keys)
            codes = [
                one(key, pointer, size) if size > 0 else self._refuse(-600, "zero value")
                for key, pointer, size in zip(keys, pointers, sizes, strict=True)
            ]
            return self.plan.pop(0)(codes) if self.plan and not _is_mark(keys) else codes

    def _read(self, pointer: int, size: int) -> bytes:
        return ctypes.string_at(pointer, size)

    def _write(self, pointer: int, value: bytes) -> None:
        ctypes.memmove(pointer, value, len(value))

    def _covered(self, pointer: int, size: int) -> bool:
        regions = [*self.regions.items(), (self.local.ctypes.data, self.local.nbytes)]
        return any(first <= pointer and pointer + size <= first + length for first, length in regions)

    def _refuse(self, code: int, why: str) -> int:
        self.refused.append(why)
        return code

    # --- looking from outside -----------------------------------------------------------------------------------------

    def stored(self) -> list[str]:
        """What is stored, without the marks that segments write."""
        return [key for key in self.data if not _is_mark([key])]

    def calls_of(self, name: str) -> list[list[str]]:
        return [keys for called, keys in self.calls if called == name and not _is_mark(keys)]


class StrictPool:
    """``mooncake.store.BufferPool`` over a store's local buffer, as measured on 0.3.13."""

    def __init__(self, store: StrictStore, *, max_bytes: int) -> None:
        assert max_bytes == 1, "0 would let it grow"
        self.store = store
        self._taken: list[tuple[int, int]] = []
        self._freed: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()
        store.pools.append(self)

    def acquire(self, size: int, block: bool = True) -> SimpleNamespace:
        assert block is False, "one that waits may wait for ever"
        with self._lock:
            self._settle()
            room, at = -(-size // 64) * 64, 0
            for first, end in self._taken:
                if first - at >= room:
                    break
                at = end
            if self.store.local.nbytes - at < room:
                raise RuntimeError("buffer pool is exhausted")
            self._taken = sorted([*self._taken, (at, at + room)])
        memory = (ctypes.c_ubyte * size).from_buffer(self.store.local.data[at : at + size])
        weakref.finalize(memory, self._free, at, at + room).atexit = False
        return SimpleNamespace(buffer=memoryview(memory).cast("B"))

    def leased(self) -> int:
        """Bytes that are on lease."""
        with self._lock:
            self._settle()
            return sum(end - first for first, end in self._taken)

    def _free(self, first: int, end: int) -> None:
        self.store.local[first:end] = POISON
        self._freed.append((first, end))

    def _settle(self) -> None:
        while self._freed:
            self._taken.remove(self._freed.popleft())


def use_strict_store(
    monkeypatch: pytest.MonkeyPatch, store: StrictStore, *, lazy: bool = True, pool: bool = True
) -> None:
    """Make TransferQueue's client find ``store`` where Mooncake would be.

    ``lazy``: a wheel that can mount after set-up; ``pool``: one that has a ``BufferPool``.
    """
    from transfer_queue.storage.clients import mooncake_client as upstream

    from relax_tq_rdma.staging import connect
    from relax_tq_rdma.staging import store as engine

    native = type("Native", (), {"__new__": lambda cls: store})
    if lazy:
        native.allocate_and_mount_segment = None  # type: ignore[attr-defined]
    monkeypatch.setattr(upstream, "MOONCAKE_STORE_IMPORTED", True)
    monkeypatch.setattr(upstream, "MooncakeDistributedStore", native, raising=False)
    monkeypatch.setattr(upstream, "ReplicateConfig", SimpleNamespace, raising=False)
    for module in (connect, engine):
        monkeypatch.setattr(module, "buffer_pool_type", lambda: StrictPool if pool else None)


def _aligned(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


def _is_mark(keys: list[str]) -> bool:
    return any("/segment/" in key for key in keys)
