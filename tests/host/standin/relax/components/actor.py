"""The training service: drives the ranks, records each step, clears its partition, hands the weights on."""

from __future__ import annotations

from typing import Any

import ray

from relax.components.base import Component
from relax.standin import engine, record
from relax.utils.async_utils import run
from relax_tq_rdma.demo import digest, model
from relax_tq_rdma.demo.mesh import Mesh


class Actor(Component):
    def start(self) -> None:
        config, self.group = self.config, self.allocate()
        super().start()
        self.group.init()
        self.mesh = Mesh(
            tp=config.tensor_model_parallel_size,
            cp=config.context_parallel_size,
            pp=config.pipeline_model_parallel_size,
            dp=config.data_parallel_size,
        )

    def rank_pids(self) -> list[int]:
        return self.group.pids()

    def run(self, rollout_manager: Any, forward: Any = None) -> None:
        """Train every rollout. ``forward`` is the service that recomputes log-probs, if the job has one."""
        method = "train_hybrid" if self.config.hybrid else "train_async" if self.config.fully_async else "train"
        start = self.config.start_rollout_id
        for version in range(engine.version_for(self.config, start), start + 1):
            self._hand_on(version, self.group.call("weights", version), rollout_manager, forward)
        for rollout_id in range(self.config.start_rollout_id, self.config.num_rollout):
            results = self.group.call(method, rollout_id)
            self._record(rollout_id, results)
            run(self.data_system_client.async_clear_partition(partition_id=f"train_{rollout_id}"))
            self._hand_on(rollout_id + 1, [result["weights"] for result in results], rollout_manager, forward)

    def _hand_on(self, version: int, shards: list[model.Weights], rollout_manager: Any, forward: Any) -> None:
        by_tp: dict[int, list[model.Weights]] = {}
        for rank, shard in enumerate(shards):
            at = self.mesh.coords(rank)
            if at.dp == 0 and at.cp == 0:
                by_tp.setdefault(at.tp, []).append(shard)
        weights = ray.put(model.assemble(by_tp))
        targets = [target for target in (rollout_manager, forward) if target is not None]
        ray.get([target.update_weights.remote(version, weights) for target in targets])

    def _record(self, rollout_id: int, results: list[dict[str, Any]]) -> None:
        """One line a step. Ranks of one cohort must have received the same bytes."""
        rows: dict[int, tuple[bytes, bytes]] = {}
        reward = 0.0
        for rank, result in enumerate(results):
            first = self.mesh.rank(type(at := self.mesh.coords(rank))(tp=0, cp=0, dp=at.dp, pp=0))
            if result["digests"] != results[first]["digests"]:
                raise RuntimeError(f"step {rollout_id}: ranks {first} and {rank} received different bytes")
            if rank == first:
                rows.update(result["digests"])
                reward += result["reward"]
        order = sorted(rows)
        record.write(
            self.config,
            "step",
            step=rollout_id,
            loss=results[0]["loss"],
            grad_norm=results[0]["grad_norm"],
            reward=reward / len(order),
            rows=len(order),
            samples=order,
            text_digest=digest.combined(rows[index][0] for index in order),
            pixel_digest=digest.combined(rows[index][1] for index in order),
        )
