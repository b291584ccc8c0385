"""Who runs where, and who starts the actors of a role."""

from __future__ import annotations

from argparse import Namespace
from typing import Any


def create_placement_groups(args: Namespace) -> dict[str, Any]:
    """The stand-in reserves nothing: its machine has no GPU and two cores."""
    return {"actor": None, "rollout": None}


def allocate_train_group(
    args: Namespace, num_gpus: int, pg: Any, runtime_env: dict[str, Any] | None = None, role: str = "actor"
) -> Any:
    """The ranks of a role, not initialised yet. Importing their module imports Megatron's package here too."""
    from relax.distributed.ray.actor_group import RayTrainGroup

    return RayTrainGroup(args, num_gpus, pg, role=role, runtime_env=runtime_env)


def create_rollout_manager(
    args: Namespace, pg: Any, data_source: Any = None, runtime_env: dict[str, Any] | None = None
) -> Any:
    """On the head node, with the whole runtime environment."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from relax.distributed.ray.rollout import RolloutManager

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return RolloutManager.options(
        num_cpus=0, max_concurrency=16, scheduling_strategy=here, runtime_env=runtime_env
    ).remote(args, pg, data_source)
