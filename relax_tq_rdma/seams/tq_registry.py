"""Seam T2: the plugin's managers and client take the names of TransferQueue's own in its registries (design §2).

Every client of every TransferQueue line gets its storage manager through them: ``transfer_queue.init``, ``kv_*`` and
``StreamingDataset`` alike, in the driver, in tasks and in actors.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from relax_tq_rdma.seams.base import SeamReport, installed_transfer_queue, missing_parameters

_STORAGE = "transfer_queue.storage"
_MANAGERS = f"{_STORAGE}.managers"

_MANAGER_METHODS = {
    "__init__": ("controller_info", "config", "zmq_context"),
    "put_data": ("data", "metadata", "data_parser"),
    "get_data": ("metadata",),
    "clear_data": ("metadata",),
    "notify_data_update": ("partition_id", "global_indexes", "field_schema", "custom_backend_meta"),
    "_notify_and_wait": ("request_msg",),
    "close": (),
}
_CLIENT_METHODS = {
    "__init__": ("config",),
    "put": ("keys", "values"),
    "get": ("keys", "shapes", "dtypes", "custom_backend_meta"),
    "clear": ("keys", "custom_backend_meta"),
    "close": (),
    "_batch_upsert_with_retry": ("batch_keys", "batch_ptrs", "batch_sizes"),
    "_batch_get_into_with_retry": ("batch_keys", "batch_buffer_ptrs", "batch_nbytes"),
}
_FUNCTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "transfer_queue.utils.serial_utils": {
        "batch_encode_into": ("num_workers",),
        "batch_decode_from": (),
    },
    "transfer_queue.utils.tensor_utils": {"allocate_empty_tensors": ("dtypes", "shapes")},
    "transfer_queue.utils.zmq_utils": {"create_zmq_socket": ("ctx", "socket_type", "ip", "identity")},
}
"""What the plugin's classes call besides."""


@dataclass(frozen=True)
class _Name:
    """One name in a registry: ``factory`` and ``upstream`` are where TransferQueue keeps them, ``ours`` likewise."""

    name: str
    factory: tuple[str, str]
    upstream: tuple[str, str]
    ours: tuple[str, str]
    methods: Mapping[str, tuple[str, ...]]

    def registry(self) -> dict[str, Any]:
        found: dict[str, Any] = _get(self.factory)._registry
        return found

    def register(self, cls: Any) -> None:
        _get(self.factory).register(self.name)(cls)


_OURS = "relax_tq_rdma.staging"
_NAMES = (
    _Name(
        "SimpleStorage",
        (f"{_MANAGERS}.base", "StorageManagerFactory"),
        (f"{_MANAGERS}.simple_storage_manager", "AsyncSimpleStorageManager"),
        (f"{_OURS}.managers", "DataplaneSimpleStorageManager"),
        _MANAGER_METHODS,
    ),
    _Name(
        "MooncakeStore",
        (f"{_MANAGERS}.base", "StorageManagerFactory"),
        (f"{_MANAGERS}.mooncake_manager", "MooncakeStorageManager"),
        (f"{_OURS}.managers", "DataplaneMooncakeStorageManager"),
        _MANAGER_METHODS,
    ),
    _Name(
        "MooncakeStoreClient",
        (f"{_STORAGE}.clients.base", "StorageClientFactory"),
        (f"{_STORAGE}.clients.mooncake_client", "MooncakeStoreClient"),
        (f"{_OURS}.client", "DataplaneMooncakeStoreClient"),
        _CLIENT_METHODS,
    ),
)


class TqRegistry:
    """See :class:`relax_tq_rdma.seams.base.Seam`."""

    name = "T2 (TransferQueue's storage registries)"
    _expected = "the classes SimpleStorage, MooncakeStore and MooncakeStoreClient in registries, with known methods"

    def __init__(self) -> None:
        self._previous: dict[str, Any] = {}

    def check(self) -> SeamReport:
        taken = ""
        try:
            problem = _missing_function()
            for entry in _NAMES:
                problem = problem or _problem_of(entry)
                taken = taken or _stranger_in(entry)
        except Exception as exc:  # a broken TransferQueue must become a sentence, whatever it raises
            problem = f"{type(exc).__name__}: {exc}"
        return SeamReport(
            name=self.name,
            ok=not problem and not taken,
            installed=installed_transfer_queue(),
            expected=self._expected,
            found=problem,
            taken_by=taken,
        )

    def apply(self) -> None:
        for entry in _NAMES:
            current, ours = entry.registry()[entry.name], _get(entry.ours)
            if current is not ours:
                self._previous[entry.name] = current
                entry.register(ours)

    def remove(self) -> None:
        for entry in _NAMES:
            previous = self._previous.pop(entry.name, None)
            if previous is not None and entry.registry().get(entry.name) is _get(entry.ours):
                entry.register(previous)


def _get(place: tuple[str, str]) -> Any:
    module, name = place
    return getattr(importlib.import_module(module), name)


def _problem_of(entry: _Name) -> str:
    if not callable(getattr(_get(entry.factory), "register", None)):
        return f"no {entry.factory[1]}.register"
    if entry.name not in entry.registry():
        return f"nothing registered as {entry.name}"
    upstream = _get(entry.upstream)
    for method, parameters in entry.methods.items():
        function = getattr(upstream, method, None)
        if function is None:
            return f"no {upstream.__name__}.{method}"
        missing = missing_parameters(function, parameters)
        if missing:
            return f"{upstream.__name__}.{method} without parameter {', '.join(missing)}"
    return ""


def _missing_function() -> str:
    for module, functions in _FUNCTIONS.items():
        for name, parameters in functions.items():
            function = getattr(importlib.import_module(module), name, None)
            if function is None:
                return f"no {module}.{name}"
            missing = missing_parameters(function, parameters)
            if missing:
                return f"{name} without parameter {', '.join(missing)}"
    return ""


def _stranger_in(entry: _Name) -> str:
    module = getattr(entry.registry().get(entry.name), "__module__", "")
    known = module.partition(".")[0] in ("transfer_queue", "relax_tq_rdma", "")
    return "" if known else f"{module} (name {entry.name})"
