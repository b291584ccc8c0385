"""Log-probs of the acting policy, recomputed by Megatron: a service with a rank of its own."""

from __future__ import annotations

import threading

from relax.components.base import Component
from relax.standin import engine


class ActorFwd(Component):
    def start(self) -> None:
        super().start()  # before the ranks exist, unlike the actor
        self.group = self.allocate()
        self.group.init()
        self._arrived = threading.Condition()
        self._weights: dict[int, engine.Weights] = {}

    def update_weights(self, version: int, weights: engine.Weights) -> None:
        with self._arrived:
            self._weights[version] = weights
            self._arrived.notify_all()

    def run(self) -> None:
        for rollout_id in range(self.config.start_rollout_id, self.config.num_rollout):
            version = engine.version_for(self.config, rollout_id)
            with self._arrived:
                limit = self.config.standin_wait_seconds
                if not self._arrived.wait_for(lambda v=version: v in self._weights, limit):
                    raise RuntimeError(f"the weights for rollout {rollout_id} did not come")
                weights = self._weights[version]
            self.group.call("set_weights", weights)
            self.group.call("compute_actor_log_prob", rollout_id)
