"""This process's share of the store's memory, mounted when it first puts much (design §8).

Upstream mounts 4 GiB in every client process. Here only a process that puts payload mounts; a consumer never does, and
its small write-backs go to the segments of others.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from pathlib import Path
from typing import Any

from relax_tq_rdma import env
from relax_tq_rdma.staging.errors import OK, StoreFault, meaning
from relax_tq_rdma.staging.regions import Regions
from relax_tq_rdma.staging.store import CheckedStore
from relax_tq_rdma.transport.host_checks import available_memory
from relax_tq_rdma.transport.memory import MIB, shown
from relax_tq_rdma.transport.sysfs import Tree

logger = logging.getLogger(__name__)

LARGE_PUT_BYTES = 16 * MIB
"""A put from here on mounts a whole segment. Model outputs of one rank stay below, pictures do not."""

SMALL_BYTES = 64 * MIB
"""What a process mounts whose small put finds no room: the driver, or the first rank that writes back."""

MEMORY_SHARE = 0.8
"""Part of the memory that is available now that a segment may take."""


class Segment:
    """Mounts a small and a whole segment, each at most once and only when needed, and notices when they are dropped.

    A master that misses heartbeats for its ``client_ttl`` drops a client's segments with everything in them; the client
    then mounts them again, empty, without a word (measured; FC-28). A small object written right after the first mount
    tells: while it exists, the segments are the ones that were mounted.
    """

    def __init__(self, store: CheckedStore, protocol: str, prefix: str, config: Any, *, mounted: int = 0) -> None:
        """
        Args:
            store: the connection.
            protocol: ``tcp`` or ``rdma``.
            prefix: of all keys of this job.
            config: the store's ``ReplicateConfig`` for a value that must be in this process's own segment.
            mounted: bytes that set-up has mounted already, on wheels that cannot do it later.
        """
        self._store, self._protocol, self._config = store, protocol, config
        self._lock = threading.RLock()
        self._mark = f"{prefix}/segment/{os.getpid()}-{secrets.token_hex(8)}"
        self._is_whole = bool(mounted)
        self.size = 0
        """Bytes of the largest one; 0 before. A larger value cannot be stored here."""
        if mounted:
            self._note(mounted)

    def ensure(self) -> None:
        """Mount the whole segment now, if that has not happened.

        Raises:
            StoreFault: there is no memory for it, or the store refuses.
        """
        with self._lock:
            if not self._is_whole:
                self._note(self._store.allocate_and_mount_segment(planned_size(), self._protocol))
                self._is_whole = True

    def grow(self, need: int) -> bool:
        """A put of ``need`` bytes found no room: bring more, if there is anything left to mount.

        Returns:
            Whether there is more room now.

        Raises:
            StoreFault: as :meth:`ensure`.
        """
        with self._lock:
            if self._is_whole:
                return False
            if self.size or need > SMALL_BYTES // 2 or planned_size() <= SMALL_BYTES:
                self.ensure()
            else:
                self._note(self._store.allocate_and_mount_segment(SMALL_BYTES, self._protocol))
            return True

    def check(self) -> None:
        """Notice that the master has dropped what this process had mounted.

        Raises:
            StoreFault: it has.
        """
        # An error code means that the master is silent; the next call says that better.
        if self.size and self._store.batch_is_exist([self._mark])[0] == 0:
            raise StoreFault(
                "the master has dropped this process's segment (it missed its heartbeats for longer than the master's "
                "client_ttl, or another job emptied the store), so what this process has stored is lost",
                "restart the job; give mooncake_master a larger --client_ttl if the process was only busy",
            )

    def _note(self, size: int) -> None:
        if not self.size:
            self._write_mark()
        self.size = max(self.size, size)
        logger.info("mounted a segment of %s", shown(size))

    def _write_mark(self) -> None:
        import numpy as np

        mark = np.full(64, 1, dtype=np.uint8)
        place = ([mark.ctypes.data], [mark.nbytes])
        with Regions(self._store).hold(*place, mark):
            code = self._store.batch_upsert_from([self._mark], *place, config=self._config, hold=mark)[0]
        if code != OK:
            raise StoreFault(f"a segment just mounted takes no data, {meaning(code)}", "look at the master's log")


def planned_size() -> int:
    """Bytes of a whole segment: ``RTQ_SEGMENT_MB``, or less when this machine has less.

    Raises:
        StoreFault: there is not even room for one large put.
        UsageError: ``RTQ_SEGMENT_MB`` is no size.
    """
    wanted = env.mebibytes(env.SEGMENT_MB)
    available, _ = available_memory(Tree(Path("/")))
    room = int((available or 0) * MEMORY_SHARE) // MIB * MIB
    if available is None or wanted <= room:
        return wanted
    if room < LARGE_PUT_BYTES:
        raise StoreFault(
            f"a segment of {shown(wanted)} does not fit: this machine has {shown(room)} of memory to spare",
            f"lower {env.SEGMENT_MB.name} or free memory",
        )
    logger.warning("segment of %s instead of %s: no more memory is available", shown(room), shown(wanted))
    return room
