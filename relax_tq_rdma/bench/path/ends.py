"""The two ends of a case: what puts a batch in the producer, what gets it in the consumer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from relax_tq_rdma.bench.path.cases import Case
from relax_tq_rdma.bench.path.config import backend_config
from relax_tq_rdma.bench.path.messages import Setup
from relax_tq_rdma.bench.path.payload import KEYS, Shape

FIELD = "multimodal_train_inputs"
TASK = "bench"
_WARM_SECONDS = 50.0  # within the limit of a step


class End(Protocol):
    """One case in one process. What is not ``put`` or ``get`` is never timed."""

    def prepare(self, rows: Sequence[Any], shape: Shape, partition: str) -> list[int]:
        """Make all ready for one :meth:`put`; returns the index of each row."""

    def put(self) -> None:
        """Store the prepared rows."""

    def look(self, shape: Shape, partition: str) -> list[int]:
        """Make all ready for one :meth:`get`; returns the index of each row that it will give."""

    def get(self) -> list[Any]:
        """Each row as a dict of tensors, ready to be used."""

    def rungs(self) -> dict[str, int]:
        """Bytes moved so far by each rung of the staging; empty without the plugin's Mooncake client."""

    def stored(self) -> tuple[int, int]:
        """After a get: bytes in the store, and how many rows are in the row format."""

    def clear(self, partition: str) -> None:
        """Remove the batch."""


def join(case: Case, setup: Setup, master: str, *, produces: bool) -> End:
    """Join the store of a case."""
    if case.form == "values":
        from relax_tq_rdma.bench.path.engine import EngineEnd

        return EngineEnd(master, setup.segment_mib if produces else 0)
    return ManagerEnd(case, setup, master, produces=produces)


class ManagerEnd:
    """Through a storage manager, TransferQueue's own or the plugin's; all around it through TransferQueue's client."""

    def __init__(self, case: Case, setup: Setup, master: str, *, produces: bool) -> None:
        from relax_tq_rdma.seams import tq_bare

        at = setup.controller
        self._case, self._setup = case, setup
        self._controller = tq_bare.controller_at(at.id, at.ip, at.ports)
        self._fields = list(KEYS) if case.form == "jagged" else [FIELD]
        name, config = backend_config(case, setup, master, produces=produces)
        self._client: Any = tq_bare.client(f"bench-{case.name}", self._controller, name, config)
        self._manager: Any = self._client.storage_manager
        ours = type(self._manager).__module__.startswith("relax_tq_rdma.")
        if ours != (case.settings is not None):
            raise RuntimeError(f"{case.name} got {type(self._manager).__name__}")
        self._loop = asyncio.new_event_loop()
        self._plain: Any = None
        self._data: Any = None
        self._meta: Any = None

    def prepare(self, rows: Sequence[Any], shape: Shape, partition: str) -> list[int]:
        import torch
        from tensordict import NonTensorStack, TensorDict

        columns: dict[str, Any]
        if self._case.form == "jagged":
            columns = {
                key: torch.nested.as_nested_tensor([row[key] for row in rows], layout=torch.jagged) for key in KEYS
            }
        else:
            columns = {FIELD: NonTensorStack(*rows)}
        self._data = TensorDict(columns, batch_size=shape.rows)
        self._meta = self._client.get_meta(self._fields, shape.rows, partition, mode="insert")
        self._wait_until_warm()
        return list(self._meta.global_indexes)

    def put(self) -> None:
        self._loop.run_until_complete(self._manager.put_data(self._data, self._meta))

    def look(self, shape: Shape, partition: str) -> list[int]:
        self._meta = self._client.get_meta(self._fields, shape.rows, partition, mode="fetch", task_name=TASK)
        self._wait_until_warm()
        return list(self._meta.global_indexes)

    def get(self) -> list[Any]:
        data = self._loop.run_until_complete(self._manager.get_data(self._meta))
        if self._case.form == "jagged":
            columns = [data[key].unbind() for key in KEYS]
            return [dict(zip(KEYS, values, strict=True)) for values in zip(*columns, strict=True)]
        return list(data[FIELD])

    def rungs(self) -> dict[str, int]:
        client = self._staging_client()
        moved: Counter[str] = Counter()
        for (_, rung), each in client.staging_counts().rungs.items() if client is not None else ():
            moved[rung] += each.nbytes
        return moved

    def _staging_client(self) -> Any:
        """The plugin's Mooncake client, or ``None``."""
        return None if self._case.settings is None else getattr(self._manager, "storage_client", None)

    def _wait_until_warm(self) -> None:
        client = self._staging_client()
        if client is not None and not client.wait_until_warm(_WARM_SECONDS):
            raise RuntimeError(f"the staging pool is not warm after {_WARM_SECONDS:g} s: free some memory")

    def stored(self) -> tuple[int, int]:
        from relax_tq_rdma.seams import tq_bare

        if self._case.backend == "simple":
            return self._read_plainly()
        if self._case.form == "jagged":
            return 0, 0  # a tensor's size is in its schema, not with the backend
        metas = tq_bare.backend_metas(self._meta, FIELD)
        sizes = [meta.get("encoded_size") or meta.get("packed_size", 0) for meta in metas]
        return sum(sizes), sum("encoded_size" in meta for meta in metas)

    def clear(self, partition: str) -> None:
        self._data = None
        self._client.clear_partition(partition)

    def _read_plainly(self) -> tuple[int, int]:
        """What SimpleStorage holds, read with TransferQueue's own manager: it decodes no row and resolves no copy."""
        from relax_tq_rdma.seams import tq_bare

        if self._plain is None:
            name, config = backend_config(_plain(self._case), self._setup, "", produces=False)
            self._plain = tq_bare.client(f"bench-{self._case.name}-plain", self._controller, name, config)
        rows = list(self._plain.get_data(self._meta)[FIELD])
        return sum(map(_stored_bytes, rows)), sum(set(row) == {"RTQ1"} for row in rows)


def _stored_bytes(value: Any) -> int:
    """Of all tensors and byte strings in dicts and lists."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return sum(map(_stored_bytes, value))
    return len(value) if isinstance(value, bytes) else int(value.nbytes)


def _plain(case: Case) -> Case:
    return Case(name=case.name, backend=case.backend, form=case.form)
