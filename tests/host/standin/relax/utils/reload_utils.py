"""Hot reload of a job's own functions. Everything that was rebound in the module is lost with it."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from typing import Any, ClassVar

from relax.utils.misc import load_function

logger = logging.getLogger(__name__)


def reload_function(module_path: str) -> Callable[..., Any] | None:
    """Reload the module of ``package.module.name`` and return the function afresh; ``None`` when that fails."""
    try:
        name = module_path.rpartition(".")[0]
        if name in sys.modules:
            importlib.reload(sys.modules[name])
        return load_function(module_path)
    except Exception as exc:
        logger.error("reload of %s failed: %s", module_path, exc)
        return None


class ReloadableMixin:
    """For actors whose ``args`` name their functions as ``<module_name>_path`` and which hold them in attributes."""

    _RELOADABLE_MODULES: ClassVar[dict[str, str]] = {
        "rollout_function": "generate_rollout",
        "eval_function": "eval_generate_rollout",
    }

    def reload_module(self, module_name: str, module_path: str | None = None) -> dict[str, Any]:
        attribute = self._RELOADABLE_MODULES.get(module_name)
        if attribute is None:
            return {"success": False, "message": f"{module_name} cannot be reloaded"}
        path = module_path or getattr(self.args, f"{module_name}_path")  # type: ignore[attr-defined]
        function = reload_function(path)
        if function is None:
            return {"success": False, "message": f"{path} could not be loaded"}
        setattr(self, attribute, function)
        return {"success": True, "message": path}
