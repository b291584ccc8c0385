"""The producer process. ``RolloutManager`` is replaced by its decorator, so Ray ships the class by value."""

from __future__ import annotations

import asyncio
import os
import time
from argparse import Namespace
from typing import Any

import ray
import transfer_queue as tq

from relax.engine.rollout.base_types import call_rollout_fn
from relax.standin import engine, record
from relax.utils.misc import load_function
from relax.utils.reload_utils import ReloadableMixin

_PHASES = ("image_processor", "mm_encode", "generate", "post_generate")


def _aggregate_rollout_timing(samples: list[Any], get_samples_times: list[float]) -> dict[str, float]:
    """Mean and maximum of each phase over the samples that report it."""
    metrics: dict[str, float] = {}
    for phase in _PHASES:
        seconds = [s.metadata["_timing"][phase] for s in samples if phase in s.metadata.get("_timing", {})]
        if seconds:
            metrics[f"perf_detail/rollout/{phase}_time/mean"] = sum(seconds) / len(seconds)
            metrics[f"perf_detail/rollout/{phase}_time/max"] = max(seconds)
    return metrics


@ray.remote
class RolloutManager(ReloadableMixin):
    def __init__(self, args: Namespace, pg: Any, data_source: Any = None) -> None:
        self.args, self.pg = args, pg
        tq.init(args.tq_config)
        self.data_system_client = tq.get_client()
        record.write(args, "process", role="rollout_manager", rank=0)
        self.data_source = data_source
        self.generate_rollout = load_function(args.rollout_function_path)
        self.eval_generate_rollout = load_function(args.eval_function_path)

    async def generate(self, rollout_id: int) -> dict[str, float]:
        """Fill partition ``train_<rollout_id>``."""
        await self._weights_for(rollout_id)
        groups = await asyncio.to_thread(
            call_rollout_fn, self.generate_rollout, self.args, rollout_id, self.data_source, self.data_system_client
        )
        samples = [sample for group in groups for sample in group]
        metrics = {
            "rollout/raw_reward": sum(sample.reward for sample in samples) / len(samples),
            "rollout/aborts": float(sum(sample.abort_count for sample in samples)),
            **_aggregate_rollout_timing(samples, []),
        }
        extra = sorted(
            {name for sample in samples for name in sample.to_dict() if name not in type(sample).__dataclass_fields__}
        )
        calls = engine.Processor.calls
        record.write(self.args, "rollout", rollout_id=rollout_id, attributes=extra, processor_calls=calls, **metrics)
        return metrics

    async def eval(self, rollout_id: int) -> dict[str, float]:
        metrics = await asyncio.to_thread(
            call_rollout_fn,
            self.eval_generate_rollout,
            self.args,
            rollout_id,
            self.data_source,
            self.data_system_client,
            evaluation=True,
        )
        record.write(self.args, "eval", rollout_id=rollout_id, **metrics)
        return metrics

    async def update_weights(self, version: int, weights: engine.Weights) -> None:
        engine.update_weights(version, weights)

    async def dispose(self) -> None:
        """Stops the inference engines; the data system's client lives on."""
        engine.abort_all()

    async def pid(self) -> int:
        return os.getpid()

    async def _weights_for(self, rollout_id: int) -> None:
        ends = time.monotonic() + self.args.standin_wait_seconds
        while not engine.ready(self.args, rollout_id):
            if time.monotonic() > ends:
                raise RuntimeError(f"the weights for rollout {rollout_id} did not come")
            await asyncio.sleep(0.05)
