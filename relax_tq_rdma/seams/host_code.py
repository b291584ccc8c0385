"""What the host's functions look like, without running its modules.

A seam is checked in the driver, and a head node without GPUs may be unable to import what only a rank imports. So a
module that this process has not imported yet is read, not run.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_tq_rdma.seams.base import installed


@dataclass(frozen=True)
class Function:
    """``takes_any``: it has a ``**`` parameter."""

    parameters: tuple[str, ...]
    takes_any: bool
    is_async: bool


def has_host() -> bool:
    """Whether Relax can be imported here."""
    return has_module("relax.core.controller")


_DATA_PLANES = ("relax.utils.tq", "relax.utils.tq_config")
"""Modules of a host that chooses the backend and attaches its workers by itself: its later and its earlier shape."""


def own_data_plane() -> str:
    """Why the plugin leaves the data system of this host alone; empty: it does not."""
    own = next((module for module in _DATA_PLANES if has_module(module)), "")
    return f"the host brings an RDMA data plane of its own ({own})" if own else ""


def installed_host() -> str:
    return installed("relax", "Relax")


def has_module(name: str) -> bool:
    """Whether it could be imported. Imports the packages above it, if they are there."""
    if name in sys.modules:
        return sys.modules[name] is not None
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as exc:
        if exc.name is not None and (name == exc.name or name.startswith(f"{exc.name}.")):
            return False
        raise


def problem(module: str, name: str, parameters: Iterable[str], *, is_async: bool | None = None) -> str:
    """What is not as expected of a function; empty: nothing. ``name`` is ``Class.method`` for a method."""
    if not has_module(module):
        return "not installed" if not has_module(module.partition(".")[0]) else f"no module {module}"
    function = find(module, name)
    if function is None:
        return f"no {module}.{name}"
    missing = [parameter for parameter in parameters if parameter not in function.parameters]
    if missing and not function.takes_any:
        return f"{module}.{name} without parameter {', '.join(missing)}"
    if is_async is not None and function.is_async != is_async:
        return f"{module}.{name} is {'not ' if is_async else ''}a coroutine function"
    return ""


def lost(module: str, names: Iterable[str]) -> str:
    """Which function a library under the host has no more; empty: none, or the library is not on this node.

    No package of it is run for the answer: it may need a GPU that only the ranks have.
    """
    loaded = sys.modules.get(module)
    if loaded is not None:
        absent = [name for name in names if _of_object(loaded, name) is None]
    else:
        top, *inside = module.split(".")
        spec = importlib.util.find_spec(top)
        folders = (spec and spec.submodule_search_locations) or ()
        path = next((path for folder in folders if (path := Path(folder, *inside).with_suffix(".py")).is_file()), None)
        if path is None:
            return ""
        tree = ast.parse(path.read_text(encoding="utf-8"))
        absent = [name for name in names if _of_source(tree, name) is None]
    return f"no {module}.{absent[0]}" if absent else ""


def find(module: str, name: str) -> Function | None:
    """The function as this process has imported it, else as its source defines it.

    Raises:
        ModuleNotFoundError: there is no such module.
    """
    loaded = sys.modules.get(module)
    if loaded is not None:
        return _of_object(loaded, name)
    return _of_source(_tree(module), name)


def _of_object(loaded: Any, name: str) -> Function | None:
    found = loaded
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        return None
    found = inspect.unwrap(found)
    parameters = inspect.signature(found).parameters.values()
    return Function(
        tuple(parameter.name for parameter in parameters if parameter.kind is not inspect.Parameter.VAR_KEYWORD),
        any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters),
        inspect.iscoroutinefunction(found),
    )


def _of_source(tree: ast.Module, name: str) -> Function | None:
    found: Any = tree
    for part in name.split("."):
        found = next((node for node in _statements(found.body) if getattr(node, "name", None) == part), None)
        if found is None:
            return None
    if not isinstance(found, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return None
    args = found.args
    named = [*args.posonlyargs, *args.args, *([args.vararg] if args.vararg else []), *args.kwonlyargs]
    return Function(
        tuple(argument.arg for argument in named), args.kwarg is not None, isinstance(found, ast.AsyncFunctionDef)
    )


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a body, also where they stand under a condition: which branch will run is not known here."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            yield from _statements((*node.body, *node.orelse))


def _tree(module: str) -> ast.Module:
    spec = importlib.util.find_spec(module)
    if spec is None:
        raise ModuleNotFoundError(f"no module {module}", name=module)
    if spec.origin is None or not spec.origin.endswith(".py"):
        raise ImportError(f"{module} has no source to look at", name=module)
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
