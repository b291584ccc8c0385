"""What the host's fetch function gets instead of its TransferQueue client, for one fetch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from relax_tq_rdma import accounting
from relax_tq_rdma.fanout.lockstep import Lockstep


class FetchClient:
    """``get_meta`` and ``get_data`` of a client, with the cohort in step if there is one; all else is the client's own.

    Args:
        client: TransferQueue's client of this rank.
        lockstep: the cohort, where every rank fetches; ``None`` where one rank does.
        partition: id of the partition, for the accounting and for errors.
        has_rows: called when there are rows to get.
    """

    def __init__(self, client: Any, lockstep: Lockstep | None, partition: str, has_rows: Callable[[], None]) -> None:
        self._client = client
        self._lockstep = lockstep
        self._partition = partition
        self._has_rows = has_rows

    def get_meta(self, *args: Any, **named: Any) -> Any:
        """As the client's.

        Raises:
            TransferError: the ranks of the cohort cannot agree, see :class:`~relax_tq_rdma.fanout.lockstep.Lockstep`.
        """

        def ask() -> Any:
            with accounting.stage("get_meta", self._partition):
                return self._client.get_meta(*args, **named)

        meta = self._lockstep.ask(ask, f"partition {self._partition}") if self._lockstep else ask()
        if meta is not None and meta.size:
            self._has_rows()
        return meta

    def get_data(self, metadata: Any) -> Any:
        """As the client's.

        Raises:
            TransferError: another rank of the cohort did not get its rows.
        """
        if self._lockstep is None:
            return self._client.get_data(metadata)
        return self._lockstep.take(lambda: self._client.get_data(metadata), f"rows of partition {self._partition}")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)
