"""Megatron's own command line; the host's groups come in through ``extra_args_provider``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any


def megatron_parse_args(
    extra_args_provider: Callable[[argparse.ArgumentParser], argparse.ArgumentParser] | None = None,
    skip_hf_validate: bool = False,
    model_source: Any = None,
) -> argparse.Namespace:
    """Flags that nobody registered are dropped without a word."""
    parser = argparse.ArgumentParser(description="Megatron arguments", allow_abbrev=False)
    group = parser.add_argument_group("megatron")
    group.add_argument("--tensor-model-parallel-size", type=int, default=1)
    group.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    group.add_argument("--context-parallel-size", type=int, default=1)
    group.add_argument("--micro-batch-size", type=int, default=1)
    group.add_argument("--global-batch-size", type=int, default=None)
    group.add_argument("--seed", type=int, default=1234)
    group.add_argument("--lr", type=float, default=0.005)
    group.add_argument("--load", default=None)
    group.add_argument("--save", default=None)
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    args, _ = parser.parse_known_args()
    return args


def megatron_validate_args(args: argparse.Namespace) -> argparse.Namespace:
    """A completed namespace: not the one that came in."""
    validated = argparse.Namespace(**vars(args))
    world = validated.actor_num_nodes * validated.actor_num_gpus_per_node
    parallel = (
        validated.tensor_model_parallel_size * validated.pipeline_model_parallel_size * validated.context_parallel_size
    )
    if world % parallel:
        raise ValueError(f"world size {world} is not a multiple of TP x PP x CP = {parallel}")
    validated.world_size = world
    validated.data_parallel_size = world // parallel
    return validated
