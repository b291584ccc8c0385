"""How a cohort gets its rows: one rank fetches and broadcasts, or every rank fetches for itself."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from tensordict.tensorclass import NonTensorData
from transfer_queue.dataloader.streaming_dataloader import StreamingDataLoader
from transfer_queue.dataloader.streaming_dataset import StreamingDataset

from relax.standin.line import NEW
from relax.utils import device as device_utils
from relax.utils.env import Envs
from relax.utils.timer import timer

MULTIMODAL = "multimodal_train_inputs"


# --- one fetch --------------------------------------------------------------------------------------------------------


def _fetch(
    args: Namespace,
    tq_client: Any,
    data_fields: list[str],
    batch_size: int,
    partition_id: str,
    task_name: str,
    sampling_config: dict[str, Any],
    batch_index: int,
    token_budget: int | None,
) -> list[Any]:
    """``[TensorDict, BatchMeta]`` of this rank's own fetch, or ``[None, empty meta]``."""
    config = {**sampling_config, "batch_index": batch_index, "partition_id": partition_id, "task_name": task_name}
    if token_budget is not None:
        config["token_budget"] = token_budget  # the public TransferQueue has no argument of its own for it
    meta = tq_client.get_meta(
        data_fields=data_fields,
        batch_size=batch_size,
        partition_id=partition_id,
        task_name=task_name,
        sampling_config=config,
    )
    return [tq_client.get_data(meta), meta] if meta is not None and meta.size > 0 else [None, meta]


def _get_data(
    args: Namespace,
    tq_client: Any,
    data_fields: list[str],
    batch_size: int,
    partition_id: str,
    task_name: str,
    sampling_config: dict[str, Any],
    batch_index: int,
    broadcast_pp: bool,
    per_rank_fetch: bool,
    token_budget: int | None,
    post_process: bool,
    agree: bool,
) -> tuple[dict[str, Any] | None, Any]:
    is_first = mpu.get_tensor_model_parallel_rank() == 0 and mpu.get_context_parallel_rank() == 0
    if broadcast_pp:
        is_first = is_first and mpu.get_pipeline_model_parallel_rank() == 0

    def fetch_once() -> list[Any]:
        return _fetch(
            args,
            tq_client,
            data_fields,
            batch_size,
            partition_id,
            task_name,
            sampling_config,
            batch_index,
            token_budget,
        )

    rollout_data: list[Any] = [None, None]
    if per_rank_fetch:
        with timer("per_rank_fetch"):
            rollout_data = fetch_once()
            if agree:
                rollout_data = _agree_on_fetch(rollout_data, fetch_once, broadcast_pp, f"{task_name} of {partition_id}")
    elif is_first:
        with timer("tgd_fetch"):
            rollout_data = fetch_once()

    spec, tensors = None, []
    if rollout_data[0] is not None:
        columns = _to_columns(rollout_data[0])
        if not per_rank_fetch and MULTIMODAL in columns:
            spec, tensors = _encode_multimodal_inputs(columns.pop(MULTIMODAL))
        rollout_data[0] = columns
    if not per_rank_fetch:
        data, meta, spec = _broadcast_objects([*rollout_data, spec], broadcast_pp)
        rollout_data = [data, meta]
        with timer("tgd_bcast_mm"):
            restored = _broadcast_multimodal_inputs(
                spec, tensors, is_first, device_utils.make_current_torch_device(), broadcast_pp
            )
        if restored is not None:
            rollout_data[0][MULTIMODAL] = restored

    data, meta = rollout_data
    if data is None:
        return None, meta if NEW else None
    if post_process:
        post_process_rollout_data(args, data)
    return data, meta


if NEW:

    def get_data_from_transfer_queue(
        args: Namespace,
        tq_client: Any,
        data_fields: list[str],
        batch_size: int,
        partition_id: str,
        task_name: str,
        sampling_config: dict[str, Any],
        batch_index: int,
        broadcast_pp: bool = True,
        per_rank_fetch: bool = False,
        token_budget: int | None = None,
        allow_underfill: bool = True,
        post_process: bool = True,
        synchronize_per_rank_fetch: bool = True,
    ) -> tuple[dict[str, Any] | None, Any]:
        """``(columns, BatchMeta)``, or ``(None, empty meta)`` while nothing is ready."""
        return _get_data(
            args,
            tq_client,
            data_fields,
            batch_size,
            partition_id,
            task_name,
            sampling_config,
            batch_index,
            broadcast_pp,
            per_rank_fetch,
            token_budget,
            post_process,
            agree=synchronize_per_rank_fetch,
        )

    def _agree_on_fetch(
        rollout_data: list[Any], fetch_once: Callable[[], list[Any]], include_pipeline: bool, context: str
    ) -> list[Any]:
        """Ranks that were told "nothing yet" fetch again while others hold rows, until all or none do."""
        groups = [mpu.get_tensor_and_context_parallel_group()]
        if include_pipeline:
            groups.append(mpu.get_pipeline_model_parallel_group())
        for _ in range(int(Envs.RELAX_FETCH_SPLIT_MAX_RETRIES) + 1):
            has_rows = rollout_data[0] is not None
            tally = torch.tensor([int(has_rows), int(not has_rows)])
            for group in groups:
                dist.all_reduce(tally, group=group)
            with_rows, without = tally.tolist()
            if not with_rows or not without:
                return rollout_data
            if not has_rows:
                time.sleep(0.05)
                rollout_data = fetch_once()
        raise RuntimeError(f"per-rank fetch, {context}: {with_rows} ranks have rows and {without} have none")

else:

    def get_data_from_transfer_queue(
        args: Namespace,
        tq_client: Any,
        data_fields: list[str],
        batch_size: int,
        partition_id: str,
        task_name: str,
        sampling_config: dict[str, Any],
        batch_index: int,
        broadcast_pp: bool = True,
        per_rank_fetch: bool = False,
        token_budget: int | None = None,
        allow_underfill: bool = True,
    ) -> tuple[dict[str, Any] | None, Any]:
        """``(columns, BatchMeta)``, or ``(None, None)`` while nothing is ready. Per rank, nobody agrees on that."""
        return _get_data(
            args,
            tq_client,
            data_fields,
            batch_size,
            partition_id,
            task_name,
            sampling_config,
            batch_index,
            broadcast_pp,
            per_rank_fetch,
            token_budget,
            post_process=True,
            agree=False,
        )


def _to_columns(data: Any) -> dict[str, Any]:
    return {name: _column(name, data[name]) for name in data.keys()}  # noqa: SIM118 (a TensorDict iterates rows)


def _column(name: str, values: Any) -> list[Any]:
    if name == MULTIMODAL:
        return [_multimodal_entry(value) for value in values]
    if "lengths" in name or "reward" in name:
        return list(values.reshape(-1).tolist())
    if isinstance(values, torch.Tensor):
        return [row.clone() for row in values.unbind()]
    raise TypeError(f"column {name} is a {type(values).__name__}, expected a tensor")


def _multimodal_entry(value: Any) -> dict[str, Any] | None:
    plain = value.data if isinstance(value, NonTensorData) else value
    if plain is None or isinstance(plain, dict):
        return plain
    if hasattr(plain, "items"):
        return dict(plain.items())
    raise TypeError(f"a row of {MULTIMODAL} is a {type(plain).__name__}, expected a dict or None")


def post_process_rollout_data(args: Namespace, rollout_data: dict[str, Any]) -> None:
    """Tokens and masks go to the device, multimodal inputs stay on the host."""
    device = device_utils.make_current_torch_device()
    for name in ("tokens", "loss_masks"):
        if name in rollout_data:
            rollout_data[name] = [row.to(device) for row in rollout_data[name]]


# --- broadcast --------------------------------------------------------------------------------------------------------


def _hops(broadcast_pp: bool) -> list[tuple[Any, int, int]]:
    """Group, its first rank and its size for CP, TP and, where stages share a fetch, PP: in this order."""
    groups = [mpu.get_context_parallel_group(), mpu.get_tensor_model_parallel_group()]
    if broadcast_pp:
        groups.append(mpu.get_pipeline_model_parallel_group())
    return [(group, dist.get_process_group_ranks(group)[0], dist.get_world_size(group)) for group in groups]


def _broadcast_objects(values: list[Any], broadcast_pp: bool) -> list[Any]:
    for (group, source, size), name in zip(_hops(broadcast_pp), ("cp", "tp", "pp"), strict=False):
        if size > 1:
            with timer(f"tgd_bcast_{name}"):
                dist.broadcast_object_list(values, src=source, group=group)
    return values


def _encode_multimodal_inputs(mm_list: list[Any]) -> tuple[list[Any], list[torch.Tensor]]:
    """A description that mirrors the list, and its tensors in traversal order."""
    tensors: list[torch.Tensor] = []

    def describe(value: Any) -> dict[str, Any]:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return {"t": "tensor", "dtype": value.dtype, "shape": tuple(value.shape)}
        if isinstance(value, list) and value and all(isinstance(entry, torch.Tensor) for entry in value):
            return {"t": "list", "items": [describe(entry) for entry in value]}
        return {"t": "raw", "value": value}

    spec = [None if entry is None else {key: describe(value) for key, value in entry.items()} for entry in mm_list]
    return spec, tensors


def _broadcast_multimodal_inputs(
    spec: list[Any] | None, send_tensors: list[torch.Tensor], is_src: bool, cuda_dev: torch.device, broadcast_pp: bool
) -> list[Any] | None:
    if spec is None:
        return None
    source = iter(send_tensors)

    def receive(entry: dict[str, Any]) -> Any:
        if entry["t"] == "raw":
            return entry["value"]
        if entry["t"] == "list":
            return [receive(item) for item in entry["items"]]
        tensor = next(source) if is_src else None
        return _bcast_known_tensor(tensor, is_src, entry["dtype"], entry["shape"], cuda_dev, broadcast_pp)

    return [None if entry is None else {key: receive(value) for key, value in entry.items()} for entry in spec]


def _bcast_known_tensor(
    tensor: torch.Tensor | None,
    is_src: bool,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    cuda_dev: torch.device,
    broadcast_pp: bool,
) -> torch.Tensor:
    """CP, TP, then PP; where nobody else listens, the tensor itself comes back."""
    hops = [hop for hop in _hops(broadcast_pp) if hop[2] > 1]
    if not hops and tensor is not None:
        return tensor
    moved = tensor.contiguous().clone() if tensor is not None else torch.empty(shape, dtype=dtype, device=cuda_dev)
    if moved.numel():
        for group, source, _ in hops:
            dist.broadcast(moved.reshape(-1).view(torch.uint8), src=source, group=group)
    return moved


# --- micro-batches ----------------------------------------------------------------------------------------------------


def split_dict(data_dict: dict[str, Any], batch_meta: Any, micro_batch_size: int) -> list[tuple[dict[str, Any], Any]]:
    """Cut a batch into micro-batches of ``micro_batch_size`` rows, each with its part of the metadata."""
    if micro_batch_size <= 0:
        raise ValueError("micro_batch_size must be above 0")
    count = -(-batch_meta.size // micro_batch_size)
    return [
        ({name: values[i * micro_batch_size : (i + 1) * micro_batch_size] for name, values in data_dict.items()}, meta)
        for i, meta in enumerate(batch_meta.chunk(count))
    ]


def create_stream_dataloader(
    args: Namespace, rollout_id: int, task_name: str, data_fields: list[str], dp_rank: int
) -> tuple[list[Any], list[int]]:
    """TransferQueue's own streaming loader over our fetch, one a virtual stage, and micro-batches a training step."""
    fetch = partial(get_data_from_transfer_queue, args=args, broadcast_pp=not args.fully_async)
    dataset = StreamingDataset(
        config=args.tq_config,
        batch_size=args.micro_batch_size * args.n_samples_per_prompt,
        micro_batch_size=args.micro_batch_size,
        data_fields=data_fields,
        partition_id=f"train_{rollout_id}",
        task_name=task_name,
        dp_rank=dp_rank,
        fetch_batch_fn=fetch,
        process_batch_fn=split_dict,
    )
    loader = StreamingDataLoader(dataset)
    steps = args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size
    per_step = args.global_batch_size // mpu.get_data_parallel_world_size() // args.micro_batch_size
    return [loader], [per_step] * steps


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


class _StreamingIterator:
    """Yields micro-batches of one training step as soon as rows are ready; keeps every one of them until the step ends.

    While a micro-batch is trained on, a thread already asks for the metadata of the next one, so the client is used
    from two threads.
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
        task_name: str,
        quota: int | None,
        rollout_mini_index: int,
        start_batch_index: int,
        max_empty_sleep: float,
        max_stream_stall_s: float,
    ) -> None:
        self._args, self._client, self._fields = args, tq_client, list(data_fields)
        self._partition, self._task = f"train_{rollout_id}", task_name
        self._token_budget, self._loss_scale = token_budget, loss_scale
        self._all_consumed_fn = all_consumed_fn
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._quota, self._mini_index = quota, rollout_mini_index
        self._batch_index = start_batch_index
        self._max_empty_sleep, self._stall_s = max_empty_sleep, max_stream_stall_s
        self._rows = 0
        self._buffer: list[tuple[dict[str, Any], Any]] = []
        self._warmer = ThreadPoolExecutor(1, thread_name_prefix="warm-get-meta")
        self._warmed: Future[Any] | None = None

    def __iter__(self) -> _StreamingIterator:
        return self

    def __next__(self) -> tuple[dict[str, Any], Any]:
        ends, sleep = time.monotonic() + self._stall_s, 0.01
        while self._quota is None or self._rows < self._quota:
            if self._warmed is not None:
                self._warmed.result()
                self._warmed = None
            data, meta = get_data_from_transfer_queue(
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
            sleep = min(2 * sleep, self._max_empty_sleep)
        self._warmer.shutdown()
        raise StopIteration

    @property
    def _batch_size(self) -> int:
        """Least number of rows: one where a token budget cuts (new), whole groups where the sampler knows only them."""
        return 1 if NEW else self._args.n_samples_per_prompt

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


if NEW:

    class StreamingTQIterator(_StreamingIterator):
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
            window_quota: int | None = None,
            rollout_mini_index: int = 0,
            start_batch_index: int = 0,
            max_empty_sleep: float = 0.2,
            max_stream_stall_s: float = 120.0,
            per_round_dummy: bool = False,
        ) -> None:
            super().__init__(
                args,
                tq_client,
                data_fields,
                rollout_id,
                token_budget,
                loss_scale,
                all_consumed_fn,
                dp_rank,
                dp_size,
                task_name,
                window_quota,
                rollout_mini_index,
                start_batch_index,
                max_empty_sleep,
                max_stream_stall_s,
            )

else:

    class StreamingTQIterator(_StreamingIterator):
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
            max_samples: int | None = None,
            rollout_mini_index: int = 0,
            start_batch_index: int = 0,
            overflow_buffer: list[Any] | None = None,
            max_empty_sleep: float = 0.2,
        ) -> None:
            super().__init__(
                args,
                tq_client,
                data_fields,
                rollout_id,
                token_budget,
                loss_scale,
                all_consumed_fn,
                dp_rank,
                dp_size,
                task_name,
                max_samples,
                rollout_mini_index,
                start_batch_index,
                max_empty_sleep,
                max_stream_stall_s=120.0,
            )
