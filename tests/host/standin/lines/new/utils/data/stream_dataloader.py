"""How a cohort gets its rows, on the newest line: ranks that fetch for themselves agree on whether there are any."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from relax.standin import fetch as shared
from relax.standin.broadcast import (
    _bcast_known_tensor,
    _broadcast_multimodal_inputs,
    _encode_multimodal_inputs,
)
from relax.standin.fetch import post_process_rollout_data, split_dict
from relax.standin.micro_batches import MicroBatchListIterator, StreamingIterator
from relax.utils.env import Envs

__all__ = [
    "MicroBatchListIterator",
    "StreamingTQIterator",
    "_agree_on_fetch",
    "_bcast_known_tensor",
    "_broadcast_multimodal_inputs",
    "_encode_multimodal_inputs",
    "create_stream_dataloader",
    "get_data_from_transfer_queue",
    "post_process_rollout_data",
    "split_dict",
]


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
    return shared.get_data(
        args,
        tq_client,
        data_fields=data_fields,
        batch_size=batch_size,
        partition_id=partition_id,
        task_name=task_name,
        sampling_config=sampling_config,
        batch_index=batch_index,
        token_budget=token_budget,
        broadcast_pp=broadcast_pp,
        per_rank_fetch=per_rank_fetch,
        post_process=post_process,
        agree=_agree_on_fetch if synchronize_per_rank_fetch else None,
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


def create_stream_dataloader(
    args: Namespace, rollout_id: int, task_name: str, data_fields: list[str], dp_rank: int
) -> tuple[list[Any], list[int]]:
    """Loaders and the number of micro-batches of each training step. Never per rank."""
    return shared.stream_loader(args, get_data_from_transfer_queue, rollout_id, task_name, data_fields, dp_rank)


class StreamingTQIterator(StreamingIterator):
    """As soon as there is a row."""

    def __init__(self, args: Namespace, *rest: Any, window_quota: int | None = None, **named: Any) -> None:
        super().__init__(
            args,
            *rest,
            fetch=lambda **kw: get_data_from_transfer_queue(**kw),  # looked up at each call
            quota=window_quota,
            least_rows=1,
            **named,
        )
