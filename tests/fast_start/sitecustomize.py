"""Python imports this at the start of every process of the tests: its folder is on their ``PYTHONPATH``.

Importing tensordict marks two functions for torch's compiler, and that imports the compiler: half of the 7 s of CPU
that ``import transfer_queue`` takes. Nothing here compiles, so the marks are left out.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

MARKS = "torch.compiler"


def _unmarked(function: Any) -> Any:
    return function


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self._inner.exec_module(module)
        module.allow_in_graph = module.assume_constant_result = _unmarked


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != MARKS:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
