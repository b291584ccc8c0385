"""Advantages and returns, on a CPU: a consumer and a producer of the data system at once."""

from __future__ import annotations

import asyncio
import time

import torch

import relax.backends.megatron  # noqa: F401  (its import is what brings the extra modules into this process)
from relax.components.base import Component
from relax.utils.training.data_fields import build_data_fields
from relax.utils.utils import dict_to_tensordict

TASK = "compute_advantages_and_returns"


class Advantages(Component):
    async def run(self) -> None:
        rows = self.config.rollout_batch_size * self.config.n_samples_per_prompt
        for rollout_id in range(self.config.start_rollout_id, self.config.num_rollout):
            done = 0
            while done < rows:
                done += await self._next_group(rollout_id)

    async def _next_group(self, rollout_id: int) -> int:
        partition = f"train_{rollout_id}"
        ends = time.monotonic() + self.config.standin_wait_seconds
        while True:
            meta = await self.data_system_client.async_get_meta(
                data_fields=build_data_fields(self.config, consumer="advantages"),
                batch_size=self.config.n_samples_per_prompt,
                partition_id=partition,
                task_name=TASK,
                sampling_config={"task_name": TASK, "partition_id": partition},
            )
            if meta.size > 0:
                break
            if time.monotonic() > ends:
                raise RuntimeError(f"{TASK}: no row of {partition} came in time")
            await asyncio.sleep(0.05)
        data = await self.data_system_client.async_get_data(meta)
        lengths = [int(n) for n in data["response_lengths"].reshape(-1)]
        rewards = data["rewards"].reshape(-1)
        spread = [torch.full((n,), float(reward)) for n, reward in zip(lengths, rewards, strict=True)]
        await self.data_system_client.async_put(
            data=dict_to_tensordict({"advantages": spread, "returns": spread}), metadata=meta
        )
        return int(meta.size)
