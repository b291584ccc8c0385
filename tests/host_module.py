"""Modules of a host of a few lines, for tests of the seams that wrap them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

Write = Callable[..., Path]


@contextmanager
def modules_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """``write(name, text)`` makes a module that can be imported; written again it is a new version of it.

    No ``relax`` module that was imported before, or is imported here, is left when the block ends.
    """
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    forget()

    def write(name: str, text: str) -> Path:
        path = folder.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        importlib.invalidate_caches()
        return path

    try:
        yield write
    finally:
        forget()


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("relax", "megatron")]:
        del sys.modules[name]
