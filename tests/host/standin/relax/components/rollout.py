"""The rollout service: attaches to the data system, starts the producer, and drives it."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import ray
import transfer_queue as tq

from relax.distributed.ray.placement_group import create_rollout_manager
from relax.utils.misc import load_function


class Rollout:
    def __init__(
        self,
        healthy: Any,
        pg: Any,
        config: Namespace,
        data_source: Any = None,
        runtime_env: dict[str, Any] | None = None,
    ) -> None:
        self.config = config
        tq.init(config.tq_config)
        self.data_system_client = tq.get_client()
        self.data_source = data_source or _create_data_source(config)
        self.rollout_manager = create_rollout_manager(config, pg, self.data_source, runtime_env)

    def get_rollout_manager(self) -> Any:
        return self.rollout_manager

    def run(self) -> None:
        """Every rollout in turn; the manager waits for the weights of each."""
        every = self.config.eval_interval
        for rollout_id in range(self.config.start_rollout_id, self.config.num_rollout):
            ray.get(self.rollout_manager.generate.remote(rollout_id))
            if every and (rollout_id + 1) % every == 0:
                ray.get(self.rollout_manager.eval.remote(rollout_id))


def _create_data_source(config: Namespace) -> Any:
    """Without the data system's config: to unpickle its sampler is to import TransferQueue, which no source uses."""
    light = Namespace(**{name: value for name, value in vars(config).items() if name != "tq_config"})
    return ray.remote(load_function(config.data_source_path)).options(num_cpus=0).remote(light)
