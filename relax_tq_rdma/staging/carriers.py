"""How encoded rows travel in each backend, and how one row is read by itself (design §6)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from transfer_queue.metadata import BatchMeta

from relax_tq_rdma.payload import ColumnPlan, is_encoded
from relax_tq_rdma.staging.columns import rows_of
from relax_tq_rdma.staging.errors import GONE, StoreFault
from relax_tq_rdma.staging.payload_mixin import FIELD, PayloadMixin
from relax_tq_rdma.staging.references import Wanted, vanished
from relax_tq_rdma.staging.rows import EncodedRow

CARRIER_KEY = "RTQ1"
"""Of the dict in which SimpleStorage carries a row: a bare tensor would be packed again on the way out."""


class SimpleCarrier(PayloadMixin):
    """Rows in SimpleStorage: each in a dict with one tensor, all tensors views of one arena."""

    def _carry(self, plan: ColumnPlan) -> list[Any]:
        arena = self._memory.take(sum(map(plan.nbytes, plan.encoded)))
        out = list(plan.rows)
        for ordinal, row in zip(plan.encoded, plan.write(plan.encoded, arena), strict=True):
            out[ordinal] = {CARRIER_KEY: row}
        return out

    def _memory_of(self, carrier: Any) -> Any:
        if type(carrier) is not dict or list(carrier) != [CARRIER_KEY]:
            return None
        return carrier[CARRIER_KEY] if is_encoded(carrier[CARRIER_KEY]) else None

    async def _fetch(self, wanted: Sequence[Wanted], metadata: Any) -> list[Any]:
        where = {want.index: want.partition for want in wanted}
        some = BatchMeta(list(where), list(where.values()), {FIELD: metadata.field_schema[FIELD]})
        try:
            data = await super(PayloadMixin, self).get_data(some)  # type: ignore[safe-super]
        except (KeyError, RuntimeError) as exc:
            if "not found" not in str(exc):
                raise
            raise vanished(wanted[0]) from exc
        carriers = dict(zip(where, rows_of(data, FIELD) or (), strict=True))
        return [carriers[want.index] for want in wanted]


class MooncakeCarrier(PayloadMixin):
    """Rows in Mooncake: plain objects that the plugin's client knows."""

    storage_client: Any

    def _carry(self, plan: ColumnPlan) -> list[Any]:
        return plan.planned()

    def _memory_of(self, carrier: Any) -> Any:
        return carrier.memory if isinstance(carrier, EncodedRow) else None

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
            values: list[Any] = await asyncio.to_thread(self.storage_client.get, keys, custom_backend_meta=metas)
        except StoreFault as fault:
            if fault.code not in GONE:
                raise
            raise vanished(wanted[0]) from fault
        return values
