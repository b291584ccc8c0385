"""How a cohort gets its rows, the way the host does it: one rank fetches and broadcasts CP -> TP -> PP, or every rank
fetches for itself. Either way the ranks agree before they enter a collective, so none is left alone in one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from relax_tq_rdma import accounting
from relax_tq_rdma.accounting import FanoutMode
from relax_tq_rdma.demo import rows
from relax_tq_rdma.demo.comm import Comm
from relax_tq_rdma.demo.mesh import Axis
from relax_tq_rdma.errors import DataplaneError, TransferError

TASK = "actor_train"
POLL_SECONDS = 0.02
Columns = dict[str, list[Any]]


@dataclass(frozen=True)
class Fetched:
    """Rows of one cohort in sample order. ``get_s`` is spent in ``get_data`` (0 on a rank that did not fetch),
    ``fanout_s`` in broadcasts or in waiting for the slowest rank; the wait until rows exist is in neither."""

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
        self._limit_s = limit_s

    def fetch(self, step: int) -> Fetched:
        """Raises ``TransferError`` on every rank of the cohort when one of them fails or rows do not come in time."""
        partition = f"train_{step}"
        meta = self._wait_for_rows(partition)
        ready = time.perf_counter()
        with accounting.fanout(self._mode, partition):
            mine, get_s = self._get(meta, partition)
            columns = self._fan_out(mine) if self._mode == "rank0" else mine
        fanned_out = time.perf_counter()
        assert columns is not None
        return Fetched(rows.to_rows(columns), get_s, fanned_out - ready - get_s)

    def _wait_for_rows(self, partition: str) -> Any:
        """Poll in step until every rank that fetches has its metadata; returns this rank's, ``None`` if it has none.

        The sampler hands all ranks of a DP group the same rows, but it does not remember "nothing yet": one rank may
        be told so just before the next one gets rows. Without agreement the ranks would part here.
        """
        ends = time.perf_counter() + self._limit_s
        meta = None
        while True:
            problem = ""
            if self._fetches and meta is None:
                try:
                    meta = self._poll(partition)
                except Exception as exc:  # the cohort must hear of it
                    problem = _describe(exc)
            has_all = meta is not None or not self._fetches
            healthy, complete, timely = self._comm.minimum([not problem, has_all, time.perf_counter() < ends], "cohort")
            if not healthy:
                raise self._failure(partition, problem)
            if complete:
                return meta
            if not timely:
                raise TransferError(
                    f"partition {partition} was not complete within {self._limit_s:g} s: is the rollout still running?"
                )
            time.sleep(POLL_SECONDS)

    def _poll(self, partition: str) -> Any:
        sampling = {"dp_rank": self._comm.coords.dp, "task_name": TASK, "partition_id": partition, "batch_index": 0}
        with accounting.stage("get_meta", partition):
            meta = self._client.get_meta(
                data_fields=list(rows.FIELDS),
                batch_size=self._batch_size,
                partition_id=partition,
                task_name=TASK,
                sampling_config=sampling,
            )
        return None if meta is None or meta.size == 0 else meta

    def _get(self, meta: Any, partition: str) -> tuple[Columns | None, float]:
        """This rank's own fetch, if it does one, and its seconds."""
        started = time.perf_counter()
        columns, problem = None, ""
        if self._fetches:
            try:
                data = self._client.get_data(meta)
                with accounting.stage("rebuild", partition):
                    columns = rows.to_columns(data)
            except Exception as exc:  # the cohort must hear of it
                problem = _describe(exc)
        seconds = time.perf_counter() - started
        if not self._comm.minimum([not problem], "cohort")[0]:
            raise self._failure(partition, problem)
        return columns, seconds if self._fetches else 0.0

    def _failure(self, partition: str, problem: str) -> TransferError:
        """The same sentence on every rank; collective."""
        said = next(text for text in self._comm.gather(problem, "cohort") if text)
        return TransferError(f"fetch of partition {partition} failed: {said}")

    def _fan_out(self, columns: Columns | None) -> Columns:
        """Multimodal dicts travel as a description and raw tensors, everything else as one object."""
        tensors: list[torch.Tensor] = []
        head = None
        if columns is not None:
            light = {name: values for name, values in columns.items() if name != rows.MULTIMODAL}
            spec, tensors = describe(columns[rows.MULTIMODAL])
            head = (list(columns), light, spec)
        names, light, spec = self._broadcast(head)
        sent = iter(tensors)
        filled: list[torch.Tensor] = []
        for entry in spec:
            for _, dtype, shape in entry or ():
                tensor = next(sent).contiguous() if columns is not None else torch.empty(shape, dtype=dtype)
                for axis in self._hops():
                    self._comm.broadcast_bytes(tensor, axis)
                filled.append(tensor)
        light[rows.MULTIMODAL] = restore(spec, filled) if columns is None else columns[rows.MULTIMODAL]
        return {name: light[name] for name in names}

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


def describe(entries: Sequence[dict[str, torch.Tensor] | None]) -> tuple[Spec, list[torch.Tensor]]:
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
    """Inverse of :func:`describe`."""
    source = iter(tensors)
    return [None if entry is None else {key: next(source) for key, _, _ in entry} for entry in spec]


def _describe(exc: Exception) -> str:
    return str(exc) if isinstance(exc, DataplaneError) else f"{type(exc).__name__}: {exc}"
