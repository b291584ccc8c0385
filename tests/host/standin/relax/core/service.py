"""A service of the job. The host runs it as a Ray Serve deployment, the stand-in as one Ray actor."""

from __future__ import annotations

from argparse import Namespace
from typing import Any


class Service:
    def __init__(
        self,
        cls: type,
        role: str,
        healthy: Any,
        config: Namespace,
        num_gpus: int = 0,
        data_source: Any = None,
        actor_rollout_pgs: Any = None,
        runtime_env: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        self.cls, self.role, self.config = cls, role, config
        self._healthy, self._pgs, self._num_gpus, self._more = healthy, actor_rollout_pgs, num_gpus, more
        self._data_source = data_source
        self._runtime_env = runtime_env or {}
        self.handle: Any = None
        self._deploy()

    def _deploy(self) -> None:
        import ray

        actor = ray.remote(self.cls).options(num_cpus=0, max_concurrency=4, runtime_env=self._runtime_env)
        if self.role == "rollout":
            self.handle = actor.remote(
                self._healthy, self._pgs, self.config, data_source=self._data_source, runtime_env=self._runtime_env
            )
        else:
            self.handle = actor.remote(
                self._healthy,
                self._pgs,
                self._num_gpus,
                self.config,
                self.role,
                runtime_env=self._runtime_env,
                **self._more,
            )

    def stop(self) -> None:
        import ray

        if self.handle is not None:
            ray.kill(self.handle)
        self.handle = None
