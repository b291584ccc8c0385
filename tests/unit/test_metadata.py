"""What the package says about itself: one version, the supported Pythons, the extras, the console script."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import relax_tq_rdma
from relax_tq_rdma.flags import FLAGS

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTION = metadata.distribution("relax-tq-rdma")
SOURCES = sorted(path for folder in ("relax_tq_rdma", "tests", "scripts") for path in (ROOT / folder).rglob("*.py"))


def requirements(extra: str | None) -> dict[str, str]:
    """Name -> version range of the plain requirements (``None``) or of one extra."""
    found = {}
    for line in DISTRIBUTION.requires or []:
        requirement, _, marker = line.partition(";")
        wanted = re.search(r"extra == [\"']([^\"']+)", marker)
        if (wanted.group(1) if wanted else None) == extra:
            name = re.match(r"[A-Za-z0-9._-]+", requirement.strip())
            assert name is not None
            found[name.group()] = requirement.strip()[name.end() :].strip()
    return found


def test_the_version_is_one_and_the_changelog_begins_with_it() -> None:
    newest = re.search(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert newest is not None
    assert newest.group(1) == DISTRIBUTION.version == relax_tq_rdma.__version__


def test_a_source_tree_that_was_never_installed_says_the_same_version() -> None:
    literal = re.search(r'__version__ = "([^"]+)"', (ROOT / "relax_tq_rdma" / "version.py").read_text(encoding="utf-8"))
    assert literal is not None
    assert literal.group(1) == DISTRIBUTION.version


def test_supported_pythons() -> None:
    assert DISTRIBUTION.metadata["Requires-Python"] == ">=3.10"
    classifiers = DISTRIBUTION.metadata.get_all("Classifier") or []
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (10, 11, 12)} <= set(classifiers)


def test_license_is_apache_2_with_its_text() -> None:
    assert DISTRIBUTION.metadata["License-Expression"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_extras_bring_what_their_names_say() -> None:
    assert set(DISTRIBUTION.metadata.get_all("Provides-Extra") or []) == {"mooncake", "mooncake-cpu", "vision", "dev"}
    assert set(requirements("mooncake")) == {"mooncake-transfer-engine"}
    assert set(requirements("mooncake-cpu")) == {"mooncake-transfer-engine-non-cuda"}
    assert {"transformers", "pillow", "scikit-image"} <= set(requirements("vision"))
    assert {"pytest", "ruff", "mypy", "hypothesis"} <= set(requirements("dev"))


def test_mooncake_is_never_a_plain_requirement_and_every_range_has_a_lower_bound() -> None:
    plain = requirements(None)
    assert "TransferQueue" in plain
    assert not any("mooncake" in name for name in plain)
    for extra in (None, "mooncake", "mooncake-cpu", "vision", "dev"):
        for name, versions in requirements(extra).items():
            assert ">=" in versions, f"{name} has no lower bound"


def test_console_script_starts_and_says_its_version() -> None:
    (script,) = [entry for entry in DISTRIBUTION.entry_points if entry.group == "console_scripts"]
    assert (script.name, script.value) == ("relax-tq-rdma", "relax_tq_rdma.cli:main")
    command = Path(sys.executable).with_name("relax-tq-rdma")
    shown = subprocess.run([str(command), "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert DISTRIBUTION.version in shown.stdout


def test_the_pinned_versions_of_the_set_up_lie_in_the_declared_ranges() -> None:
    from packaging.specifiers import SpecifierSet

    ranges = {
        name.lower(): versions
        for extra in (None, "mooncake-cpu", "vision", "dev")
        for name, versions in requirements(extra).items()
    }
    pins = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "scripts" / "constraints.txt").read_text(encoding="utf-8"), re.M)
    assert ("torch", "2.13.0") in pins
    assert {"transferqueue", "ray", "transformers", "mooncake-transfer-engine-non-cuda"} <= {n.lower() for n, _ in pins}
    for name, version in pins:
        assert SpecifierSet(ranges[name.lower()]).contains(version), (
            f"{name}=={version} is outside {ranges[name.lower()]}"
        )


def test_the_readme_lists_every_flag_with_its_default_and_layer() -> None:
    rows = re.findall(r"^\| `(--[\w-]+)[^|]*\| ([^|]+) \| (L\d\w?) \|", (ROOT / "README.md").read_text(), re.M)
    shown = {name: (default.strip("` "), layer) for name, default, layer in rows}
    assert shown == {flag.name: (_as_text(flag.default), flag.layer) for flag in FLAGS}


def _as_text(default: object) -> str:
    if default is False:
        return "off"
    return f"{default:g}" if isinstance(default, float) else str(default) or "none"


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda path: path.name
)
def test_links_between_the_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_package_ships_its_type_marker() -> None:
    assert (Path(relax_tq_rdma.__file__).parent / "py.typed").exists()


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sources_are_python_3_10(path: Path) -> None:
    ast.parse(path.read_text(encoding="utf-8"), filename=str(path), feature_version=(3, 10))


def test_the_grammar_check_would_see_newer_syntax() -> None:
    with pytest.raises(SyntaxError):
        ast.parse("try:\n    pass\nexcept* OSError:\n    pass\n", feature_version=(3, 10))


def test_no_two_test_files_have_one_name() -> None:
    """On the oldest TransferQueue unit and integration tests are collected together, and pytest knows files by name."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []
