"""What one put has stored and nobody has announced yet, so that a put that fails leaves nothing behind (FC-22).

TransferQueue runs the client's put in a thread. When the caller is cancelled meanwhile, or the controller refuses the
announcement, the values are in the store under a generation that no clear will ever name.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from relax_tq_rdma.errors import TransferError
from relax_tq_rdma.staging.errors import StoreFault

logger = logging.getLogger(__name__)


class Claim:
    """Stands in for the client in one put of a manager, and remembers what was stored."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._given_up = False
        self._stored: tuple[list[str], list[Any]] | None = None

    def put(self, keys: list[str], values: list[Any]) -> list[Any]:
        metas: list[Any] = self._client.put(keys, values)
        with self._lock:
            if not self._given_up:
                self._stored = (keys, metas)
                return metas
        self._remove(keys, metas)
        raise StoreFault("given up while it was being stored", "put the batch again", keys)

    def give_up(self) -> None:
        """The put has failed or was cancelled: remove what it stored, now or as soon as it has. Does not raise."""
        with self._lock:
            self._given_up, stored, self._stored = True, self._stored, None
        if stored is not None:
            self._remove(*stored)

    def _remove(self, keys: list[str], metas: list[Any]) -> None:
        try:
            self._client.clear(keys, custom_backend_meta=metas)
        except TransferError as fault:
            logger.warning("part of a failed put may stay in the store: %s", fault)


_claim: ContextVar[Claim | None] = ContextVar("claim", default=None)


def current_claim() -> Claim | None:
    """The claim of the put that this task is in."""
    return _claim.get()


@contextmanager
def claiming(client: Any) -> Iterator[Claim]:
    """Inside the block this task's puts pass a :class:`Claim`."""
    claim = Claim(client)
    token = _claim.set(claim)
    try:
        yield claim
    finally:
        _claim.reset(token)
