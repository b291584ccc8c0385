"""Functions of others that a seam has put wrappers around, and the way back."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


class Wrappers:
    """The wrappers of one seam, by name of the owner (a module or a class) and of the function.

    The host may execute a module again: then there is a fresh function to wrap, under the same names.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[str, str], tuple[Any, Any, Any]] = {}

    def put(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace ``owner.name`` by ``make(owner.name)``, unless it is replaced already, or a wrapper of a stranger
        holds ours. ``make`` must use :func:`functools.wraps`."""
        key, current = (owner.__name__, name), getattr(owner, name)
        ours = self._made[key][2] if key in self._made else None
        if ours is not None and inspect.unwrap(current, stop=lambda function: function is ours) is ours:
            return
        wrapper = make(current)
        self._made[key] = (owner, current, wrapper)
        setattr(owner, name, wrapper)

    def take_back(self) -> None:
        """Restore what is still ours; what a stranger has put over it stays."""
        for (_, name), (owner, original, wrapper) in self._made.items():
            if getattr(owner, name, None) is wrapper:
                setattr(owner, name, original)
        self._made.clear()
