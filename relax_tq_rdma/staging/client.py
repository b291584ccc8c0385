"""The plugin's Mooncake client: TransferQueue's, with write-once keys, exact results and bounded waits.

A value is stored under ``{job}/{generation}/{key}``. The generation is new for each put and travels in TransferQueue's
``custom_backend_meta``, with what a reader must know of the value. So no key is ever written twice (FC-24), a late
removal cannot hit a newer value, and two jobs on one master cannot meet.

How bytes move is as upstream: tensors from where they are, everything else packed by TransferQueue's serialiser, in
batches of the same size, registered for the call. All of that is in the ``_put_*`` and ``_get_*`` methods.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from transfer_queue.storage.clients import mooncake_client as upstream
from transfer_queue.utils import serial_utils
from transfer_queue.utils.mooncake_utils import chunk_subkeys

from relax_tq_rdma import accounting, env
from relax_tq_rdma.errors import StartError, TransferError
from relax_tq_rdma.section import read_section
from relax_tq_rdma.staging.connect import client_config
from relax_tq_rdma.staging.errors import MASTER_SILENT, StoreFault
from relax_tq_rdma.staging.regions import Overlap, Regions
from relax_tq_rdma.staging.segment import Segment
from relax_tq_rdma.staging.store import CheckedStore
from relax_tq_rdma.staging.transfer import Transfer
from relax_tq_rdma.staging.values import Meta, Value, byte_buffers, empty_tensors, tensor_meta

logger = logging.getLogger(__name__)


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
        self._closing = threading.Lock()
        section = read_section(config)[0]
        assert section is not None  # __new__ saw to that
        self._job = section.job
        config = client_config(config, section.master)
        try:
            super().__init__(config)
        except RuntimeError as exc:
            raise StartError(
                f"this process cannot join the Mooncake store of {section.master} ({exc}): run relax-tq-rdma doctor"
            ) from exc
        self._store = store = CheckedStore(self._store, section.master)
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
        )

    def put(self, keys: list[str], values: list[Any]) -> list[Meta]:
        """Store values under a new generation.

        Args:
            keys: TransferQueue's, ``index@field``.
            values: for each a tensor, or anything else that TransferQueue can pack.

        Returns:
            What readers need of each value, for ``custom_backend_meta``. A put that raises leaves nothing in the store,
            as far as the store still answers.
        """
        self._check_open()
        if len(keys) != len(values):
            raise ValueError(f"{len(keys)} keys for {len(values)} values")
        if len(set(keys)) != len(keys):
            twice = sorted({key for key in keys if keys.count(key) > 1})
            raise StoreFault("put twice in one batch", "give each row an index of its own", twice)
        generation: Meta = {"generation": secrets.token_hex(8)}
        every = self._named(keys, [generation] * len(keys), values)
        tensors = [one for one in every if isinstance(one.value, torch.Tensor)]
        objects = [one for one in every if not isinstance(one.value, torch.Tensor)]
        put_tensors = self._put_tensors if self._gdr_staging is None else self._put_tensors_by_gdr
        try:
            metas = _in_batches((put_tensors, tensors), (self._put_objects, objects))
            self._transfer.segment.check()
        except BaseException as exc:
            if not (isinstance(exc, StoreFault) and exc.code in MASTER_SILENT):
                self._discard(every)
            raise
        return [{**generation, **metas[one.position]} for one in every]

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
        """
        self._check_open()
        every = self._named(keys, custom_backend_meta)
        unknown = [one.key for one in every if not one.is_known]
        if unknown:
            raise StoreFault(
                "put by a process in which the plugin is not active",
                "install relax-tq-rdma on every node and let every worker load it",
                unknown,
            )
        objects: list[Value] = []
        by_gdr: list[Value] = []
        tensors: list[Value] = []
        for one in every:
            (objects if one.is_packed else by_gdr if self._reads_by_gdr(one) else tensors).append(one)
        results = _in_batches(
            (self._get_tensors_by_gdr, by_gdr), (self._get_tensors, tensors), (self._get_objects, objects)
        )
        return [results[one.position] for one in every]

    def clear(self, keys: list[str], custom_backend_meta: list[Meta | None] | None = None) -> None:
        """Remove values. What is gone already or was never put is fine; what stays although it should not, raises."""
        self._check_open()
        _in_batches((self._remove, [one for one in self._named(keys, custom_backend_meta) if one.is_known]))

    def close(self) -> None:
        """Unmount this process's segment and leave the store. Further calls do nothing."""
        with self._closing:
            if self._store is not None:
                super().close()

    # --- how bytes move -----------------------------------------------------------------------------------------------

    def _put_tensors(self, values: Sequence[Value]) -> list[Meta]:
        names = [one.stored for one in values]
        tensors = [one.as_memory() for one in values]
        try:
            self._transfer.write(names, tensors, "fast")
        except Overlap:
            self._transfer.write(names, [tensor.clone() for tensor in tensors], "fast")
        return [tensor_meta(tensor) for tensor in tensors]

    def _put_objects(self, values: Sequence[Value]) -> list[Meta]:
        with accounting.stage("encode"):
            buffers, sizes = serial_utils.batch_encode_into(
                [one.value for one in values], byte_buffers, num_workers=upstream.MAX_SERIAL_WORKER_THREADS
            )
        self._transfer.write([one.stored for one in values], buffers, "slow")
        return [{"packed_size": size} for size in sizes]

    def _get_tensors(self, values: Sequence[Value]) -> list[torch.Tensor]:
        tensors = _allocated(empty_tensors, values)
        self._transfer.read([one.stored for one in values], tensors, "fast")
        return tensors

    def _get_objects(self, values: Sequence[Value]) -> list[Any]:
        buffers = _allocated(byte_buffers, [one.packed_size for one in values])
        self._transfer.read([one.stored for one in values], buffers, "slow")
        with accounting.stage("decode"):
            decoded: list[Any] = serial_utils.batch_decode_from(buffers)
        return decoded

    # TransferQueue's own path through its GPU staging buffer; it cuts what is larger than that into chunks.

    def _put_tensors_by_gdr(self, values: Sequence[Value]) -> list[Meta]:
        metas = super().put([one.stored for one in values], [one.value for one in values])
        return [{**tensor_meta(one.value), **(meta or {})} for one, meta in zip(values, metas, strict=True)]

    def _get_tensors_by_gdr(self, values: Sequence[Value]) -> list[torch.Tensor]:
        shapes, dtypes = [one.shape for one in values], [one.dtype for one in values]
        tensors: list[torch.Tensor] = super().get(
            [one.stored for one in values], shapes, dtypes, [one.meta for one in values]
        )
        return tensors

    def _batch_upsert_with_retry(self, batch_keys: list[str], batch_ptrs: list[int], batch_sizes: list[int]) -> None:
        self._transfer.upsert(batch_keys, batch_ptrs, batch_sizes, hold=self._gdr_staging)

    def _batch_get_into_with_retry(
        self, batch_keys: list[str], batch_buffer_ptrs: list[int], batch_nbytes: list[int]
    ) -> None:
        self._transfer.fetch(batch_keys, batch_buffer_ptrs, batch_nbytes, hold=self._gdr_staging)

    def _reads_by_gdr(self, one: Value) -> bool:
        if self._gdr_staging is not None:
            return bool(one.chunks) or math.prod(one.shape) * one.dtype.itemsize <= self._gdr_staging.size
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

    def _remove(self, values: Sequence[Value]) -> list[None]:
        stored: list[str] = []
        for one in values:
            stored += [f"{one.stored}:c{chunk}" for chunk in range(one.chunks)] or [one.stored]
        self._transfer.remove(stored)
        return [None] * len(values)

    def _discard(self, values: Sequence[Value]) -> None:
        """Take back what a failed put may have stored. One try: the failure itself is what the caller must see."""
        for batch in _cut(values):
            stored = [one.stored for one in batch]
            if self._gdr_staging is not None:
                sizes = [one.value.nbytes if isinstance(one.value, torch.Tensor) else 0 for one in batch]
                stored = [
                    part
                    for name, size in zip(stored, sizes, strict=True)
                    for part in chunk_subkeys(name, size, self._gdr_staging.size)
                ]
            try:
                self._store.batch_remove(stored)
            except TransferError as fault:
                logger.warning("part of a failed put may stay in the store: %s", fault)
                return

    def _check_open(self) -> None:
        if self._store is None:
            raise StoreFault(
                "the connection to the Mooncake store is closed", "init TransferQueue again before using it"
            )


_Job = Callable[[Sequence[Value]], Sequence[Any]]


def _in_batches(*work: tuple[_Job, Sequence[Value]]) -> dict[int, Any]:
    """Run each function over batches of its values, a few at once; returns each value's result by its position.

    Raises the first failure, after everything that had begun has ended: memory is not let go of under a transfer.
    """
    jobs = [(function, batch) for function, values in work for batch in _cut(values)]

    def run(function: _Job, batch: Sequence[Value]) -> Sequence[Any]:
        with _about(batch):
            return function(batch)

    results: dict[int, Any] = {}
    with ThreadPoolExecutor(upstream.MAX_BATCH_WORKER_THREADS, thread_name_prefix="mooncake-store") as pool:
        futures = [pool.submit(run, *job) for job in jobs]
        try:
            for (_, batch), future in zip(jobs, futures, strict=True):
                results.update(zip((one.position for one in batch), future.result(), strict=True))
        finally:
            for future in futures:
                future.cancel()
    return results


def _allocated(allocate: Callable[[Any], list[torch.Tensor]], wanted: Any) -> list[torch.Tensor]:
    started = time.perf_counter()
    buffers = allocate(wanted)
    accounting.record_alloc(time.perf_counter() - started)
    return buffers


def _cut(values: Sequence[Value]) -> list[Sequence[Value]]:
    """TransferQueue's batches: by number of keys."""
    size = upstream.BATCH_SIZE_LIMIT
    return [values[start : start + size] for start in range(0, len(values), size)]


@contextmanager
def _about(values: Sequence[Value]) -> Iterator[None]:
    """Faults inside the block name TransferQueue's keys."""
    try:
        yield
    except StoreFault as fault:
        names = {one.stored: one.key for one in values}
        keys = [names.get(stored, stored) for stored in fault.keys] or list(names.values())
        raise StoreFault(fault.cause, fault.remedy, keys, code=fault.code, settled=fault.settled) from fault
