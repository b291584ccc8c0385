"""Watching for the import of a module: every execution of it, and nothing else."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from relax_tq_rdma.seams.on_import import AfterImport, when_imported


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package ``rtq_host`` with a module ``part`` that is not imported yet."""
    package = tmp_path / "rtq_host"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "part.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = sys.meta_path[:]
    yield package
    assert sys.meta_path == before
    for name in [name for name in sys.modules if name.partition(".")[0] == "rtq_host"]:
        del sys.modules[name]


def test_it_is_called_after_the_import_and_after_each_reload(host: Path) -> None:
    seen: list[int] = []
    watch = AfterImport("rtq_host.part", lambda: seen.append(sys.modules["rtq_host.part"].value))
    try:
        part = importlib.import_module("rtq_host.part")
        assert seen == [1]
        importlib.import_module("rtq_host.part")
        assert seen == [1]
        part.value = 2
        importlib.reload(part)
        assert seen == [1, 1]
    finally:
        watch.cancel()
        watch.cancel()
    importlib.reload(part)
    assert seen == [1, 1]


def test_several_watch_one_module(host: Path) -> None:
    seen: list[str] = []
    watches = [AfterImport("rtq_host.part", lambda name=name: seen.append(name)) for name in "ab"]
    importlib.import_module("rtq_host.part")
    assert sorted(seen) == ["a", "b"]
    for watch in watches:
        watch.cancel()


def test_an_import_that_fails_is_not_announced(host: Path) -> None:
    seen: list[str] = []
    watch = AfterImport("rtq_host.broken", lambda: seen.append("broken"))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("rtq_host.broken")
    (host / "broken.py").write_text("raise RuntimeError('x')\n")
    importlib.invalidate_caches()
    with pytest.raises(RuntimeError):
        importlib.import_module("rtq_host.broken")
    assert seen == []
    watch.cancel()


def test_looking_without_importing_finds_the_real_source(host: Path) -> None:
    watch = AfterImport("rtq_host.part", lambda: None)
    spec = importlib.util.find_spec("rtq_host.part")
    assert spec is not None
    assert spec.loader is not None
    assert spec.origin == str(host / "part.py")
    assert spec.loader.get_source("rtq_host.part") == "value = 1\n"  # type: ignore[attr-defined]
    assert "rtq_host.part" not in sys.modules
    watch.cancel()


def test_the_module_keeps_its_own_loader(host: Path) -> None:
    watch = AfterImport("rtq_host.part", lambda: None)
    part = importlib.import_module("rtq_host.part")
    assert type(part.__loader__).__name__ == type(part.__spec__.loader).__name__ == "SourceFileLoader"  # type: ignore[union-attr]
    watch.cancel()


def test_what_is_imported_already_is_not_waited_for(host: Path) -> None:
    importlib.import_module("rtq_host.part")
    seen: list[str] = []
    when_imported("rtq_host.part", lambda: seen.append("now")).cancel()
    assert seen == ["now"]
