"""How a rollout function is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def call_rollout_fn(
    fn: Callable[..., Any], args: Any, rollout_id: int, data_source: Any, client: Any, evaluation: bool = False
) -> Any:
    return fn(args, rollout_id, data_source, client, evaluation=evaluation)
