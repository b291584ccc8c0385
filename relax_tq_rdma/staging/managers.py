"""The plugin's storage managers: TransferQueue's own, counted, guarded, and loud where upstream is silent (seam T2).

They take the names ``SimpleStorage`` and ``MooncakeStore`` and override public methods only, but for two.
``_notify_and_wait``: upstream turns a missing or negative answer of the controller into success, and the consumer then
waits for rows that nobody announced (contract §13, item 8). ``_merge_tensors_to_tensordict``: upstream copies every
tensor once more (RFC F5).
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import zmq
from tensordict import TensorDict
from transfer_queue.storage.managers import base
from transfer_queue.storage.managers.mooncake_manager import MooncakeStorageManager
from transfer_queue.storage.managers.simple_storage_manager import AsyncSimpleStorageManager
from transfer_queue.utils.zmq_utils import ZMQMessage, ZMQRequestType, create_zmq_socket

from relax_tq_rdma import coverage
from relax_tq_rdma.accounting import AccountingMixin
from relax_tq_rdma.errors import TransferError
from relax_tq_rdma.section import read_section
from relax_tq_rdma.staging.carriers import MooncakeCarrier, SimpleCarrier
from relax_tq_rdma.staging.claims import claiming, current_claim
from relax_tq_rdma.staging.columns import as_column
from relax_tq_rdma.staging.errors import RESTART, Restated, StoreFault, where
from relax_tq_rdma.staging.job import join_job
from relax_tq_rdma.transport.hazards import check_same_process

logger = logging.getLogger(__name__)


class _ManagerOfJob:
    """What both managers add. A job without the plugin's section gets upstream's own object, not one of ours."""

    _upstream: type[Any]

    def __new__(cls, controller_info: Any, config: Any, zmq_context: Any = None) -> Any:
        if read_section(config)[0] is None:
            return cls._upstream(controller_info, config, zmq_context=zmq_context)
        return super().__new__(cls)

    def __init__(self, controller_info: Any, config: Any, zmq_context: Any = None) -> None:
        """As upstream.

        Raises:
            StartError: this process must not join the job; the message says why.
        """
        section = join_job(config)
        assert section is not None  # __new__ saw to that
        self._settings = section.settings
        self._made_in = os.getpid()
        super().__init__(controller_info, config, zmq_context=zmq_context)  # type: ignore[call-arg]
        coverage.joined(self, section)

    def close(self) -> None:
        """As upstream."""
        super().close()  # type: ignore[misc]
        coverage.left(self)

    async def put_data(self, data: Any, metadata: Any, data_parser: Callable[[Any], Any] | None = None) -> None:
        """Store and announce a batch.

        Raises:
            TransferError: part of it could not be stored, or the controller did not take the announcement; a batch that
                is not stored whole is never announced.
        """
        with self._naming("put", metadata):
            await super().put_data(data, metadata, data_parser)  # type: ignore[misc]

    async def get_data(self, metadata: Any) -> Any:
        """Fetch a batch.

        Raises:
            TransferError: part of it is lost or cannot be reached.
        """
        with self._naming("get", metadata):
            return await super().get_data(metadata)  # type: ignore[misc]

    async def clear_data(self, metadata: Any) -> None:
        """Remove a batch.

        Raises:
            TransferError: part of it could not be removed.
        """
        with self._naming("clear", metadata):
            await super().clear_data(metadata)  # type: ignore[misc]

    def _naming(self, verb: str, metadata: Any) -> Restated[StoreFault]:
        """Faults of the store inside the block name the partition, the fields and the rows."""
        check_same_process(self._made_in, "the TransferQueue client")

        def named(fault: StoreFault) -> TransferError:
            partitions = ", ".join(dict.fromkeys(str(name) for name in metadata.partition_ids)) or "?"
            place = f"{verb} of partition {partitions}: {where(fault.keys)}"
            return TransferError(f"{place}{fault.cause}: {fault.remedy}")

        return Restated(StoreFault, named)

    async def _notify_and_wait(self, request_msg: list[Any]) -> None:
        """Announce stored rows and wait until the controller has taken them. Runs on the manager's notify loop."""
        seconds = base.TQ_DATA_UPDATE_RESPONSE_TIMEOUT
        ends = time.monotonic() + seconds
        try:
            async with self._notify_socket() as socket:
                await socket.send_multipart(request_msg)
                answer = None
                while answer is None or answer.request_type not in _ANSWERS:
                    left = max(0.0, ends - time.monotonic())
                    answer = ZMQMessage.deserialize(await asyncio.wait_for(socket.recv_multipart(copy=False), left))
        except (asyncio.TimeoutError, zmq.ZMQError) as exc:
            raise StoreFault(
                f"stored, but the TransferQueue controller did not confirm it within {seconds} s "
                f"({type(exc).__name__}), so no consumer may ever see it",
                RESTART,
            ) from exc
        if answer.request_type != ZMQRequestType.NOTIFY_DATA_UPDATE_ACK or not answer.body.get("success"):
            raise StoreFault(
                "stored, but the TransferQueue controller refused to record it"
                f" ({answer.body.get('message') or 'see its log'}), so a consumer would read it wrongly or never",
                "put every batch of a field with one dtype, then restart the job",
            )

    @asynccontextmanager
    async def _notify_socket(self) -> AsyncIterator[Any]:
        info = self.controller_info  # type: ignore[attr-defined]
        pool = getattr(self, "notify_pool", None)
        if pool is not None:  # from 0.1.11 on
            async with pool.alease(info) as socket:
                try:
                    yield socket
                except BaseException:
                    socket.close(linger=0)  # a late answer must not be read as the next one's
                    raise
            return
        identity = f"{self.storage_manager_id}-notify-{uuid4().hex[:8]}".encode()  # type: ignore[attr-defined]
        socket = create_zmq_socket(self.zmq_context, zmq.DEALER, info.ip, identity)  # type: ignore[attr-defined]
        try:
            socket.connect(info.to_addr("request_handle_socket"))
            yield socket
        finally:
            socket.close(linger=0)


_ANSWERS = (ZMQRequestType.NOTIFY_DATA_UPDATE_ACK, ZMQRequestType.REQUEST_ERROR)


class DataplaneSimpleStorageManager(_ManagerOfJob, AccountingMixin, SimpleCarrier, AsyncSimpleStorageManager):  # type: ignore[misc]
    """``AsyncSimpleStorageManager`` of a job that uses the plugin."""

    _upstream = AsyncSimpleStorageManager


class DataplaneMooncakeStorageManager(_ManagerOfJob, AccountingMixin, MooncakeCarrier, MooncakeStorageManager):  # type: ignore[misc]
    """``MooncakeStorageManager`` of a job that uses the plugin; its client is the plugin's, by name."""

    _upstream = MooncakeStorageManager
    _client: Any = None

    @property
    def storage_client(self) -> Any:
        """The client; in a put, what keeps account of that put."""
        return current_claim() or self._client

    @storage_client.setter
    def storage_client(self, client: Any) -> None:
        self._client = client

    async def put_data(self, data: Any, metadata: Any, data_parser: Callable[[Any], Any] | None = None) -> None:
        """As above; an overwrite goes to a new generation, and the old one is removed when the new one is announced."""
        fields = list(data.keys())
        before = [{field: meta[field] for field in fields if field in meta} for meta in metadata._custom_backend_meta]
        with claiming(self._client) as claim:
            try:
                await super().put_data(data, metadata, data_parser)
            except BaseException:
                for meta, old in zip(metadata._custom_backend_meta, before, strict=True):
                    for field in fields:
                        meta.pop(field, None)
                    meta.update(old)
                # In a thread that nobody waits for: a cancelled caller must get on, and the store may take its time.
                asyncio.get_running_loop().run_in_executor(None, claim.give_up)
                raise
        replaced = {
            f"{index}@{field}": meta
            for index, old in zip(metadata.global_indexes, before, strict=True)
            for field, meta in old.items()
            if meta
        }
        if replaced:
            await asyncio.get_running_loop().run_in_executor(None, self._drop, replaced)

    def close(self) -> None:
        """Close upstream's part, then leave the store: upstream leaves the segment at the master (contract §13)."""
        super().close()
        if self._client is not None:
            self._client.close()

    def _merge_tensors_to_tensordict(self, metadata: Any, values: list[Any]) -> Any:
        """As upstream (values are field by field, sorted), but a column is a view of what was read, not a copy of it.

        So it needs no threads: upstream asks Ray how many, and that starts a Ray where none runs (a DataLoader worker).
        """
        rows, fields = len(metadata.global_indexes), sorted(metadata.field_names)
        if len(values) != rows * len(fields):
            raise ValueError(f"{len(values)} values for {rows} rows of {len(fields)} fields")
        columns = {name: as_column(values[at * rows : (at + 1) * rows]) for at, name in enumerate(fields) if rows}
        return TensorDict(columns, batch_size=rows)

    def _drop(self, replaced: dict[str, Any]) -> None:
        try:
            self.storage_client.clear(list(replaced), custom_backend_meta=list(replaced.values()))
        except TransferError as fault:
            # The new values are stored and announced: the put has succeeded.
            logger.warning("the values that a put replaced still take room in the store: %s", fault)
