"""What the store's codes mean, and the error that says which values a failed call was about.

Codes: Mooncake's ``mooncake-store/include/types.h``; what each one means in practice: FC-22, FC-24, FC-27, FC-28.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Generic, TypeVar

from relax_tq_rdma.errors import TransferError

OK = 0
NO_SPACE = -200
INVALID_PARAMS = -600
NOT_READY = -703
NOT_FOUND = -704
REPLICA_GONE = -712
TRANSFER_FAILED = -800
RPC_FAILED = -900
RPC_TIMEOUT = -901

GONE = frozenset({NOT_FOUND, REPLICA_GONE})
"""The master knows no copy: asking again cannot help."""

MASTER_SILENT = frozenset({RPC_FAILED, RPC_TIMEOUT})

REFUSED = frozenset({-10, -400, INVALID_PARAMS, -601, -602})
"""The request itself is wrong: asking again cannot help."""

RESTART = "find out what happened to it and restart the job; a running job never changes its backend"

_MEANINGS = {
    -1: "internal error",
    NO_SPACE: "no room",
    INVALID_PARAMS: "invalid parameters",
    NOT_READY: "not complete",
    NOT_FOUND: "not found",
    -705: "exists already",
    -706: "being read",
    -707: "lease ran out during the read",
    REPLICA_GONE: "copy is gone",
    TRANSFER_FAILED: "transfer failed",
    RPC_FAILED: "master does not answer",
    RPC_TIMEOUT: "master does not answer in time",
}


def meaning(code: int) -> str:
    """A code in words, with the number for the search engine: ``no room (-200)``."""
    return f"{_MEANINGS.get(code, 'store error')} ({code})"


class StoreFault(TransferError):
    """A store call failed for good.

    ``keys`` are those it is about; the client makes them TransferQueue's own (``index@field``), the manager adds the
    partition. ``code``: the engine's, ``OK`` when it gave none. ``settled``: the engine has surely let go of the memory
    that the call was given.
    """

    def __init__(
        self, cause: str, remedy: str, keys: Iterable[str] = (), *, code: int = OK, settled: bool = True
    ) -> None:
        self.cause, self.remedy, self.keys = cause, remedy, tuple(keys)
        self.code, self.settled = code, settled
        super().__init__(f"{where(self.keys)}{cause}: {remedy}")

    def about(self, keys: Iterable[str]) -> StoreFault:
        """The same fault, about these keys."""
        return StoreFault(self.cause, self.remedy, keys, code=self.code, settled=self.settled)

    def __reduce__(self) -> tuple[Any, ...]:
        # By default only the finished message would be kept, and Ray could not bring the error home.
        return type(self), (self.cause, self.remedy, self.keys), {"code": self.code, "settled": self.settled}


F = TypeVar("F", bound=BaseException)


class Restated(Generic[F]):
    """``with Restated(kind, restate)``: faults of that kind leave the block as what ``restate`` makes of them.

    Not a generator: from Python 3.12 on, the frame of one that raises keeps the frame that resumed it, and with it the
    fault, whose traceback has the generator's frame. The memory of a failed transfer stayed on loan in that cycle until
    a garbage collection.
    """

    def __init__(self, kind: type[F], restate: Callable[[F], BaseException]) -> None:
        """``restate`` may return the fault itself, which then passes."""
        self._kind, self._restate = kind, restate

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(fault, self._kind):
            told = self._restate(fault)
            if told is not fault:
                try:
                    raise told from fault
                finally:
                    del told  # its traceback holds this frame


def where(keys: Sequence[str]) -> str:
    """``field a (rows 3, 4), field b (row 3): `` from ``3@a``, ``4@a``, ``3@b``; empty without keys."""
    rows: dict[str, list[str]] = {}
    for key in keys:
        index, _, field = key.partition("@")
        rows.setdefault(field or "?", []).append(index)
    parts = [f"field {field} (row{'s' * (len(found) > 1)} {_some(found, 5)})" for field, found in rows.items()]
    return f"{_some(parts, 3)}: " if parts else ""


def _some(items: Sequence[str], most: int) -> str:
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more
