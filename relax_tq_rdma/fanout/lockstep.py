"""The ranks of a cohort act on one answer (RFC §4.5). Pure: the collective is given.

With per-rank fetch every rank asks TransferQueue itself. The sampler hands all ranks of a DP group the same rows, but
it does not remember "nothing yet": a rank may be told so just before the next one is given rows. Acting on that, one
part of the cohort would enter a collective that the other part never enters. So they compare what they were told, and
those that were told less ask again. Nobody waits here for rows to exist: "nothing yet", told to all, is an answer.
"""

from __future__ import annotations

import time
import zlib
from array import array
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

from relax_tq_rdma.errors import DataplaneError, TransferError

RETRY_SECONDS = 0.02
"""Rows that one rank was given are ready for all: the next question is answered."""

_FAILED, _NOTHING, _END, _DUMMY, _ROWS = -1, 0, 1, 2, 3
"""Answers by rank: who was told less asks again. End of the stream and dummy rounds: the host's newest line only."""

T = TypeVar("T")


class Cohort(Protocol):
    """All TP x PP x CP ranks of one DP rank, or those of one pipeline stage where stages go their own pace."""

    def minimum(self, values: Sequence[int]) -> list[int]:
        """Element-wise minimum over the ranks. Collective."""

    def gather(self, text: str) -> list[str]:
        """The text of every rank, on every rank. Collective."""


class Lockstep:
    """One rank's part. All its methods are collective over the cohort.

    ``limit_s`` bounds how long ranks may go on being told different things.
    """

    def __init__(
        self,
        cohort: Cohort,
        limit_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._cohort = cohort
        self._limit_s = limit_s
        self._clock = clock
        self._sleep = sleep

    def ask(self, question: Callable[[], Any], of_what: str) -> Any:
        """This rank's own answer (metadata of a batch) to ``question``, once every rank was told the same.

        Raises:
            TransferError: another rank failed, ranks were given different rows, or they were told different things
                for too long; on every rank.
            Exception: what ``question`` raised on this rank.
        """
        ends = self._clock() + self._limit_s
        answer, error = _attempt(question)
        while True:
            told = _FAILED if error else _told(answer)
            rows = _checksum(answer) if told == _ROWS else 0
            least, most, first, last, timely = self._compare(told, rows, self._clock() < ends)
            if least == _FAILED:
                raise self._failure(error, f"ask for {of_what}")
            if least == most:
                if first != last:
                    raise TransferError(
                        f"ranks of one cohort were given different rows of {of_what}: the job's sampler does not "
                        "repeat itself for a DP rank and batch index; use --tq-per-rank-fetch off"
                    )
                return answer
            if not timely:
                raise TransferError(
                    f"ranks of one cohort were told different things about {of_what} for {self._limit_s:g} s: "
                    "use --tq-per-rank-fetch off"
                )
            if told < most:
                self._sleep(RETRY_SECONDS)
                answer, error = _attempt(question)

    def take(self, get: Callable[[], T], of_what: str) -> T:
        """This rank's own rows, once every rank has its own.

        Raises:
            TransferError: another rank did not get them.
            Exception: what ``get`` raised on this rank.
        """
        data, error = _attempt(get)
        (complete,) = self._cohort.minimum([error is None])
        if complete:
            return cast(T, data)
        raise self._failure(error, f"get {of_what}")

    def _failure(self, error: Exception | None, what: str) -> Exception:
        """This rank's own, else one that tells what happened on another. Collective."""
        causes = self._cohort.gather("" if error is None else describe(error))
        return error or TransferError(f"another rank of this cohort failed to {what}: {next(filter(None, causes))}")

    def _compare(self, told: int, rows: int, timely: bool) -> tuple[int, int, int, int, bool]:
        """Least and most that a rank was told, least and greatest checksum, and whether no rank is out of time."""
        least, most, first, last, in_time = self._cohort.minimum([told, -told, rows, -rows, timely])
        return least, -most, first, -last, bool(in_time)


def describe(error: Exception) -> str:
    """One clause, not empty."""
    return str(error) if isinstance(error, DataplaneError) else f"{type(error).__name__}: {error}"


def _attempt(act: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return act(), None
    except Exception as exc:  # raised again when the cohort has heard of it
        return None, exc


def _told(meta: Any) -> int:
    if meta is None:
        return _NOTHING
    if meta.size:
        return _ROWS
    extra = getattr(meta, "extra_info", None) or {}
    if extra.get("dummy_round"):
        return _DUMMY
    return _END if extra.get("stream_end") else _NOTHING


def _checksum(meta: Any) -> int:
    """Of the rows' indexes in their order."""
    return zlib.crc32(array("q", meta.global_indexes).tobytes())
