"""Things that go wrong in a job, for the host's own dotted-path flags. A marker file remembers what has happened."""

from __future__ import annotations

import os
import signal
from argparse import Namespace
from pathlib import Path
from typing import Any

MARKER = "STANDIN_FAULT_MARKER"


def first_time() -> bool:
    """Whether this is the first call among all processes that share the file named by ``STANDIN_FAULT_MARKER``."""
    try:
        os.close(os.open(os.environ[MARKER], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def kill_last_rank(args: Namespace, rollout_id: int, rank: int) -> None:
    """For ``--custom-megatron-before-train-step-hook-path``: the last rank dies before it trains on rollout 1, while
    the others enter the collectives of that step."""
    if rollout_id == 1 and rank == args.world_size - 1 and first_time():
        os.kill(os.getpid(), signal.SIGKILL)


def reloading_rollout(
    args: Namespace, rollout_id: int, data_buffer: Any, data_system_client: Any, evaluation: bool = False
) -> Any:
    """For ``--rollout-function-path``: the host's own function, its module reloaded before each rollout but the
    first."""
    from relax.utils.misc import load_function
    from relax.utils.reload_utils import reload_function

    path = "relax.engine.rollout.sglang_rollout.generate_rollout"
    function = reload_function(path) if rollout_id > args.start_rollout_id else load_function(path)
    assert function is not None
    return function(args, rollout_id, data_buffer, data_system_client, evaluation=evaluation)


def dying_rollout(
    args: Namespace, rollout_id: int, data_buffer: Any, data_system_client: Any, evaluation: bool = False
) -> Any:
    """For ``--rollout-function-path``: the producer dies once rollout 1 has been put."""
    from relax.engine.rollout.sglang_rollout import generate_rollout

    done = generate_rollout(args, rollout_id, data_buffer, data_system_client, evaluation=evaluation)
    if rollout_id == 1 and first_time():
        os.kill(os.getpid(), signal.SIGKILL)
    return done


def marker_env(folder: Path) -> dict[str, str]:
    """Environment of a job that is to fail once."""
    return {MARKER: str(folder / "fault"), "RELAX_PROPAGATE_ENV_VARS": MARKER}
