"""How a cohort gets its rows, the way the host does it: one rank fetches and broadcasts CP -> TP -> PP, or every rank
fetches for itself, in step with the others (:mod:`relax_tq_rdma.fanout`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from relax_tq_rdma import accounting
from relax_tq_rdma.accounting import FanoutMode
from relax_tq_rdma.demo import rows
from relax_tq_rdma.demo.comm import CohortComm, Comm
from relax_tq_rdma.demo.mesh import Axis
from relax_tq_rdma.errors import TransferError
from relax_tq_rdma.fanout.client import FetchClient
from relax_tq_rdma.fanout.cohort import GroupCohort
from relax_tq_rdma.fanout.lockstep import Cohort, Lockstep, describe

TASK = "actor_train"
POLL_SECONDS = 0.02
Columns = dict[str, list[Any]]


@dataclass(frozen=True)
class Fetched:
    """Rows of one cohort in sample order. ``get_s`` is spent in ``get_data`` (0 on a rank that did not fetch),
    ``fanout_s`` in broadcasts or in waiting for the slowest rank; the wait until rows exist is in neither. A rank that
    only receives cannot tell when they did, and counts that wait too."""

    rows: list[rows.Row]
    get_s: float
    fanout_s: float


class Fetcher:
    """Fetches the rows of a step for one rank; ``fetch`` is collective over the cohort.

    ``limit_s`` bounds the wait for rows.
    """

    def __init__(self, client: Any, comm: Comm, batch_size: int, per_rank: bool, limit_s: float) -> None:
        self._client = client
        self._comm = comm
        self._batch_size = batch_size
        self._mode: FanoutMode = "per_rank" if per_rank else "rank0"
        self._fetches = per_rank or comm.coords.is_fetcher
        self._in_step_with: Cohort = CohortComm(comm) if per_rank else GroupCohort([])
        self._limit_s = limit_s
        self._get_s = 0.0

    def fetch(self, step: int) -> Fetched:
        """Raises ``TransferError`` on every rank of the cohort when one of them fails or rows do not come in time."""
        partition = f"train_{step}"
        ready, columns, problem = time.perf_counter(), None, ""
        with ExitStack() as until_all_have_rows:
            if self._fetches:
                try:
                    client, meta = self._wait_for_rows(partition, until_all_have_rows)
                    ready = time.perf_counter()
                    columns = self._get(client, meta, partition)
                except Exception as exc:  # the cohort must hear of it, and has when each rank fetches
                    problem = describe(exc)
            if self._mode == "rank0":
                problem, columns = self._fan_out(problem, columns)
            if problem or columns is None:
                raise TransferError(f"fetch of partition {partition} failed: {problem}")
        return Fetched(rows.to_rows(columns), self._get_s, time.perf_counter() - ready - self._get_s)

    def _wait_for_rows(self, partition: str, until_all_have_rows: ExitStack) -> tuple[FetchClient, Any]:
        """Poll until there are rows for all that fetch; returns their metadata, and what to get them with."""

        def start_timer() -> None:
            until_all_have_rows.enter_context(accounting.fanout(self._mode, partition))

        mine = SimpleNamespace(get_meta=self._client.get_meta, get_data=self._timed_get)
        client = FetchClient(mine, Lockstep(self._in_step_with, self._limit_s), partition, start_timer)
        ends = time.perf_counter() + self._limit_s
        while True:
            meta = self._poll(client, partition)
            if meta is not None and meta.size:
                return client, meta
            if not self._in_step_with.minimum([time.perf_counter() < ends])[0]:
                raise TransferError(
                    f"partition {partition} was not complete within {self._limit_s:g} s: is the rollout still running?"
                )
            time.sleep(POLL_SECONDS)

    def _poll(self, client: FetchClient, partition: str) -> Any:
        sampling = {"dp_rank": self._comm.coords.dp, "task_name": TASK, "partition_id": partition, "batch_index": 0}
        return client.get_meta(
            data_fields=list(rows.FIELDS),
            batch_size=self._batch_size,
            partition_id=partition,
            task_name=TASK,
            sampling_config=sampling,
        )

    def _timed_get(self, meta: Any) -> Any:
        """This rank's own; the wait for the others comes after it."""
        began = time.perf_counter()
        data = self._client.get_data(meta)
        self._get_s = time.perf_counter() - began
        return data

    @staticmethod
    def _get(client: FetchClient, meta: Any, partition: str) -> Columns:
        data = client.get_data(meta)
        with accounting.stage("rebuild", partition):
            return rows.to_columns(data)

    def _fan_out(self, problem: str, columns: Columns | None) -> tuple[str, Columns | None]:
        """Multimodal dicts travel as a description and raw tensors, everything else as one object."""
        tensors: list[torch.Tensor] = []
        head: Any = (problem, None, None, None)
        if columns is not None:
            light = {name: values for name, values in columns.items() if name != rows.MULTIMODAL}
            spec, tensors = describe_tensors(columns[rows.MULTIMODAL])
            head = (problem, list(columns), light, spec)
        problem, names, light, spec = self._broadcast(head)
        if problem:
            return problem, None
        sent = iter(tensors)
        filled: list[torch.Tensor] = []
        for entry in spec:
            for _, dtype, shape in entry or ():
                tensor = next(sent).contiguous() if columns is not None else torch.empty(shape, dtype=dtype)
                for axis in self._hops():
                    self._comm.broadcast_bytes(tensor, axis)
                filled.append(tensor)
        light[rows.MULTIMODAL] = restore(spec, filled) if columns is None else columns[rows.MULTIMODAL]
        return "", {name: light[name] for name in names}

    def _broadcast(self, value: Any) -> Any:
        for axis in self._hops():
            value = self._comm.broadcast_object(value, axis)
        return value

    def _hops(self) -> Sequence[Axis]:
        """CP -> TP -> PP, each hop from ranks that already hold the payload."""
        coords = self._comm.coords
        if coords.pp:
            return ("pp",)
        return ("tp", "pp") if coords.tp else ("cp", "tp", "pp")


Spec = list[list[tuple[str, torch.dtype, tuple[int, ...]]] | None]
"""Per row ``None``, or key, dtype and shape of each tensor in the order of the dict."""


def describe_tensors(entries: Sequence[dict[str, torch.Tensor] | None]) -> tuple[Spec, list[torch.Tensor]]:
    """Split multimodal dicts into a small description and their tensors, both in traversal order."""
    spec: Spec = []
    tensors: list[torch.Tensor] = []
    for entry in entries:
        if entry is None:
            spec.append(None)
            continue
        spec.append([(key, tensor.dtype, tuple(tensor.shape)) for key, tensor in entry.items()])
        tensors.extend(entry.values())
    return spec, tensors


def restore(spec: Spec, tensors: Sequence[torch.Tensor]) -> list[dict[str, torch.Tensor] | None]:
    """Inverse of :func:`describe_tensors`."""
    source = iter(tensors)
    return [None if entry is None else {key: next(source) for key, _, _ in entry} for entry in spec]
