"""One fetch of one rank, and what a cohort makes of it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from tensordict.tensorclass import NonTensorData
from transfer_queue.dataloader.streaming_dataloader import StreamingDataLoader
from transfer_queue.dataloader.streaming_dataset import StreamingDataset

from relax.standin.broadcast import _broadcast_multimodal_inputs, _encode_multimodal_inputs, broadcast_objects
from relax.utils import device as device_utils
from relax.utils.timer import timer

MULTIMODAL = "multimodal_train_inputs"
Agree = Callable[[list[Any], Callable[[], list[Any]], bool, str], list[Any]]


def get_data(
    args: Namespace,
    tq_client: Any,
    *,
    broadcast_pp: bool,
    per_rank_fetch: bool,
    post_process: bool,
    agree: Agree | None,
    **wanted: Any,
) -> tuple[dict[str, Any] | None, Any]:
    """``(columns, BatchMeta)``, or ``(None, empty meta)`` while nothing is ready: the same on both lines of the host.
    ``agree``: how ranks that fetch for themselves agree on what they have; ``None``: they do not. ``wanted``: of
    :func:`_fetch`."""
    is_first = mpu.get_tensor_model_parallel_rank() == 0 and mpu.get_context_parallel_rank() == 0
    if broadcast_pp:
        is_first = is_first and mpu.get_pipeline_model_parallel_rank() == 0

    fetch_once = partial(_fetch, tq_client, **wanted)
    rollout_data: list[Any] = [None, None]
    if per_rank_fetch:
        with timer("per_rank_fetch"):
            rollout_data = fetch_once()
            if agree is not None:
                what = f"{wanted['task_name']} of {wanted['partition_id']}"
                rollout_data = agree(rollout_data, fetch_once, broadcast_pp, what)
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
        data, meta, spec = broadcast_objects([*rollout_data, spec], broadcast_pp)
        rollout_data = [data, meta]
        with timer("tgd_bcast_mm"):
            restored = _broadcast_multimodal_inputs(
                spec, tensors, is_first, device_utils.make_current_torch_device(), broadcast_pp
            )
        if restored is not None:
            rollout_data[0][MULTIMODAL] = restored

    data, meta = rollout_data
    if data is None:
        return None, meta
    if post_process:
        post_process_rollout_data(args, data)
    return data, meta


def _fetch(
    tq_client: Any,
    *,
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


def split_dict(data_dict: dict[str, Any], batch_meta: Any, micro_batch_size: int) -> list[tuple[dict[str, Any], Any]]:
    """Cut a batch into micro-batches of ``micro_batch_size`` rows, each with its part of the metadata."""
    if micro_batch_size <= 0:
        raise ValueError("micro_batch_size must be above 0")
    count = -(-batch_meta.size // micro_batch_size)
    return [
        ({name: values[i * micro_batch_size : (i + 1) * micro_batch_size] for name, values in data_dict.items()}, meta)
        for i, meta in enumerate(batch_meta.chunk(count))
    ]


def stream_loader(
    args: Namespace,
    fetch: Callable[..., Any],
    rollout_id: int,
    task_name: str,
    data_fields: list[str],
    dp_rank: int,
) -> tuple[list[Any], list[int]]:
    """TransferQueue's own streaming loader over ``fetch``, one a virtual stage, and micro-batches a training step."""
    dataset = StreamingDataset(
        config=args.tq_config,
        batch_size=args.micro_batch_size * args.n_samples_per_prompt,
        micro_batch_size=args.micro_batch_size,
        data_fields=data_fields,
        partition_id=f"train_{rollout_id}",
        task_name=task_name,
        dp_rank=dp_rank,
        fetch_batch_fn=partial(fetch, args=args, broadcast_pp=not args.fully_async),
        process_batch_fn=split_dict,
    )
    steps = args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size
    per_step = args.global_batch_size // mpu.get_data_parallel_world_size() // args.micro_batch_size
    return [StreamingDataLoader(dataset)], [per_step] * steps
