"""What the host's services of ranks, and of advantages, are made with."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import transfer_queue as tq


class Component:
    """A service of the job, in a process of its own. It joins the data system when it is made."""

    def __init__(
        self,
        healthy: Any,
        pgs: Any,
        num_gpus: int,
        config: Namespace,
        role: str,
        runtime_env: dict[str, Any] | None = None,
    ) -> None:
        self.config, self.role = config, role
        self._num_gpus, self._pgs, self._runtime_env = num_gpus, pgs, runtime_env
        self.start()

    def start(self) -> None:
        tq.init(self.config.tq_config)
        self.data_system_client = tq.get_client()

    def allocate(self) -> Any:
        """The ranks of this service, not yet at work."""
        from relax.distributed.ray.placement_group import allocate_train_group

        return allocate_train_group(self.config, self._num_gpus, self._pgs, self._runtime_env, self.role)
