"""L2 and L3b at a storage manager: the image column as encoded rows, each payload once (seam T2; design §6).

Put it left of the manager and right of the accounting, which counts what callers gave and got. How a row travels and
how one row is fetched by itself is the backend's business: ``carriers.py``.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from relax_tq_rdma import accounting, coverage, env
from relax_tq_rdma.coverage.process import whoami
from relax_tq_rdma.errors import TransferError
from relax_tq_rdma.payload import (
    ColumnPlan,
    NewerRowError,
    Row,
    RowFormatError,
    StaleReferenceError,
    plan_column,
    plan_resolution,
)
from relax_tq_rdma.settings import Settings
from relax_tq_rdma.staging.columns import rows_of, with_rows
from relax_tq_rdma.staging.devices import settle
from relax_tq_rdma.staging.errors import Restated
from relax_tq_rdma.staging.recycled import Recycled
from relax_tq_rdma.staging.references import SourceCache, SourceReader, Wanted, wanted_sources

if TYPE_CHECKING:

    class _Manager(Protocol):
        async def put_data(self, data: Any, metadata: Any, data_parser: Any = None) -> None: ...

        async def get_data(self, metadata: Any) -> Any: ...

        async def clear_data(self, metadata: Any) -> None: ...
else:
    _Manager = object

logger = logging.getLogger(__name__)

FIELD = "multimodal_train_inputs"
"""The one column that is nearly all the bytes (RFC F1). Its name and its non-tensor schema stay."""


class PayloadMixin(ABC, _Manager):
    """Encodes the column on put when the job normalises, decodes whatever is encoded on get, whoever put it.

    Raw and encoded rows may share a batch, a partition and a job: each row says itself what it is.
    """

    _settings: Settings

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._memory = Recycled(keep=env.mebibytes(env.RECYCLED_MB))
        self._sources = SourceReader(SourceCache(env.mebibytes(env.DEDUP_CACHE_MB), self._memory.take))
        self._checksum = env.switch(env.PAYLOAD_CHECKSUM)
        self._told: set[str] = set()

    async def put_data(self, data: Any, metadata: Any, data_parser: Any = None) -> None:
        devices = {column.device for column in data.values() if isinstance(column, torch.Tensor) and column.is_cuda}
        if devices:
            await asyncio.to_thread(settle, devices)
        rows = rows_of(data, FIELD) if self._settings.normalize_multimodal else None
        if rows is None or data_parser is not None:
            await super().put_data(data, metadata, data_parser)  # type: ignore[safe-super]
            if rows is not None:
                self._tell("a data_parser reads the rows in the storage", metadata, len(rows))
            return
        indexes = metadata.global_indexes if self._settings.dedup_multimodal else None
        if indexes is not None and len(set(indexes)) != len(indexes):
            twice = next(index for index, times in Counter(indexes).items() if times > 1)
            raise TransferError(
                f"row {twice} of partition {_step(metadata)} is put twice in one batch: put each row once"
            )
        plan, carriers = await asyncio.to_thread(self._encode, rows, indexes)
        for ordinal in sorted(plan.refused):
            with _naming_row(metadata, ordinal, "stored"):
                raise RowFormatError(f"{plan.reasons[ordinal]}: put it as a dense tensor")
        await super().put_data(with_rows(data, FIELD, carriers), metadata, data_parser)  # type: ignore[safe-super]
        for reason, count in Counter(plan.reasons.values()).items():
            self._tell(reason, metadata, count)
        accounting.took_fast_path(FIELD, plan.encoded)
        accounting.record_wire(
            FIELD,
            "put",
            wire_bytes=sum(map(plan.nbytes, plan.encoded)),
            saved_bytes=sum(plan.payload_bytes(n) for n in plan.encoded if plan.sources[n] != n),
            step=_step(metadata),
        )

    async def get_data(self, metadata: Any) -> Any:
        data = await super().get_data(metadata)  # type: ignore[safe-super]
        rows = rows_of(data, FIELD)
        opened = self._open(rows or (), metadata)
        fast = [position for position, row in enumerate(opened) if row is not None]
        if rows is None or not fast:
            return data
        try:
            sources, moved = await self._resolve(opened, metadata)
        except StaleReferenceError as exc:
            place = f"field {FIELD} of partition {_step(metadata)}"
            raise StaleReferenceError(f"{place}: {exc}; clear the rows of a put together") from exc
        values = await asyncio.to_thread(self._decode, rows, opened, sources, metadata)
        accounting.took_fast_path(FIELD, fast)
        accounting.record_wire(
            FIELD,
            "get",
            wire_bytes=sum(row.nbytes for row in (*opened, *moved) if row is not None),
            saved_bytes=sum(row.payload_bytes for row in sources.values()) - sum(row.payload_bytes for row in moved),
            step=_step(metadata),
        )
        return with_rows(data, FIELD, values)

    async def clear_data(self, metadata: Any) -> None:
        self._sources.cache.clear(metadata.partition_ids, metadata.global_indexes)
        await super().clear_data(metadata)  # type: ignore[safe-super]

    # --- put ----------------------------------------------------------------------------------------------------------

    def _encode(self, rows: list[Any], indexes: Sequence[int] | None) -> tuple[ColumnPlan, list[Any]]:
        with accounting.stage("encode"):
            plan = plan_column(rows, dedup_indexes=indexes, checksum=self._checksum)
            settle(plan.devices)
            return plan, self._carry(plan)

    def _tell(self, reason: str, metadata: Any, rows: int) -> None:
        """Rows stay as they are: counted every time, said once for each reason."""
        accounting.record_raw_rows(FIELD, rows, step=_step(metadata))
        coverage.count("rows put raw", rows)
        if reason not in self._told and len(self._told) < 100:
            self._told.add(reason)
            logger.warning(
                "%d rows of field %s in partition %s take the slow path, because %s (said once)",
                rows,
                FIELD,
                _step(metadata),
                reason,
            )

    # --- get ----------------------------------------------------------------------------------------------------------

    def _open(self, rows: Sequence[Any], metadata: Any) -> list[Row | None]:
        opened: list[Row | None] = []
        for position, row in enumerate(rows):
            with _naming_row(metadata, position):
                opened.append(self._row_of(row))
        return opened

    async def _resolve(self, rows: Sequence[Row | None], metadata: Any) -> tuple[dict[int, Row], list[Row]]:
        """The source of each reference, by the reference's position in the batch, and the sources read for it."""
        plan = plan_resolution(rows, metadata.global_indexes)
        found: dict[int, Row] = {}
        for position, source in plan.inside.items():
            row = rows[source]
            assert row is not None  # plan_resolution saw to that
            found[position] = row
        moved: list[Row] = []
        lasting = self._lasting(rows, plan.inside.values())
        if lasting or plan.fetch:
            with accounting.stage("resolve_refs"):
                await asyncio.to_thread(self._keep, rows, lasting, metadata)
                wanted = wanted_sources(rows, plan.fetch, metadata.partition_ids)
                for served in await self._sources.serve(wanted, partial(self._fetch_rows, metadata)):
                    moved += [served.row] if served.was_read else []
                    found.update(dict.fromkeys(served.want.positions, served.row))
        return found, moved

    def _lasting(self, rows: Sequence[Row | None], inside: Iterable[int]) -> list[int]:
        """Positions of the sources that rows outside this batch refer to: this process may read those next."""
        here = Counter(inside)
        return [at for at, row in enumerate(rows) if row is not None and row.header.refs > here[at]]

    def _keep(self, rows: Sequence[Row | None], positions: Sequence[int], metadata: Any) -> None:
        for at in positions:
            row = rows[at]
            assert row is not None
            with _naming_row(metadata, at):
                row.verify()
            source = (row.header.put, row.header.ord)
            self._sources.cache.keep(source, row, metadata.partition_ids[at], metadata.global_indexes[at])

    async def _fetch_rows(self, metadata: Any, wanted: Sequence[Wanted]) -> list[Row | None]:
        rows = []
        for want, carrier in zip(wanted, await self._fetch(wanted, metadata), strict=True):
            with _naming(want.partition, want.index):
                row = self._row_of(carrier)
                if row is not None:
                    row.verify()  # before it is kept, or every later reader would get the damaged one
                rows.append(row)
        return rows

    def _decode(
        self, rows: list[Any], opened: Sequence[Row | None], sources: Mapping[int, Row], metadata: Any
    ) -> list[Any]:
        """The rows' values. Copies of sources come first: nobody can have written to a source yet."""
        share = self._settings.dedup_share_view
        values = list(rows)
        with accounting.stage("decode"):
            for position, source in sources.items():
                with _naming_row(metadata, position):
                    values[position] = source.decode(copy=not share, allocate=self._memory.take)
            for position, row in enumerate(opened):
                if row is not None and position not in sources:
                    with _naming_row(metadata, position):
                        values[position] = row.decode()
        return values

    # --- the backend's business ---------------------------------------------------------------------------------------

    @abstractmethod
    def _carry(self, plan: ColumnPlan) -> list[Any]:
        """Per row what the backend shall store: an encoded row's carrier, or the raw row."""

    @abstractmethod
    def _row_of(self, carrier: Any) -> Row | None:
        """An encoded row as the backend gave it back; ``None`` for a raw one."""

    @abstractmethod
    async def _fetch(self, wanted: Sequence[Wanted], metadata: Any) -> list[Any]:
        """The carrier of each wanted source; ``metadata`` is of the batch that refers to them.

        Raises:
            StaleReferenceError: nothing is stored there any more.
        """


def _naming_row(metadata: Any, position: int, what: str = "decoded") -> Restated[RowFormatError]:
    return _naming(metadata.partition_ids[position], metadata.global_indexes[position], what)


def _naming(partition: str, index: int, what: str = "decoded") -> Restated[RowFormatError]:
    """Faults of a row's bytes inside the block say whose they are, and which process it is that is too old for one."""

    def named(fault: RowFormatError) -> TransferError:
        text = f"field {FIELD} of partition {partition}, row {index} cannot be {what}: {fault}"
        if isinstance(fault, NewerRowError):
            text = f"{text} ({whoami()})"
            coverage.note(text)
        return TransferError(text)

    return Restated(RowFormatError, named)


def _step(metadata: Any) -> str:
    return str(metadata.partition_ids[0]) if metadata.partition_ids else ""
