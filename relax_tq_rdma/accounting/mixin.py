"""Counts what passes a TransferQueue storage manager (seam T2). Put it left of the manager:
``class Counted(AccountingMixin, AsyncSimpleStorageManager)``.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

from relax_tq_rdma.accounting.ledger import Operation
from relax_tq_rdma.accounting.names import VERIFY_PREFIX, printable
from relax_tq_rdma.accounting.notes import reason, say_once
from relax_tq_rdma.accounting.paths import FastRows, listening
from relax_tq_rdma.accounting.process import Accounting, current
from relax_tq_rdma.accounting.records import Batch

if TYPE_CHECKING:

    class _Manager(Protocol):
        async def put_data(self, data: Any, metadata: Any, data_parser: Any = None) -> None: ...

        async def get_data(self, metadata: Any) -> Any: ...

        async def clear_data(self, metadata: Any) -> None: ...
else:
    _Manager = object


class AccountingMixin(_Manager):
    """Measures puts and gets around ``super()``; with accounting off each method is a plain call of ``super()``.

    A batch counts for the step (= partition) of its first row, as TransferQueue's own notification does. Bytes count
    only when the call returned. A ``data_parser`` runs in the storage, so what it fetches is not seen here.
    Measuring never raises: a batch that cannot be measured counts as an operation without bytes, and is warned of once.
    """

    async def put_data(self, data: Any, metadata: Any, data_parser: Any = None) -> None:
        accounting = _accounting_of(metadata)
        if accounting is None:
            return await super().put_data(data, metadata, data_parser)  # type: ignore[safe-super]
        operation = accounting.ledger.begin("put", _step(metadata))
        with listening() as fast:
            try:
                await super().put_data(data, metadata, data_parser)  # type: ignore[safe-super]
            except BaseException as exc:
                _failed(accounting, operation, exc)
                raise
        accounting.ledger.stop(operation)
        if accounting.content:
            batch = await asyncio.to_thread(_measured, data, fast, True)
        else:
            batch = _measured(data, fast)
        accounting.ledger.end(operation, "ok", batch)
        accounting.tick()

    async def get_data(self, metadata: Any) -> Any:
        accounting = _accounting_of(metadata)
        if accounting is None:
            return await super().get_data(metadata)  # type: ignore[safe-super]
        operation = accounting.ledger.begin("get", _step(metadata))
        with listening() as fast:
            try:
                data = await super().get_data(metadata)  # type: ignore[safe-super]
            except BaseException as exc:
                _failed(accounting, operation, exc)
                raise
        accounting.ledger.stop(operation)
        accounting.ledger.end(operation, "ok", _measured(data, fast))
        accounting.tick()
        return data

    async def clear_data(self, metadata: Any) -> None:
        await super().clear_data(metadata)  # type: ignore[safe-super]
        accounting = _accounting_of(metadata)
        if accounting is not None:
            accounting.ledger.cleared(_step(metadata))
            accounting.tick()


def _accounting_of(metadata: Any) -> Accounting | None:
    accounting = current()
    return None if accounting is not None and _step(metadata).startswith(VERIFY_PREFIX) else accounting


def _measured(data: Any, fast: FastRows, content: bool = False) -> Batch | None:
    try:
        from relax_tq_rdma.accounting.meter import measure_batch

        return measure_batch(data, content=content, fast=fast)
    except Exception as exc:
        say_once("measure", f"a batch was moved but not measured, its bytes are missing in the totals: {reason(exc)}")
        return None


def _step(metadata: Any) -> str:
    partitions = getattr(metadata, "partition_ids", None)
    return printable(str(partitions[0])) if partitions else ""


def _failed(accounting: Accounting, operation: Operation, error: BaseException) -> None:
    accounting.ledger.end(operation, "cancelled" if isinstance(error, asyncio.CancelledError) else "failed")
    accounting.tick()
