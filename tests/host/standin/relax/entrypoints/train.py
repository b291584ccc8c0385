"""The driver of a job: ``python -m relax.entrypoints.train <arguments>``."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
from argparse import Namespace
from typing import Any

from relax.standin.line import NEW
from relax.utils import try_import_telemetry_hook

if NEW:
    try_import_telemetry_hook()

from relax.core.controller import Controller, start_ray
from relax.utils.arguments import parse_args
from relax.utils.tracking_utils import init_tracking
from relax.utils.utils import post_process_env

logger = logging.getLogger(__name__)
_shut_down = False


def _graceful_shutdown(controller: Controller) -> None:
    """Once, whoever asks first: a signal, the end of the process, or the end of training."""
    global _shut_down
    if _shut_down:
        return
    _shut_down = True
    import ray

    controller.shutdown()
    ray.shutdown()


def _hard_exit(code: int) -> None:
    """The newest host leaves without running exit handlers."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(args: Namespace) -> None:
    import ray

    runtime_env = post_process_env(args, {"env_vars": {"TOKENIZERS_PARALLELISM": "false"}})
    if not ray.is_initialized():
        start_ray(runtime_env)
    init_tracking(args)
    controller = Controller(args, runtime_env)

    def on_signal(signum: int, frame: Any) -> None:
        _graceful_shutdown(controller)
        _leave(128 + signum)

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    atexit.register(_graceful_shutdown, controller)
    code = 0
    try:
        controller.training_loop()
    except Exception:
        logger.exception("training failed")
        code = 1
    _graceful_shutdown(controller)
    _leave(code)


def _leave(code: int) -> None:
    if NEW:
        _hard_exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main(parse_args())
