"""How encoded rows travel in each backend, and how one row is read by itself (design §6)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from transfer_queue.metadata import BatchMeta

from relax_tq_rdma.errors import TransferError
from relax_tq_rdma.payload import ColumnPlan, Row, open_pieces, open_row, stale
from relax_tq_rdma.staging.columns import rows_of
from relax_tq_rdma.staging.errors import GONE, StoreFault
from relax_tq_rdma.staging.payload_mixin import FIELD, PayloadMixin
from relax_tq_rdma.staging.references import Wanted, vanished
from relax_tq_rdma.staging.rows import EncodedRow

CARRIER_KEY = "RTQ1"
"""Of the dict in which SimpleStorage carries a row: a bare tensor would be packed again on the way out."""


class SimpleCarrier(PayloadMixin):
    """Rows in SimpleStorage: each a dict with a list of pieces, the large ones over the caller's own memory."""

    def _carry(self, plan: ColumnPlan) -> list[Any]:
        return [
            {CARRIER_KEY: plan.pieces(ordinal)} if plan.is_encoded(ordinal) else row
            for ordinal, row in enumerate(plan.rows)
        ]

    def _row_of(self, carrier: Any) -> Row | None:
        # Told by its shape, not by its bytes: a damaged row must be an error, never a raw row.
        if type(carrier) is not dict or list(carrier) != [CARRIER_KEY] or type(carrier[CARRIER_KEY]) is not list:
            return None
        return open_pieces(carrier[CARRIER_KEY])

    async def _fetch(self, wanted: Sequence[Wanted], metadata: Any) -> list[Any]:
        where = {want.index: want.partition for want in wanted}
        some = BatchMeta(list(where), list(where.values()), {FIELD: metadata.field_schema[FIELD]})
        try:
            data = await super(PayloadMixin, self).get_data(some)  # type: ignore[safe-super]
        except (KeyError, RuntimeError) as exc:
            if "not found" not in str(exc):
                raise
            if len(wanted) == 1:
                raise vanished(wanted[0]) from exc
            return [carrier for want in wanted for carrier in await self._fetch([want], metadata)]  # which one?
        carriers = dict(zip(where, rows_of(data, FIELD) or (), strict=True))
        return [carriers[want.index] for want in wanted]


class MooncakeCarrier(PayloadMixin):
    """Rows in Mooncake: plain objects that the plugin's client knows."""

    storage_client: Any

    def _carry(self, plan: ColumnPlan) -> list[Any]:
        return plan.planned()

    def _row_of(self, carrier: Any) -> Row | None:
        return open_row(carrier.memory) if isinstance(carrier, EncodedRow) else None

    async def _fetch(self, wanted: Sequence[Wanted], metadata: Any) -> list[Any]:
        keys, metas = [], []
        for want in wanted:
            reference = want.referrer.reference
            assert reference is not None
            # A source is of the same put as its referrer, so it has the same generation.
            meta = metadata._custom_backend_meta[want.positions[0]][FIELD]
            keys.append(f"{want.index}@{FIELD}")
            metas.append({"generation": meta["generation"], "encoded_size": reference.nbytes})
        try:
            # What a row says of another one may be damaged or forged: it must not cost memory.
            await asyncio.to_thread(self.storage_client.expect, keys, metas)
            values: list[Any] = await asyncio.to_thread(self.storage_client.get, keys, custom_backend_meta=metas)
        except StoreFault as fault:
            about = next((want for want, key in zip(wanted, keys, strict=True) if key in fault.keys), wanted[0])
            if fault.code in GONE:
                raise vanished(about) from fault
            if fault.code > 0:
                raise stale(about.referrer, f"a value of {fault.code} bytes is") from fault
            raise
        except (MemoryError, RuntimeError) as exc:
            raise TransferError(f"payload that rows refer to cannot be read: {exc}") from exc
        return values
