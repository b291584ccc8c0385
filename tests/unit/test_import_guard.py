"""Who may import what: the host and TransferQueue's internals only at the seams, heavy libraries only when used."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "relax_tq_rdma"
SOURCES = sorted(PACKAGE.rglob("*.py"))
HEAVY = ("torch", "ray", "transfer_queue", "mooncake", "tensordict", "transformers", "numpy", "omegaconf")


def imported_names(source: str) -> Iterator[str]:
    """Dotted names a module imports: statements, ``import_module("...")``, and attributes of ``transfer_queue``."""
    tree = ast.parse(source)
    aliases = {"transfer_queue"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
                if alias.name == "transfer_queue" and alias.asname:
                    aliases.add(alias.asname)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                yield f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.args[0].value
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            yield f"transfer_queue.{node.attr}"


def forbidden(source: str, layer: str, tq_submodules: set[str]) -> list[str]:
    """Names that a file of this layer (its first folder in the package) must not import."""
    found = []
    for name in imported_names(source):
        root, *rest = name.split(".")
        if root == "relax" and layer != "seams":
            found.append(name)
        if root == "transfer_queue" and rest and rest[0] in tq_submodules and layer not in ("seams", "staging"):
            found.append(name)
    return found


@pytest.fixture(scope="module")
def tq_submodules() -> set[str]:
    spec = importlib.util.find_spec("transfer_queue")
    assert spec is not None
    assert spec.submodule_search_locations
    folder = Path(next(iter(spec.submodule_search_locations)))
    names = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert {"interface", "storage"} <= names
    return names


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_seams_touch_the_host_and_transfer_queue_internals(path: Path, tq_submodules: set[str]) -> None:
    layer = path.relative_to(PACKAGE).parts[0]
    assert forbidden(path.read_text(encoding="utf-8"), layer, tq_submodules) == []


@pytest.mark.parametrize(
    ("source", "layer", "caught"),
    [
        ("from relax.utils import arguments", "rollout", True),
        ("def f():\n    import relax.utils.arguments as a", "cli.py", True),
        ("import relax.utils", "seams", False),
        ("import relax_tq_rdma.flags", "demo", False),
        ("from transfer_queue.storage.managers import base", "accounting", True),
        ("from transfer_queue import storage", "transport", True),
        ("from transfer_queue import storage", "staging", False),
        ("import importlib\nimportlib.import_module('transfer_queue.interface')", "demo", True),
        ("import transfer_queue as tq\ntq.interface.thing()", "demo", True),
        ("import transfer_queue as tq\ntq.init()", "demo", False),
        ("from transfer_queue import KVBatchMeta", "demo", False),
    ],
)
def test_the_guard_sees_every_way_to_import(source: str, layer: str, caught: bool, tq_submodules: set[str]) -> None:
    assert bool(forbidden(source, layer, tq_submodules)) is caught


@pytest.mark.parametrize(
    "module", ["relax_tq_rdma", "relax_tq_rdma.flags", "relax_tq_rdma.settings", "relax_tq_rdma.compat"]
)
def test_importing_the_plugin_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    assert run_python(code).split() == []


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["doctor", "--explain-flags"]])
def test_the_command_line_answers_without_anything_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom relax_tq_rdma.cli import main\n"
        f"sys.argv = ['relax-tq-rdma', *{arguments!r}]\n"
        "try:\n    code = main()\nexcept SystemExit as exc:\n    code = exc.code\n"
        f"print('LOADED', code or 0, *sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    assert run_python(code).splitlines()[-1].split() == ["LOADED", "0"]


def run_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout
