"""The host's entry point: where the launcher hands over."""

from __future__ import annotations

import argparse
import importlib
import importlib.util

from relax_tq_rdma.errors import StartError
from relax_tq_rdma.seams.host_code import has_module

MODULE = "relax.entrypoints.train"


def file() -> str:
    """Path of the host's entry point: what ``sys.argv[0]`` is when Python runs it.

    Raises:
        StartError: there is no host here.
    """
    try:
        spec = importlib.util.find_spec(MODULE) if has_module(MODULE) else None
    except ImportError as exc:
        raise StartError(
            f"Relax cannot be imported here ({exc}): run this in the environment in which "
            f"python -m {MODULE} starts your job"
        ) from None
    if spec is None or spec.origin is None:
        raise StartError(
            f"Relax is not installed here (no module {MODULE}): run this in the environment, and in the folder, in "
            f"which python -m {MODULE} starts your job"
        )
    return spec.origin


def start(args: argparse.Namespace) -> None:
    """Run the job. The host may end the process itself, with its own exit code."""
    importlib.import_module(MODULE).main(args)
