"""How a cohort gets its rows, in mid 2026: ranks that fetch for themselves do not agree on whether there are any."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from relax.standin import fetch as shared
from relax.standin.broadcast import (
    _bcast_known_tensor,
    _broadcast_multimodal_inputs,
    _encode_multimodal_inputs,
)
from relax.standin.fetch import post_process_rollout_data, split_dict
from relax.standin.micro_batches import MicroBatchListIterator, StreamingIterator

__all__ = [
    "MicroBatchListIterator",
    "StreamingTQIterator",
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
) -> tuple[dict[str, Any] | None, Any]:
    """``(columns, BatchMeta)``, or ``(None, None)`` while nothing is ready."""
    data, meta = shared.get_data(
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
        post_process=True,
        agree=None,
    )
    return data, None if data is None else meta


def create_stream_dataloader(
    args: Namespace, rollout_id: int, task_name: str, data_fields: list[str], dp_rank: int
) -> tuple[list[Any], list[int]]:
    """Loaders and the number of micro-batches of each training step. Never per rank."""
    return shared.stream_loader(args, get_data_from_transfer_queue, rollout_id, task_name, data_fields, dp_rank)


class StreamingTQIterator(StreamingIterator):
    """A group or more at a time."""

    def __init__(self, args: Namespace, *rest: Any, max_samples: int | None = None, **named: Any) -> None:
        super().__init__(
            args,
            *rest,
            fetch=lambda **kw: get_data_from_transfer_queue(**kw),  # looked up at each call
            quota=max_samples,
            least_rows=args.n_samples_per_prompt,
            **named,
        )
