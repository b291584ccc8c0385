"""The set-up scripts, run for real in a copy of the tree, with stand-ins for what they call and no network."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted([*ROOT.glob("scripts/*.sh"), ROOT / ".ci" / "run"])
TOOLS = (
    "bash",
    "basename",
    "cat",
    "cut",
    "dirname",
    "flock",
    "grep",
    "mkdir",
    "mv",
    "nice",
    "paste",
    "rm",
    "sed",
    "sha256sum",
    "tail",
    "tee",
    "uname",
)
ALL_LIBRARIES_LOAD = '[ "$1" = - ] && exit 0'
NO_LIBIBVERBS = '[ "$1" = - ] && { echo libibverbs1; exit 0; }'
UNPACKS = '[ "$8" = --target ] && mkdir -p "$9"; exit 0'
NO_VENV = 'case "$2" in *ensurepip*) exit 1;; esac'


class Tree:
    """A copy of the scripts in a folder with a space in its name, and a PATH that holds stand-ins only."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a clone"
        shutil.copytree(ROOT / "scripts", self.root / "scripts")
        shutil.copy(ROOT / "pyproject.toml", self.root)
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.calls = folder / "calls"
        self.calls.touch()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool) or tool)
        self.tool("id", "echo 1000")
        self.python()

    def tool(self, name: str, body: str) -> None:
        path = self.bin / name
        path.write_text(f'#!/bin/bash\necho "{name} $*" >>"{self.calls}"\n{body}\n')
        path.chmod(0o755)

    def python(self, *rules: str, pip: str = "exit 0") -> None:
        """A ``python3`` that obeys ``rules`` first; its environments link to itself, its pip runs ``pip``."""
        body = "\n".join(
            [
                *(rules or (ALL_LIBRARIES_LOAD,)),
                'if [ "$1 $2" = "-m venv" ]; then',
                f'  mkdir -p "$3/bin" && /bin/ln -s "{self.bin}/python3" "$3/bin/python"; exit',
                "fi",
                f'if [ "$1 $2 $3" = "-m pip install" ]; then {pip}; fi',
                'if [ "$1" = --version ]; then echo Python 3.11.2; exit 0; fi',
                'case "$2" in *base_prefix*) echo "3.11.2 /usr";; esac',
                "exit 0",
            ]
        )
        self.tool("python3", body)

    def run(self, script: str = "setup.sh", *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(self.root / "scripts" / script), *args],
            cwd="/",
            env={"PATH": str(self.bin), "HOME": str(self.root.parent), **env},
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )

    def pip_calls(self) -> list[str]:
        return [line for line in self.calls.read_text().splitlines() if line.startswith("python3 -m pip install")]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse_and_run_in_strict_mode(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=30)
    if script.name != "lib.sh":  # sourced by the others
        assert os.access(script, os.X_OK)
        assert "\nset -euo pipefail\n" in script.read_text()


def test_first_run_installs_the_pinned_cpu_build_and_the_second_run_does_nothing(tree: Tree) -> None:
    first = tree.run()
    assert first.returncode == 0, first.stderr
    (call,) = tree.pip_calls()
    assert "-c scripts/constraints.txt torch==2.13.0" in call
    assert "-e .[mooncake-cpu,vision,dev]" in call
    if os.uname().machine == "x86_64":
        assert " torch==2.13.0+cpu " in call

    second = tree.run()
    assert "environment is up to date" in second.stdout
    assert len(tree.pip_calls()) == 1


@pytest.mark.parametrize("name", ["pyproject.toml", "scripts/constraints.txt", "scripts/setup.sh", "scripts/lib.sh"])
def test_a_change_of_what_decides_the_environment_sets_up_again(tree: Tree, name: str) -> None:
    tree.run()
    with (tree.root / name).open("a") as file:
        file.write("\n# changed\n")
    assert tree.run().returncode == 0
    assert len(tree.pip_calls()) == 2


def test_a_moved_clone_is_built_again(tree: Tree) -> None:
    tree.run()
    tree.root = tree.root.rename(tree.root.with_name("moved"))
    assert "environment ready" in tree.run().stdout


def test_a_killed_set_up_goes_on_with_the_environment_it_made(tree: Tree) -> None:
    begun = tree.root / "begun"
    tree.python(pip=f'>"{begun}"; exec /bin/sleep 60')
    with subprocess.Popen(
        ["bash", str(tree.root / "scripts" / "setup.sh")],
        env={"PATH": str(tree.bin), "HOME": "/"},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        deadline = time.monotonic() + 30
        while not begun.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
    tree.python()
    again = tree.run()
    assert "going on with it" in again.stdout
    assert "environment ready" in again.stdout


def test_a_broken_environment_is_built_again(tree: Tree) -> None:
    tree.run()
    (tree.root / ".venv" / "bin" / "python").unlink()
    again = tree.run()
    assert "is broken, half made or of another Python" in again.stdout
    assert again.returncode == 0
    assert (tree.root / ".venv" / "bin" / "python").exists()


@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        ("NewConnectionError: Failed to establish a new connection", "the package index cannot be reached"),
        ("Temporary failure in name resolution", "the package index cannot be reached"),
        ("ERROR: Cannot install torch==2.13.0+cpu because these package versions have conflicting", "no CPU build"),
        ("ERROR: No matching distribution found for torch==2.13.0+cpu", "no CPU build"),
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("ERROR: something else", "its whole output in"),
    ],
)
def test_a_failing_pip_is_explained_in_one_line_and_leaves_no_stamp(tree: Tree, output: str, sentence: str) -> None:
    tree.python(pip=f'echo "{output}" >&2; exit 1')
    result = tree.run()
    assert result.returncode == 1
    (error,) = result.stderr.splitlines()
    assert error.startswith("[setup] ERROR: ")
    assert sentence in error
    assert not (tree.root / ".venv" / ".setup-complete").exists()


def test_missing_library_without_rights_names_the_command_and_goes_on(tree: Tree) -> None:
    tree.python(NO_LIBIBVERBS)
    tree.tool("apt-get", "exit 0")
    tree.tool("sudo", "exit 1")
    result = tree.run()
    assert result.returncode == 0, result.stderr
    assert "sudo apt-get update && sudo apt-get install -y libibverbs1" in result.stderr
    assert "going on without it" in result.stderr
    assert not [line for line in tree.calls.read_text().splitlines() if line.startswith("apt-get")]
    assert "libibverbs1" in tree.run().stderr, "an environment that is up to date must still say what is missing"


def test_missing_library_without_apt_names_the_package(tree: Tree) -> None:
    tree.python(NO_LIBIBVERBS)
    result = tree.run()
    assert result.returncode == 0
    assert "libibverbs1" in result.stderr


def test_missing_venv_module_ends_with_the_command(tree: Tree) -> None:
    tree.python(NO_VENV, ALL_LIBRARIES_LOAD)
    result = tree.run()
    assert result.returncode == 1
    assert "python3-venv; run: sudo apt-get update && sudo apt-get install -y python3-venv" in result.stderr
    assert tree.pip_calls() == []


@pytest.mark.parametrize("user", ["root", "sudo"])
def test_missing_library_is_installed_where_allowed(tree: Tree, user: str) -> None:
    installed = tree.root / "installed"
    tree.python(f'[ "$1" = - ] && {{ [ -e "{installed}" ] || echo libibverbs1; exit 0; }}')
    # As on a fresh machine: install fails until the package lists were fetched.
    lists = tree.root / "lists"
    tree.tool("apt-get", f'case "$*" in *update*) >"{lists}";; *) [ -e "{lists}" ] && >"{installed}";; esac')
    tree.tool("env", 'shift; exec "$@"')
    if user == "root":
        tree.tool("id", "echo 0")
    else:
        tree.tool("sudo", '[ "$1" = -n ] && shift; [ "$1" = true ] && exit 0; exec "$@"')
    result = tree.run()
    assert result.returncode == 0, result.stderr
    assert "WARNING" not in result.stderr
    assert "install --no-install-recommends libibverbs1" in tree.calls.read_text()


def test_no_python_and_an_old_python_are_told_apart(tree: Tree) -> None:
    missing = tree.run(PYTHON="python3.99")
    assert missing.returncode == 1
    assert "'python3.99' was not found: install Python 3.10 or newer" in missing.stderr

    tree.tool("oldpython", 'case "$1" in --version) echo Python 3.9.2;; *) exit 1;; esac')
    old = tree.run(PYTHON="oldpython")
    assert old.returncode == 1
    assert "'oldpython' is Python 3.9.2, but 3.10 or newer is needed" in old.stderr


@pytest.mark.parametrize(("script", "argument"), [("setup.sh", "--what"), ("test.sh", "everything")])
def test_an_unknown_argument_is_refused_with_the_usage(tree: Tree, script: str, argument: str) -> None:
    result = tree.run(script, argument)
    assert result.returncode == 1
    assert argument in result.stderr
    assert f"usage: scripts/{script}" in result.stderr


def test_old_library_versions_are_unpacked_once_and_whole(tree: Tree) -> None:
    tree.python(pip=UNPACKS)
    assert tree.run("setup.sh", "--test").returncode == 0
    assert [call.split()[-1] for call in tree.pip_calls()[1:]] == [
        "TransferQueue==0.1.10",
        "mooncake-transfer-engine-non-cuda==0.3.10.post2",
    ]
    assert sorted(path.name for path in (tree.root / ".venv").glob("*-0.*")) == ["mooncake-0.3.10", "tq-0.1.10"]
    tree.run("setup.sh", "--test")
    assert len(tree.pip_calls()) == 3


def test_no_package_index_is_written_into_the_project() -> None:
    for path in [*SCRIPTS, ROOT / "scripts" / "constraints.txt", ROOT / "pyproject.toml", ROOT / "Makefile"]:
        text = path.read_text()
        assert "index-url" not in text, path
        assert "://" not in text, path


NO_GUEST = 'case "$*" in *"-m scripts.softroce"*) echo "[softroce 1 s] cannot run here: no qemu"; exit 77;; esac'
SKIPS = 'case "$*" in *"-m pytest"*tests/rdma*) echo "=== 39 skipped in 1.0s ==="; exit 0;; esac'


@pytest.mark.parametrize(
    ("part", "env", "code"),
    [
        ("rdma", {}, 1),
        ("rdma-full", {}, 1),
        ("rdma", {"RTQ_RDMA_OPTIONAL": "0"}, 1),
        ("rdma", {"RTQ_RDMA_OPTIONAL": "1"}, 0),
    ],
)
def test_real_verbs_that_cannot_run_are_a_loud_and_counted_skip(
    tree: Tree, part: str, env: dict[str, str], code: int
) -> None:
    tree.python(ALL_LIBRARIES_LOAD, NO_GUEST, SKIPS, pip=UNPACKS)
    result = tree.run("test.sh", part, **env)
    assert result.returncode == code, result.stderr
    assert "NO TEST OF REAL VERBS HAS RUN: no qemu" in result.stderr
    assert ("with RTQ_RDMA_OPTIONAL=1 it would not be" in result.stderr) == (code == 1)
    assert "tests: 0 passed, 0 failed, 39 skipped" in result.stdout
    assert [line.split()[:2] for line in result.stdout.splitlines() if line.startswith("rdma ")] == [["rdma", "SKIP"]]


@pytest.mark.parametrize(
    ("code", "closing", "row"),
    [
        (0, "=== 25 passed in 9.0s ===", ["rdma", "ok"]),
        (1, "=== 1 failed, 24 passed in 9.0s ===", ["rdma", "FAILED"]),
        (77, "[softroce 1 s] cannot run here: no qemu", ["rdma", "SKIP"]),
    ],
)
def test_the_guest_runs_beside_others_and_is_shown_whole_in_its_turn(
    tree: Tree, code: int, closing: str, row: list[str]
) -> None:
    guest = f'case "$*" in *"-m scripts.softroce"*) echo booting; /bin/sleep 1; echo "{closing}"; exit {code};; esac'
    until_it_runs = f'until grep -q softroce "{tree.calls}"; do :; done'
    unit = f'case "$*" in *"-m pytest"*tests/unit*) {until_it_runs}; echo "=== 7 passed in 0.1s ==="; exit 0;; esac'
    tree.python(ALL_LIBRARIES_LOAD, guest, unit, SKIPS, pip=UNPACKS)
    result = tree.run("test.sh", "all")
    calls = tree.calls.read_text()
    assert calls.index("scripts.softroce fast") < calls.index("tests/host")
    lines = result.stdout.splitlines()
    table = [line.split()[:2] for line in lines[lines.index(next(line for line in lines if "== result" in line)) :]]
    assert row in table
    assert lines[lines.index("booting") : lines.index("booting") + 2] == ["booting", closing]
    assert lines.index("=== 7 passed in 0.1s ===") < lines.index("booting")
    assert ("NO TEST OF REAL VERBS HAS RUN: no qemu" in result.stderr) == (code == 77)


def test_tests_of_two_guests_are_counted_too(tree: Tree) -> None:
    passes = (
        'case "$*" in *"-m scripts.softroce full"*) echo "node0| === 39 passed in 9.0s (0:00:09) ==="; exit 0;; esac'
    )
    tree.python(ALL_LIBRARIES_LOAD, passes, pip=UNPACKS)
    result = tree.run("test.sh", "rdma-full")
    assert result.returncode == 0
    assert "tests: 39 passed, 0 failed, 0 skipped" in result.stdout


def test_a_guest_that_fails_fails_the_run(tree: Tree) -> None:
    fails = 'case "$*" in *"-m scripts.softroce"*) echo "=== 1 failed, 4 passed in 9.0s ==="; exit 1;; esac'
    tree.python(ALL_LIBRARIES_LOAD, fails, pip=UNPACKS)
    result = tree.run("test.sh", "rdma", RTQ_RDMA_OPTIONAL="1")
    assert result.returncode == 1
    assert "tests: 4 passed, 1 failed, 0 skipped" in result.stdout
