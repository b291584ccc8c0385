"""Do something right after ``transfer_queue`` is imported, without importing it.

TransferQueue pulls in torch and Ray, seconds of CPU. A worker that may never touch the data plane must not pay for them
only to be ready.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

NAME = "transfer_queue"


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls ``then`` once, when the import has succeeded. It must not raise: the import would fail with it."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then
        sys.meta_path.insert(0, self)

    def cancel(self) -> None:
        """Idempotent."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != NAME:
            return None
        self.cancel()
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._then)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: importlib.abc.Loader, then: Callable[[], None]) -> None:
        self._inner, self._then = inner, then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Whoever asks the module for its loader (importlib.resources does) must get the real one.
        module.__loader__ = self._inner
        assert module.__spec__ is not None
        module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        self._then()
