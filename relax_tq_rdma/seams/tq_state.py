"""What the start path must know and undo of ``transfer_queue.interface`` in this process.

TransferQueue keeps client, storage handles and controller in module variables (``_TQ_CLIENT``, ``_TQ_STORAGE``,
``_TQ_CONTROLLER``, 0.1.10 and 0.1.11) and offers no way to detach, to look at the real client, or to close a storage
client (contract §13.5). All access to them is here.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Iterator
from typing import Any

import msgspec

_VARIABLES = ("_TQ_CLIENT", "_TQ_STORAGE", "_TQ_CONTROLLER")
_ROWS = 2
_ROW_BYTES = 4096
_POLL_SECONDS = 0.05

_abandoned: list[Any] = []


class ClientFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The real storage manager of this process: names of its classes, and protocol of its storage client if any."""

    manager: tuple[str, ...]
    protocol: str = ""


def client_facts() -> ClientFacts | None:
    """What this process really uses; ``None`` when it has no client with a storage manager."""
    manager = _manager()
    if manager is None:
        return None
    classes = tuple(cls.__name__ for cls in type(manager).__mro__)
    return ClientFacts(manager=classes, protocol=str(getattr(storage_client(), "protocol", "")))


def storage_client() -> Any | None:
    """The key-value client under the manager (Mooncake); ``None`` with SimpleStorage or without a client."""
    return getattr(_manager(), "storage_client", None)


@contextlib.contextmanager
def expected_bootstrap() -> Iterator[None]:
    """Drop the one error TransferQueue logs when it is told to start no master itself: here that is as it must be.

    An operator would read "Not found available MooncakeStore storage resources" as the cause of whatever comes next.
    """

    def keep(record: logging.LogRecord) -> bool:
        return "Not found available MooncakeStore storage resources" not in record.getMessage()

    logger: logging.Logger = _interface().logger
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def detach_controller() -> None:
    """Forget the controller's handle: ``close`` kills it also from a process that only attached."""
    _interface()._TQ_CONTROLLER = None


def forget_actors() -> None:
    """Forget controller and storage units, because their Ray is gone: ``close`` would call them."""
    module = _interface()
    module._TQ_CONTROLLER = module._TQ_STORAGE = None


def reset() -> None:
    """Forget everything, so that the next init of this process begins anew."""
    module = _interface()
    for name in _VARIABLES:
        setattr(module, name, None)


def store_answers() -> bool:
    """Whether the master behind this process's store answers a call; ``True`` when there is no store."""
    store = getattr(storage_client(), "_store", None)
    return store is None or all(code >= 0 for code in store.batch_is_exist(["rtq_alive"]))


def abandon_store() -> None:
    """Take the native store away from its client, unclosed, and keep it: its destructor would close it too."""
    client = storage_client()
    if client is not None:
        _abandoned.append(client._store)
        client._store = None


def close_storage_client(client: Any) -> None:
    """Unmount the segment and leave the store; the public ``close`` of TransferQueue does not. Idempotent."""
    close = getattr(client, "close", None)
    if callable(close):
        close()


def round_trip(partition: str, ends: float) -> str:
    """Put two small rows, read them back by way of the controller, compare, clear.

    Args:
        partition: a name nobody else uses; it is gone afterwards.
        ends: ``time.monotonic`` at which to stop waiting for readiness.

    Returns:
        What went wrong, in one sentence; empty when all bytes came back.
    """
    import torch
    from tensordict import TensorDict

    client = _interface()._TQ_CLIENT
    if client is None:
        return "this process has no TransferQueue client"
    rows = torch.frombuffer(bytearray(secrets.token_bytes(_ROWS * _ROW_BYTES)), dtype=torch.uint8).view(_ROWS, -1)
    fields = ["rtq_verify"]
    try:
        put = client.put(data=TensorDict({fields[0]: rows}, batch_size=[_ROWS]), partition_id=partition)
        # A lost or negative acknowledgement of the controller ends as success of the put: only readiness tells.
        while not _are_ready(client, fields, put.global_indexes, partition):
            if time.monotonic() > ends:
                return "the rows were put and the controller never reported them ready"
            time.sleep(_POLL_SECONDS)
        # Past the sampler, which is the job's own and may demand whole groups.
        meta = client.get_meta(
            data_fields=fields, batch_size=_ROWS, partition_id=partition, mode="force_fetch", task_name=partition
        )
        listed = {index: position for position, index in enumerate(meta.global_indexes)}
        missing = [index for index in put.global_indexes if index not in listed]
        if missing:
            return f"{len(put.global_indexes)} rows were put, the controller lists {len(missing)} of them no more"
        meta = meta.select_samples([listed[index] for index in put.global_indexes])
        got = dict(zip(meta.global_indexes, client.get_data(meta)[fields[0]].unbind(), strict=True))
        bad = [index for index, row in zip(put.global_indexes, rows, strict=True) if not torch.equal(got[index], row)]
        if bad:
            return f"{len(bad)} of {_ROWS} rows came back with other bytes"
    finally:
        with contextlib.suppress(Exception):  # the failure above says more
            client.clear_partition(partition)
    return f"partition {partition} is still listed after it was cleared" if partition in _partitions(client) else ""


def _are_ready(client: Any, fields: list[str], indexes: list[int], partition: str) -> bool:
    """These rows only: with ``TQ_PRE_ALLOC_SAMPLE_NUM``, which the host sets, a partition has more that never come."""
    known, status = client.get_production_status(data_fields=fields, partition_id=partition)
    if known is None or status is None:
        return False
    ready = {int(index) for index, row in zip(known, status, strict=True) if bool(row.all())}
    return ready.issuperset(indexes)


def _partitions(client: Any) -> list[str]:
    return list(client.get_partition_list())


def _manager() -> Any | None:
    return getattr(_interface()._TQ_CLIENT, "storage_manager", None)


def _interface() -> Any:
    from transfer_queue import interface

    return interface
