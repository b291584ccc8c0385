"""Do something right after a module was executed, without importing it.

TransferQueue pulls in torch and Ray, the host's trainer Megatron: seconds of CPU. A worker that may never touch them
must not pay only to be ready.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls ``then`` each time the module was executed, reloads included, until :meth:`cancel`.

    ``then`` must not raise: the import would fail with it. A module that is imported already is not executed again, so
    its turn comes with the next reload; :func:`when_imported` does not wait for that.
    """

    def __init__(self, module: str, then: Callable[[], None]) -> None:
        self._module, self._then = module, then
        sys.meta_path.insert(0, self)

    def cancel(self) -> None:
        """Idempotent."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._module or self not in sys.meta_path:
            return None
        # Only those behind us: another watcher of the same module in front would ask us again.
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(fullname, path, target) if find is not None else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self._then)
                return spec
        return None


def when_imported(module: str, then: Callable[[], None]) -> AfterImport:
    """:class:`AfterImport`, and ``then`` at once when the module is imported already."""
    watch = AfterImport(module, then)
    if module in sys.modules:
        then()
    return watch


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: Any, then: Callable[[], None]) -> None:
        self._inner, self._then = inner, then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._inner.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        # Whoever asks the module for its loader (importlib.resources does) must get the real one.
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        self._then()

    def __getattr__(self, name: str) -> Any:
        """What only some loaders have (``get_source``, ``get_code``), for those that look before they import."""
        return getattr(self._inner, name)
