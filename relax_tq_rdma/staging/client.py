"""The plugin's Mooncake client: TransferQueue's, with write-once keys, exact results and bounded waits.

A value is stored under ``{job}/{generation}/{key}``. The generation is new for each put and travels in TransferQueue's
``custom_backend_meta``, with what a reader must know of the value. So no key is ever written twice (FC-24), a late
removal cannot hit a newer value, and two jobs on one master cannot meet. How bytes move: ``staging.py``.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from transfer_queue.storage.clients import mooncake_client as upstream
from transfer_queue.utils.mooncake_utils import chunk_subkeys

from relax_tq_rdma import accounting, env
from relax_tq_rdma.accounting import Path
from relax_tq_rdma.errors import StartError, TransferError
from relax_tq_rdma.payload import PlannedRow
from relax_tq_rdma.payload.encode import ordinary_memory
from relax_tq_rdma.section import read_section
from relax_tq_rdma.staging.batches import Job, cut, run_all
from relax_tq_rdma.staging.connect import client_config, staging_bytes
from relax_tq_rdma.staging.counts import StagingCounts
from relax_tq_rdma.staging.devices import DeviceStaging
from relax_tq_rdma.staging.errors import MASTER_SILENT, Restated, StoreFault
from relax_tq_rdma.staging.gate import Gate, inside
from relax_tq_rdma.staging.parcels import Parcel, parcel, room_for, write_all
from relax_tq_rdma.staging.places import Place, unpack
from relax_tq_rdma.staging.regions import Regions
from relax_tq_rdma.staging.rows import EncodedRow
from relax_tq_rdma.staging.segment import Segment
from relax_tq_rdma.staging.staging import Staging
from relax_tq_rdma.staging.store import CheckedStore
from relax_tq_rdma.staging.transfer import Transfer, some_bytes
from relax_tq_rdma.staging.turns import Turns
from relax_tq_rdma.staging.values import Meta, Value

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0
"""How long a close waits for calls that are running; longer ones keep their segment until the master drops it."""

_FAST: Path = "fast"
_SLOW: Path = "slow"


class DataplaneMooncakeStoreClient(upstream.MooncakeStoreClient):  # type: ignore[misc]
    """``MooncakeStoreClient`` of a job that uses the plugin; without the plugin's section, upstream's own object.

    Methods raise :class:`~relax_tq_rdma.staging.errors.StoreFault`, a ``TransferError``.
    """

    def __new__(cls, config: Any) -> Any:
        if read_section(config)[0] is None:
            return upstream.MooncakeStoreClient(config)
        return super().__new__(cls)

    def __init__(self, config: Any) -> None:
        """
        Args:
            config: the backend's section of the TransferQueue config, with the plugin's section in it.

        Raises:
            StartError: Mooncake cannot be imported, its master cannot be reached, or set-up fails.
        """
        self._store: Any = None
        self._closing, self._gate = threading.Lock(), Gate()
        section = read_section(config)[0]
        assert section is not None  # __new__ saw to that
        self._job = section.job
        pool = staging_bytes(section.settings, str(config.get("protocol", "tcp")))
        config = client_config(config, section.master, staging=pool)
        try:
            super().__init__(config)
        except RuntimeError as exc:
            raise StartError(
                f"this process cannot join the Mooncake store of {section.master} ({exc}): run relax-tq-rdma doctor"
            ) from exc
        self._store = store = CheckedStore(self._store, section.master)
        gdr: Any = self._gdr_staging
        self._gdr_staging: Any = None if gdr is None else DeviceStaging(gdr.size)
        own = upstream.ReplicateConfig()
        own.with_hard_pin = True
        own.preferred_segment = store.hostname()
        self._transfer = Transfer(
            store=store,
            regions=Regions(store),
            segment=Segment(store, self.protocol, section.job, own, mounted=config["global_segment_size"]),
            replicas=self.replica_config,
            master=section.master,
            wait_limit=env.seconds(env.STORE_WAIT_SECONDS),
            turns=Turns(self.protocol),
            gate=self._gate,
        )
        self._staging = Staging(
            self._transfer,
            capacity=pool,
            wanted=section.settings.host_staging,
            budget=section.settings.batch_bytes_budget,
        )

    @inside
    def put(self, keys: list[str], values: list[Any]) -> list[Meta]:
        """Store values under a new generation.

        Args:
            keys: TransferQueue's, ``index@field``.
            values: for each a tensor, a :class:`~relax_tq_rdma.payload.PlannedRow`, or anything else that TransferQueue
                can pack.

        Returns:
            What readers need of each value, for ``custom_backend_meta``. A put that raises leaves nothing in the store,
            as far as the store still answers.
        """
        if len(keys) != len(values):
            raise ValueError(f"{len(keys)} keys for {len(values)} values")
        if len(set(keys)) != len(keys):
            twice = sorted({key for key in keys if keys.count(key) > 1})
            raise StoreFault("put twice in one batch", "give each row an index of its own", twice)
        generation: Meta = {"generation": secrets.token_hex(8)}
        every = self._named(keys, [generation] * len(keys), values)
        with _naming(every):
            with accounting.stage("encode"):
                parcels = [parcel(one) for one in every]
            by_gdr: list[Parcel] = []
            others: list[Parcel] = []
            for one in parcels:
                (by_gdr if self._puts_by_gdr(one) else others).append(one)
            metas = {one.one.position: dict(one.meta) for one in parcels}
            jobs: list[Job] = [partial(self._put_by_gdr, batch, metas) for batch in cut(by_gdr)]
            jobs += self._staging.put(others)
            try:
                run_all(jobs, self._staging.workers)
                self._transfer.segment.check()
            except BaseException as exc:
                if not (isinstance(exc, StoreFault) and exc.code in MASTER_SILENT):
                    self._discard(parcels)
                raise
        self._staging.report()
        return [{**generation, **metas[one.position]} for one in every]

    @inside
    def get(
        self,
        keys: list[str],
        shapes: Any = None,
        dtypes: Any = None,
        custom_backend_meta: list[Meta | None] | None = None,
    ) -> list[Any]:
        """Read values.

        Args:
            keys: TransferQueue's.
            shapes: not used, nor is ``dtypes``: they are the column's, and one odd put changes them for all rows. What
                was kept with each value is right for it, also in a column that mixes tensors with other things.
            dtypes: not used.
            custom_backend_meta: for each key what :meth:`put` returned.

        Returns:
            Tensors, :class:`~relax_tq_rdma.staging.rows.EncodedRow` for what was put as planned rows, and objects.
            Memory that the staging pool has lent goes back when the last view of it is gone.
        """
        every = self._named(keys, custom_backend_meta)
        unknown = [one.key for one in every if not one.is_known]
        if unknown:
            raise StoreFault(
                "never put, or put by a process in which the plugin is not active",
                "put every field that is asked for, in processes that load relax-tq-rdma",
                unknown,
            )
        by_gdr: list[Value] = []
        rows: list[Value] = []
        tensors: list[Value] = []
        packed: list[Value] = []
        results: dict[int, Any] = {}
        with _naming(every):
            for one in every:
                kind = by_gdr if self._reads_by_gdr(one) else rows if one.is_encoded else tensors
                (packed if one.is_packed else kind).append(one)
            jobs: list[Job] = [partial(self._get_by_gdr, batch, results) for batch in cut(by_gdr)]
            places: list[Place] = []
            for some, path in ((rows, _FAST), (tensors, _FAST), (packed, _SLOW)):
                found = self._staging.places(some)
                jobs += self._staging.get(found, path)
                places += found
            run_all(jobs, self._staging.workers)
        results.update(unpack(places))
        self._staging.report()
        return [results[one.position] for one in every]

    @inside
    def expect(self, keys: list[str], custom_backend_meta: list[Meta | None]) -> None:
        """See that the values in the store have the size that their metas say, where a reader made these up itself.

        :meth:`get` takes memory for what a meta says, and this one comes from a row that refers to another.
        """
        every = self._named(keys, custom_backend_meta)
        with _naming(every):
            self._transfer.expect([one.stored for one in every], [one.nbytes for one in every])

    @inside
    def clear(self, keys: list[str], custom_backend_meta: list[Meta | None] | None = None) -> None:
        """Remove values. What is gone already or was never put is fine; what stays although it should not, raises."""
        every = [one for one in self._named(keys, custom_backend_meta) if one.is_known]
        jobs = [partial(self._remove, some) for some in cut(every)]
        with _naming(every):
            run_all(jobs, self._staging.workers)

    def staging_counts(self) -> StagingCounts:
        """What the staging has done so far: rungs, registrations, memory, and advice on the pool's size."""
        return self._staging.counts()

    def wait_until_warm(self, seconds: float) -> bool:
        """Wait until all pages of the staging pool are there, which its first use begins to bring; false: not yet.

        Nothing depends on it but figures: a transfer into pages that are not there yet takes several times as long.
        """
        return self._staging.wait_until_warm(seconds)

    def close(self) -> None:
        """Unmount this process's segment and leave the store. Further calls do nothing.

        What other threads do at the moment ends first, within :data:`CLOSE_SECONDS`: a put that waits for room fails.
        What the staging pool has lent stays readable.
        """
        with self._closing:
            if self._store is None:
                return
            if not self._gate.shut(CLOSE_SECONDS):
                self._store.abandon()
            super().close()

    # --- TransferQueue's own path through its GPU staging buffer; it cuts what is larger than that ------------------

    def _puts_by_gdr(self, one: Parcel) -> bool:
        """An encoded row is never cut: who reads it by reference knows its size and not its pieces."""
        staging = self._gdr_staging
        fits = staging is not None and (one.nbytes <= staging.size or not isinstance(one.content, PlannedRow))
        return fits and one.path == "fast"

    def _put_by_gdr(self, batch: Sequence[Parcel], metas: dict[int, Meta]) -> None:
        rows = [one for one in batch if isinstance(one.one.value, PlannedRow)]
        with accounting.stage("encode"):
            views = iter(write_all(rows, ordinary_memory(room_for(rows))))
        values = [next(views) if isinstance(one.one.value, PlannedRow) else one.content for one in batch]
        with torch.cuda.device(self._gdr_staging.device):
            found = super().put([one.one.stored for one in batch], values)
        for one, meta in zip(batch, found, strict=True):
            metas[one.one.position].update(meta or {})

    def _get_by_gdr(self, batch: Sequence[Value], results: dict[int, Any]) -> None:
        shapes, dtypes = [one.shape for one in batch], [one.dtype for one in batch]
        with torch.cuda.device(self._gdr_staging.device):
            tensors = super().get([one.stored for one in batch], shapes, dtypes, [one.meta for one in batch])
        for one, tensor in zip(batch, tensors, strict=True):
            results[one.position] = EncodedRow(tensor) if one.is_encoded else tensor

    def _batch_upsert_with_retry(self, batch_keys: list[str], batch_ptrs: list[int], batch_sizes: list[int]) -> None:
        self._transfer.upsert(*some_bytes(batch_keys, batch_ptrs, batch_sizes), hold=self._gdr_staging)

    def _batch_get_into_with_retry(
        self, batch_keys: list[str], batch_buffer_ptrs: list[int], batch_nbytes: list[int]
    ) -> None:
        self._transfer.fetch(*some_bytes(batch_keys, batch_buffer_ptrs, batch_nbytes), hold=self._gdr_staging)

    def _reads_by_gdr(self, one: Value) -> bool:
        if one.is_packed:
            return False
        if self._gdr_staging is not None:
            return bool(one.chunks) or one.nbytes <= self._gdr_staging.size
        if one.chunks:
            raise StoreFault(
                "put in chunks by a GPU process with --tq-use-gdr, and this process has no GPU context to read it",
                "raise --tq-gdr-staging-mb above the largest tensor, or use --no-tq-use-gdr",
                [one.key],
            )
        return False

    # --- keys ---------------------------------------------------------------------------------------------------------

    def _named(
        self, keys: Sequence[str], metas: Sequence[Meta | None] | None, values: Sequence[Any] | None = None
    ) -> list[Value]:
        metas = metas if metas is not None else [None] * len(keys)
        values = values if values is not None else [None] * len(keys)
        return [
            Value(position, key, f"{self._job}/{(meta or {}).get('generation')}/{key}", meta or {}, value)
            for position, (key, meta, value) in enumerate(zip(keys, metas, values, strict=True))
        ]

    def _remove(self, values: Sequence[Value]) -> None:
        stored: list[str] = []
        for one in values:
            stored += [f"{one.stored}:c{chunk}" for chunk in range(one.chunks)] or [one.stored]
        self._transfer.remove(stored)

    def _discard(self, parcels: Sequence[Parcel]) -> None:
        """Take back what a failed put may have stored. One try: the failure itself is what the caller must see."""
        for batch in cut(parcels):
            stored: list[str] = []
            for one in batch:
                name = one.one.stored
                by_gdr = self._puts_by_gdr(one)
                stored += chunk_subkeys(name, one.nbytes, self._gdr_staging.size) if by_gdr else [name]
            try:
                self._store.batch_remove(stored)
            except TransferError as fault:
                logger.warning("part of a failed put may stay in the store: %s", fault)
                return


def _naming(values: Sequence[Value]) -> Restated[StoreFault]:
    """Faults inside the block name TransferQueue's keys."""

    def named(fault: StoreFault) -> StoreFault:
        names = {one.stored: one.key for one in values}
        return fault.about(names.get(stored, stored) for stored in fault.keys)

    return Restated(StoreFault, named)
