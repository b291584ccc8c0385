"""Small helpers that many modules import by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, ClassVar


class SingletonMeta(type):
    """One instance a class and process; later constructor calls return it and ignore their arguments."""

    _instances: ClassVar[dict[type, Any]] = {}

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls not in cls._instances:
            cls._instances[cls] = super().__call__(*args, **kwargs)
        return cls._instances[cls]


def load_function(path: str | None) -> Callable[..., Any] | None:
    """``package.module.name`` to the object, ``None`` for no path."""
    if path is None:
        return None
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
