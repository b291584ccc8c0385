"""Samples to rows, rows to the data system, and the environment of workers."""

from __future__ import annotations

import inspect
import logging
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from relax.standin.line import LINE, NEW, WITH
from relax.utils.env import Envs, validate_env
from relax.utils.misc import load_function
from relax.utils.types import Sample
from relax_tq_rdma.demo import prompts

logger = logging.getLogger(__name__)

CURRENT_ROLLOUT_BATCH: list[Sample] = []
MULTIMODAL = "multimodal_train_inputs"


# --- rows -------------------------------------------------------------------------------------------------------------


def post_process_rewards(args: Namespace, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """Raw rewards, and those centred and scaled within each group."""
    raw = [float(sample.reward) for sample in samples]
    shaped: list[float] = []
    for first in range(0, len(raw), args.n_samples_per_prompt):
        shaped.extend(prompts.group_advantages(raw[first : first + args.n_samples_per_prompt]))
    return raw, shaped


def convert_samples_to_train_data(args: Namespace, samples: list[Sample]) -> TensorDict:
    """One row a sample; loss masks that are missing or short are filled in on the samples."""
    custom = load_function(args.custom_convert_samples_to_train_data_path) if NEW else None
    if custom is not None:
        return custom(args, samples)
    raw, rewards = post_process_rewards(args, samples)
    for sample in samples:
        mask = sample.loss_mask or [1] * sample.response_length
        sample.loss_mask = mask + [0] * (sample.response_length - len(mask))
    data: dict[str, Any] = {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": rewards,
        "raw_reward": raw,
        "truncated": [int(sample.status is Sample.Status.TRUNCATED) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "loss_masks": [sample.loss_mask for sample in samples],
        "total_lengths": [len(sample.tokens) for sample in samples],
    }
    if NEW:
        data["group_index"] = [sample.group_index for sample in samples]
        data["sample_index_mask_sums"] = [sum(sample.loss_mask) for sample in samples]
    if samples[0].rollout_log_probs:
        data["rollout_log_probs"] = [sample.rollout_log_probs for sample in samples]
    if samples[0].rollout_routed_experts is not None:
        data["rollout_routed_experts"] = [sample.rollout_routed_experts for sample in samples]
    if args.multimodal_keys is not None:
        data[MULTIMODAL] = [sample.multimodal_train_inputs for sample in samples]
    return dict_to_tensordict(data)


def dict_to_tensordict(data: dict[str, Any], batch_size: int | None = None, device: Any = None) -> TensorDict:
    """Numbers become dense columns, lists jagged ones; multimodal dicts pass through as they are."""
    columns = {name: values if name == MULTIMODAL else _tensor(name, values) for name, values in data.items()}
    size = batch_size if batch_size is not None else len(next(iter(data.values())))
    return TensorDict(columns, batch_size=[size], device=device)


def _tensor(name: str, values: Any) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        return values
    if isinstance(values[0], (list, torch.Tensor)):
        dtype = torch.int32 if name == "rollout_routed_experts" else None
        return torch.nested.as_nested_tensor([torch.as_tensor(row, dtype=dtype) for row in values], layout=torch.jagged)
    return torch.tensor(values)


if NEW:

    def build_rollout_custom_meta(rollout_batch: Any) -> list[dict[str, int]]:
        """Per row, for samplers."""
        lengths, indices = rollout_batch["total_lengths"].tolist(), rollout_batch["sample_indices"].tolist()
        return [{"total_lengths": n, "sample_index": i} for n, i in zip(lengths, indices, strict=True)]


async def transfer_batch_to_data_system(
    args: Namespace,
    batch_samples: list[list[Sample]],
    batch_count: int,
    rollout_id: int,
    data_system_client: Any,
    is_last: bool = False,
) -> None:
    """Put whole groups into partition ``train_<rollout_id>``: rows of a group stay together, in their order."""
    try:
        groups = sorted(batch_samples, key=lambda group: group[0].index)
        samples = [sample for group in groups for sample in group]
        CURRENT_ROLLOUT_BATCH.extend(samples)
        batch = convert_samples_to_train_data(args, samples)
        meta = (
            build_rollout_custom_meta(batch) if NEW else [{"total_lengths": n} for n in batch["total_lengths"].tolist()]
        )
        await _put(data_system_client, batch, f"train_{rollout_id}", meta, is_last)
    except Exception:
        logger.exception("batch %d of rollout %d could not be put", batch_count, rollout_id)
        raise


async def _put(client: Any, data: TensorDict, partition_id: str, custom_meta: list[dict[str, int]], last: bool) -> None:
    """The host's TransferQueue takes the rows' metadata as keywords, the public one on the metadata of the put."""
    if "custom_meta" in inspect.signature(client.async_put).parameters:
        await client.async_put(data=data, partition_id=partition_id, custom_meta=custom_meta, is_last=last)
        return
    meta = await client.async_get_meta(
        data_fields=list(data.keys()), batch_size=data.batch_size[0], partition_id=partition_id, mode="insert"
    )
    meta.update_custom_meta(custom_meta)
    await client.async_put(data=data, metadata=meta)


def merge_dict_list(dict_list: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Column-wise: lists are joined, everything else is collected."""
    merged: dict[str, list[Any]] = {}
    for entry in dict_list:
        for name, value in entry.items():
            merged.setdefault(name, []).extend(value if isinstance(value, list) else [value])
    return merged


# --- job --------------------------------------------------------------------------------------------------------------


def compute_dp_size(config: Namespace) -> int:
    model_parallel = (
        config.tensor_model_parallel_size * config.pipeline_model_parallel_size * config.context_parallel_size
    )
    return config.actor_num_gpus_per_node * config.actor_num_nodes // model_parallel


def post_process_env(args: Namespace, env: dict[str, Any]) -> dict[str, Any]:
    """Complete the environment of all workers, in place."""
    variables = env.setdefault("env_vars", {})
    variables["TQ_PRE_ALLOC_SAMPLE_NUM"] = str(args.rollout_batch_size * args.n_samples_per_prompt)
    variables["TQ_ZERO_COPY_SERIALIZATION"] = "true"
    variables["SLIME_HOST_IP"] = "127.0.0.1"
    variables["STANDIN_LINE"], variables["STANDIN_WITH"] = LINE, ",".join(sorted(WITH))
    repository = str(Path(__file__).resolve().parents[2])
    paths = [repository, *_paths(os.environ.get("PYTHONPATH")), *_paths(variables.get("PYTHONPATH"))]
    variables["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    if os.environ.get("RELAX_EXTRA_MODULES"):
        variables["RELAX_EXTRA_MODULES"] = os.environ["RELAX_EXTRA_MODULES"]
    for name in str(Envs.RELAX_PROPAGATE_ENV_VARS).split(","):
        if name.strip() in os.environ:
            variables.setdefault(name.strip(), os.environ[name.strip()])
    if NEW:
        validate_env(variables)
    return env


def _paths(text: str | None) -> list[str]:
    return [path for path in (text or "").split(os.pathsep) if path]


def process_args(args: Namespace, role: str) -> None:
    """A role's own layout, in place. Here every role but the actor runs on one rank."""
    if role != "actor":
        args.tensor_model_parallel_size = args.pipeline_model_parallel_size = args.context_parallel_size = 1
        args.load = None
