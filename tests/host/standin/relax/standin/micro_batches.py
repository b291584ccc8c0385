"""Iterators over the micro-batches of a training step."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from megatron.core import mpu

MAX_EMPTY_SLEEP = 0.2


class MicroBatchListIterator:
    """Iterates a fixed list of packed micro-batches; those from ``dummy_after`` on count for nothing."""

    def __init__(
        self, mbs: list[tuple[dict[str, Any], Any]], dummy_after: int | None = None, loss_scale: float | None = None
    ) -> None:
        self.mbs, self.dummy_after, self.loss_scale, self.offset = mbs, dummy_after, loss_scale, 0

    def __iter__(self) -> MicroBatchListIterator:
        self.offset = 0
        return self

    def __next__(self) -> tuple[dict[str, Any], Any]:
        if self.offset >= len(self.mbs):
            raise StopIteration
        data, meta = self.mbs[self.offset]
        batch = dict(data)
        if self.loss_scale is not None:
            batch["__loss_scale__"] = self.loss_scale
        if self.dummy_after is not None and self.offset >= self.dummy_after:
            batch["__is_dummy__"] = True
        self.offset += 1
        return batch, meta

    def get_buffer(self) -> list[tuple[dict[str, Any], Any]]:
        return self.mbs

    def step(self, partition_id: str) -> None:
        """A new iterator is made for each rollout."""


class StreamingIterator:
    """Yields micro-batches of one training step as soon as rows are ready; keeps every one of them until the step ends.

    While a micro-batch is trained on, a thread already asks for the metadata of the next one, so the client is used
    from two threads. ``quota``: rows of the step; ``least_rows``: of one micro-batch.
    """

    def __init__(
        self,
        args: Namespace,
        tq_client: Any,
        data_fields: list[str],
        rollout_id: int,
        token_budget: int | None,
        loss_scale: float | None,
        all_consumed_fn: Callable[..., bool],
        dp_rank: int,
        dp_size: int,
        task_name: str = "actor_train",
        *,
        fetch: Callable[..., Any],
        quota: int | None,
        least_rows: int,
        max_stream_stall_s: float = 120.0,
    ) -> None:
        self._args, self._client, self._fields = args, tq_client, list(data_fields)
        self._partition, self._task = f"train_{rollout_id}", task_name
        self._token_budget, self._loss_scale = token_budget, loss_scale
        self._all_consumed_fn = all_consumed_fn
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._quota, self._batch_index = quota, 0
        self._stall_s = max_stream_stall_s
        self._fetch, self._batch_size = fetch, least_rows
        self._rows = 0
        self._buffer: list[tuple[dict[str, Any], Any]] = []
        self._warmer = ThreadPoolExecutor(1, thread_name_prefix="warm-get-meta")
        self._warmed: Future[Any] | None = None

    def __iter__(self) -> StreamingIterator:
        return self

    def __next__(self) -> tuple[dict[str, Any], Any]:
        ends, sleep = time.monotonic() + self._stall_s, 0.01
        while self._quota is None or self._rows < self._quota:
            if self._warmed is not None:
                self._warmed.result()
                self._warmed = None
            data, meta = self._fetch(
                args=self._args,
                tq_client=self._client,
                data_fields=self._fields,
                batch_size=self._batch_size,
                partition_id=self._partition,
                task_name=self._task,
                sampling_config=self._sampling_config,
                batch_index=self._batch_index,
                broadcast_pp=False,
                token_budget=self._token_budget,
            )
            if data is not None:
                return self._taken(data, meta)
            if self._quota is None and self._all_consumed_fn(self._task, self._partition):
                break
            if time.monotonic() > ends:
                raise RuntimeError(f"{self._task}: no row of {self._partition} came within {self._stall_s:g} s")
            time.sleep(sleep)
            sleep = min(2 * sleep, MAX_EMPTY_SLEEP)
        self._warmer.shutdown()
        raise StopIteration

    @property
    def _sampling_config(self) -> dict[str, Any]:
        return {"dp_rank": self._dp_rank, "task_name": self._task, "dp_size": self._dp_size}

    def _taken(self, data: dict[str, Any], meta: Any) -> tuple[dict[str, Any], Any]:
        self._rows += meta.size
        self._batch_index += 1
        if self._loss_scale is not None:
            data["__loss_scale__"] = self._loss_scale
        self._buffer.append((data, meta))
        if self._quota is None or self._rows < self._quota:
            self._warm()
        return data, meta

    def _warm(self) -> None:
        if mpu.get_tensor_model_parallel_rank() or mpu.get_context_parallel_rank():
            return
        config = {
            **self._sampling_config,
            "batch_index": self._batch_index,
            "partition_id": self._partition,
            "token_budget": self._token_budget,
        }
        self._warmed = self._warmer.submit(
            self._client.get_meta,
            data_fields=self._fields,
            batch_size=self._batch_size,
            partition_id=self._partition,
            task_name=self._task,
            sampling_config=config,
        )

    def get_buffer(self) -> list[tuple[dict[str, Any], Any]]:
        return self._buffer

    def step(self, partition_id: str) -> None:
        """A new iterator is made for each rollout."""
