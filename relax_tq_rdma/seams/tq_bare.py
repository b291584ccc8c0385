"""TransferQueue's own parts one by one, without Ray: for measurements that run each part in a process of its own.

Controller and storage unit are Ray actors only by decorator; the class below it serves over ZMQ and needs no cluster.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray.util
from transfer_queue import TransferQueueClient
from transfer_queue.storage.managers import base
from transfer_queue.utils import serial_utils
from transfer_queue.utils.enum_utils import Role
from transfer_queue.utils.zmq_utils import ZMQMessage, ZMQServerInfo

LOOPBACK = "127.0.0.1"


def bind_loopback() -> None:
    """Let what this process starts listen on loopback; TransferQueue asks Ray for the address of the node."""
    ray.util.get_node_ip_address = lambda: LOOPBACK


def controller() -> tuple[Any, ZMQServerInfo]:
    """A controller that serves from threads of this process, and where; keep the object."""
    from transfer_queue.controller import TransferQueueController

    served = _class_below(TransferQueueController)()
    return served, served.get_zmq_server_info()


def storage_unit() -> tuple[Any, ZMQServerInfo]:
    """A storage unit that serves from threads of this process, and where; keep the object."""
    from transfer_queue.storage import SimpleStorageUnit

    served = _class_below(SimpleStorageUnit)({})
    return served, served.get_zmq_server_info()


def controller_at(id: str, ip: str, ports: Mapping[str, int]) -> ZMQServerInfo:
    return ZMQServerInfo(role=Role.CONTROLLER, id=id, ip=ip, ports=dict(ports))


def storage_unit_at(id: str, ip: str, ports: Mapping[str, int]) -> ZMQServerInfo:
    return ZMQServerInfo(role=Role.STORAGE, id=id, ip=ip, ports=dict(ports))


def client(name: str, at: ZMQServerInfo, backend: str, config: Any) -> TransferQueueClient:
    """A client with its storage manager: the plugin's own if the config has the plugin's section and seam T2 is on."""
    made = TransferQueueClient(name, at)
    made.initialize_storage_manager(backend, config)
    manager = made.storage_manager
    if getattr(manager, "_multi_threads_executor", ...) is None:
        # Upstream asks Ray how many threads to take, and that starts a cluster where none runs; so many in a driver.
        threads = min(max(2, os.cpu_count() or 2), base.LIMIT_THREADS_PER_MANAGER_IN_DRIVER)
        manager._num_threads = threads
        manager._multi_threads_executor = ThreadPoolExecutor(threads, thread_name_prefix="KVStorageManager")
    return made


def replace_mooncake_store(wrap: Callable[[Any], Any]) -> None:
    """Give every Mooncake client that this process makes from now on ``wrap(MooncakeDistributedStore)``."""
    from transfer_queue.storage.clients import mooncake_client

    mooncake_client.MooncakeDistributedStore = wrap(mooncake_client.MooncakeDistributedStore)


def backend_metas(metadata: Any, field: str) -> list[dict[str, Any]]:
    """What the storage backend keeps with each row of a field; empty where it keeps nothing."""
    return [meta.get(field) or {} for meta in metadata._custom_backend_meta]


def places_that_copy() -> list[tuple[Any, str]]:
    """Functions of TransferQueue that copy payload by themselves: owner and name."""
    return [(serial_utils, "pack_into")]


def message_class() -> Any:
    """What every SimpleStorage message is built with (``serialize``) and read with (``deserialize``)."""
    return ZMQMessage


def _class_below(actor: Any) -> Any:
    metadata = actor.__ray_metadata__
    return getattr(metadata, "modified_class", None) or metadata.original_class
