"""The ranks of one role, driven in step."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import ray

from relax.backends.megatron.actor import MegatronTrainRayActor


class RayTrainGroup:
    def __init__(
        self, args: Namespace, num_gpus: int, pg: Any, role: str = "actor", runtime_env: dict[str, Any] | None = None
    ) -> None:
        self.args, self.role = args, role
        self._allocate_gpus_for_actor(num_gpus, runtime_env or {})

    def _allocate_gpus_for_actor(self, world_size: int, runtime_env: dict[str, Any]) -> None:
        """Ranks get environment variables only: the host's base, then the job's, then ``--train-env-vars``."""
        variables = {"OMP_NUM_THREADS": "1"}
        variables.update(runtime_env.get("env_vars", {}))
        variables.update({name: str(value) for name, value in self.args.train_env_vars.items()})
        remote = ray.remote(MegatronTrainRayActor).options(num_cpus=0, runtime_env={"env_vars": variables})
        self.actors = [remote.remote(world_size, rank) for rank in range(world_size)]

    def init(self, with_ref: bool = False) -> None:
        port = ray.get(self.actors[0].open_store.remote())
        self.call("init", self.args, self.role, with_ref, port=port)

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """On all ranks at once. The first failure is raised at once, while other ranks may wait in a collective."""
        pending = [getattr(actor, method).remote(*args, **kwargs) for actor in self.actors]
        results = list(pending)
        while pending:
            done, pending = ray.wait(pending, num_returns=1)
            ray.get(done)
        return ray.get(results)

    def pids(self) -> list[int]:
        return self.call("pid")

    def stop(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
