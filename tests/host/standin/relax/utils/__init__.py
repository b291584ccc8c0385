"""Hooks that the entry point calls."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from typing import Any

from relax.standin.line import NEW, more_paths

__path__ += more_paths("utils")


def try_import_telemetry_hook(logger: Any = None) -> None:
    """Import the module named by ``RELAX_TELEMETRY_HOOK`` unless it is there; whatever goes wrong is only a warning."""
    name = os.environ.get("RELAX_TELEMETRY_HOOK", "").strip()
    if not name or name in sys.modules or name.split(".")[0] in sys.modules:
        return
    try:
        importlib.import_module(name)
    except Exception as exc:
        (logger or logging.getLogger(__name__)).warning("telemetry hook %s was not imported: %s", name, exc)


if NEW:

    def report_train_start(config: Any) -> None:
        """Called once the services are registered; for telemetry hooks to replace."""
