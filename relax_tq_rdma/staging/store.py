"""Mooncake's native store with every status, every result length and every duration checked.

The names and arguments are the binding's own, so that TransferQueue's client (its GDR path) can be handed this object
in place of the native one. A call here either returns a checked result or raises; it never lets a code pass unseen, and
it never takes longer than its limit.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from relax_tq_rdma import env
from relax_tq_rdma.staging.calls import Abandoned, bounded
from relax_tq_rdma.staging.errors import OK, RESTART, StoreFault, meaning
from relax_tq_rdma.transport.hazards import check_same_process
from relax_tq_rdma.transport.native import ANYWHERE

logger = logging.getLogger(__name__)

SLOWEST_BYTES_PER_SECOND = 16 * 1024 * 1024
"""A call that moves bytes may take this much longer than one that does not."""


def buffer_pool_type() -> Any:
    """Mooncake's ``BufferPool``; ``None`` with a wheel that has none (before 0.3.12)."""
    try:
        from mooncake.store import BufferPool
    except ImportError:
        return None
    return BufferPool


class CheckedStore:
    """One process's connection to a Mooncake store. Safe to use from several threads.

    Every method raises :class:`~relax_tq_rdma.staging.errors.StoreFault` when the engine reports what it must not, or
    when the call does not return within ``RTQ_STORE_CALL_SECONDS`` (plus a second for each 16 MiB it moves), and
    :class:`~relax_tq_rdma.errors.TransferError` in a forked child.
    """

    def __init__(self, native: Any, master: str) -> None:
        self._native = native
        self._master = master
        self._pid = os.getpid()
        self._abandoned = False
        self.limit = env.seconds(env.STORE_CALL_SECONDS)

    @property
    def mounts_later(self) -> bool:
        """Whether this wheel can mount a segment after set-up (0.3.12 can, 0.3.10 cannot)."""
        return hasattr(self._native, "allocate_and_mount_segment")

    def buffer_pool(self) -> Any:
        """A native pool over the local buffer and nothing else: with ``max_bytes=0`` it would grow (measured)."""
        return buffer_pool_type()(self._native, max_bytes=1)

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        code = self._call("register_buffer", self._native.register_buffer, buffer_ptr, size)
        if code != OK:
            raise StoreFault(
                f"{size} bytes of memory cannot be registered for transfer, {meaning(code)}",
                "under RDMA raise the locked-memory limit of this process (ulimit -l; LimitMEMLOCK for a service)",
            )
        return OK

    def unregister_buffer(self, buffer_ptr: int) -> int:
        """The engine's code: what a failure means depends on who owns the memory."""
        return self._code(self._call("unregister_buffer", self._native.unregister_buffer, buffer_ptr))

    def batch_upsert_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int], *, config: Any, hold: Any = None
    ) -> list[int]:
        """One code for each key. ``hold``: the memory, kept while the engine may read it."""
        put = self._native.batch_upsert_from
        arguments = (list(keys), list(buffer_ptrs), list(sizes))
        codes = self._call("batch_upsert_from", lambda: put(*arguments, config=config), moves=sum(sizes), hold=hold)
        return self._one_each("batch_upsert_from", keys, codes)

    def batch_get_into(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int], *, hold: Any = None
    ) -> list[int]:
        """For each key the bytes read, or a negative code. ``hold``: the memory, kept while the engine may write it."""
        get = self._native.batch_get_into
        arguments = (list(keys), list(buffer_ptrs), list(sizes))
        codes = self._call("batch_get_into", get, *arguments, moves=sum(sizes), hold=hold)
        return self._one_each("batch_get_into", keys, codes)

    def batch_remove(self, keys: Sequence[str], force: bool = True) -> list[int]:
        """One code for each key. ``force``: also what is being read; TransferQueue's own clear does the same."""
        codes = self._call("batch_remove", self._native.batch_remove, list(keys), force)
        return self._one_each("batch_remove", keys, codes)

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """For each key 1, 0 or a negative code."""
        return self._one_each(
            "batch_is_exist", keys, self._call("batch_is_exist", self._native.batch_is_exist, list(keys))
        )

    def sizes(self, keys: Sequence[str]) -> list[int]:
        """For each key the bytes of its value, or a negative code."""
        size = self._native.get_size
        return self._one_each("get_size", keys, self._call("get_size", lambda: [size(key) for key in keys]))

    def allocate_and_mount_segment(self, size: int, protocol: str) -> int:
        """Give the store ``size`` bytes of this process's memory; returns how many it took."""
        mount = self._native.allocate_and_mount_segment
        answer = self._call("allocate_and_mount_segment", mount, size, protocol, ANYWHERE)
        mounted = answer.get("allocated_size", 0) if answer.get("ret") == OK else 0
        if mounted <= 0:
            raise StoreFault(
                f"a segment of {size} bytes cannot be mounted, {meaning(answer.get('ret', -1))}",
                f"lower {env.SEGMENT_MB.name}, free memory, and under RDMA raise the locked-memory limit (ulimit -l)",
            )
        return int(mounted)

    def hostname(self) -> str:
        """The name this process's own segments go by."""
        return str(self._native.get_hostname())

    def abandon(self) -> None:
        """A call is still running: :meth:`close` must leave the native store alone."""
        self._abandoned = True

    def close(self) -> None:
        """Unmount, and free everything. Does nothing in a forked child.

        The native call holds the GIL: 2 s, up to 10 s with a dead master, up to 65 s with a frozen one (measured).
        """
        if os.getpid() != self._pid:
            return
        if self._abandoned:
            logger.warning("a store call has not returned; this process's segment is left to the master's time limit")
            return
        code = self._code(self._native.close())
        if code != OK:
            logger.warning("the store did not close cleanly: %s", meaning(code))

    def _call(self, name: str, call: Callable[..., Any], *arguments: Any, moves: int = 0, hold: Any = None) -> Any:
        check_same_process(self._pid, "the connection to the Mooncake store")
        limit = self.limit + moves / SLOWEST_BYTES_PER_SECOND
        try:
            return bounded(lambda: call(*arguments), limit, hold=hold)
        except Abandoned:
            self._abandoned = True
            raise StoreFault(
                f"{name} did not return within {limit:.0f} s: the Mooncake master at {self._master} or a process that "
                "holds data is frozen or unreachable",
                RESTART,
                settled=False,
            ) from None
        except (TypeError, AttributeError) as exc:
            self._unexpected(name, exc)

    def _unexpected(self, name: str, exc: Exception) -> NoReturn:
        raise StoreFault(
            f"this Mooncake wheel does not take {name} as expected ({exc})", "install a wheel from 0.3.10 to below 0.4"
        ) from exc

    def _one_each(self, name: str, keys: Sequence[str], codes: Any) -> list[int]:
        """Upstream checks the length of a first answer, not of a retry's (contract §13, item 6)."""
        codes = list(codes)
        if len(codes) != len(keys):
            raise StoreFault(
                f"{name} answered for {len(codes)} of {len(keys)} values, so some are unaccounted for",
                "report this with the Mooncake version; the data of this call is not used",
            )
        return [self._code(code) for code in codes]

    @staticmethod
    def _code(code: Any) -> int:
        # Older wheels return None from calls that cannot fail.
        return OK if code is None else int(code)
