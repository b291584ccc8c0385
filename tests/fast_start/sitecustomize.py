"""Python imports this at the start of every process of the tests: its folder is on their ``PYTHONPATH``.

Importing tensordict marks two functions for torch's compiler, and every jagged tensor marks two tensors of its own. The
first mark imports the compiler: a third of the CPU time of ``import transfer_queue``. Nothing here compiles, so the
marks are left out. Whoever asks for anything else of the compiler gets it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

MARKS = "torch.compiler"


def _unmarked(function: Any) -> Any:
    return function


class _Compiler:
    """``torch._dynamo`` until something but a mark is wanted of it: then its import takes this place."""

    @staticmethod
    def mark_dynamic(tensor: Any, index: Any, **bounds: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("torch._dynamo"), name)


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self._inner.exec_module(module)
        module.allow_in_graph = module.assume_constant_result = _unmarked
        sys.modules["torch"]._dynamo = _Compiler()  # type: ignore[attr-defined]


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
