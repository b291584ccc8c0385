"""Performance metrics of a step."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from relax.standin.line import NEW
from relax.utils import tracking_utils
from relax.utils.timer import Timer

if NEW:

    def log_perf_data_raw(
        rollout_id: int,
        args: Namespace,
        is_primary_rank: bool,
        flops_counter: Any = None,
        world_size: int = 1,
        extra_metrics: dict[str, float] | None = None,
    ) -> None:
        """Every timer as ``perf/<name>_time`` from the primary rank; the timer starts afresh on all."""
        _log(rollout_id, args, is_primary_rank, extra_metrics or {})

else:

    def log_perf_data_raw(
        rollout_id: int, args: Namespace, is_primary_rank: bool, flops_counter: Any = None, world_size: int = 1
    ) -> None:
        """Every timer as ``perf/<name>_time`` from the primary rank; the timer starts afresh on all."""
        _log(rollout_id, args, is_primary_rank, {})


def _log(rollout_id: int, args: Namespace, is_primary_rank: bool, extra: dict[str, float]) -> None:
    timers = Timer().log_dict()
    Timer().reset()
    if is_primary_rank:
        metrics = {f"perf/{name}_time": seconds for name, seconds in timers.items()}
        tracking_utils.log(args, {**metrics, **extra, "rollout/step": rollout_id}, step_key="rollout/step")
