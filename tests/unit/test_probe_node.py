"""The report of one node: which checks run, what is skipped, and that nothing found on a node ever raises."""

from __future__ import annotations

import os
import random
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import pytest

from relax_tq_rdma import Settings, UsageError, __version__
from relax_tq_rdma.transport import mooncake_facts, probe
from relax_tq_rdma.transport.mooncake_facts import MooncakeFacts, explain_import_error, inspect_mooncake
from relax_tq_rdma.transport.probe import ProbeRequest, probe_node, with_check
from relax_tq_rdma.transport.report import CHECKS, Check, NodeReport
from tests.fake_tree import GIB, healthy

TCP = Settings(storage_backend="mooncake")
RDMA = Settings(storage_backend="mooncake", transport="rdma", rdma_mode="auto")
GDR = Settings(storage_backend="mooncake", transport="rdma", rdma_mode="auto", use_gdr=True)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA build of Mooncake, without paying for the child process in each test."""
    facts = MooncakeFacts(version="0.3.13.post1", distribution="mooncake-transfer-engine", lazy_mount=True)
    monkeypatch.setattr(probe, "inspect_mooncake", lambda limit, **_: facts)


def statuses(report: NodeReport) -> dict[str, str]:
    assert [c.name for c in report.checks] == list(CHECKS), "every check, in display order"
    return {c.name: c.status for c in report.checks}


@pytest.mark.usefixtures("installed")
def test_a_healthy_node_passes_everything(tmp_path: Path) -> None:
    report = probe_node(GDR, root=healthy(tmp_path).gpus(8).root, node="n1", node_id="abc", environ={})
    assert set(statuses(report).values()) == {"ok"}
    assert (report.node, report.node_id, report.mooncake_version) == ("n1", "abc", "0.3.13.post1")
    assert report.plugin_version == __version__
    assert [d.name for d in report.devices] == ["mlx5_0"]
    assert report.memory is not None
    assert report.memory.processes == 9, "one a GPU and one more"
    assert all(c.evidence and not c.fix for c in report.checks)
    assert msgspec.convert(msgspec.to_builtins(report), NodeReport) == report


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("settings", "skipped"),
    [
        (Settings(), set(CHECKS)),
        (TCP, {"rdma_device", "rdma_port", "rdma_gid", "memlock", "gdr"}),
        (RDMA, {"gdr"}),
        (Settings(storage_backend="mooncake", transport="rdma", rdma_mode="off"), {*CHECKS[1:5], "gdr"}),
        (GDR, set()),
    ],
)
def test_what_is_not_asked_for_is_skipped(tmp_path: Path, settings: Settings, skipped: set[str]) -> None:
    root = healthy(tmp_path).gpus(1).root
    report = probe_node(settings, root=root, node="n", environ={})
    got = statuses(report)
    assert {name for name, status in got.items() if status == "skipped"} == skipped
    assert all(c.evidence.startswith("not asked for") for c in report.checks if c.status == "skipped")


def test_nothing_is_started_for_a_job_that_asks_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_child(*_: Any, **__: Any) -> None:
        raise AssertionError("a child process was started")

    monkeypatch.setattr(mooncake_facts.subprocess, "run", no_child)
    assert set(statuses(probe_node(Settings(), root=tmp_path, node="n")).values()) == {"skipped"}


BROKEN: dict[str, Any] = {
    "rdma_device": lambda tree: tree.without_rdma(),
    "rdma_port": lambda tree: tree.port_state("1: DOWN"),
    "rdma_gid": lambda tree: tree.zero_gids(),
    "memlock": lambda tree: tree.memlock(65536),
    "memory": lambda tree: tree.memory(GIB),
    "shm": lambda tree: tree.remove("dev/shm"),
}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("check", sorted(BROKEN))
def test_one_thing_broken_is_one_check_missing(tmp_path: Path, check: str) -> None:
    tree = healthy(tmp_path)
    BROKEN[check](tree)
    report = probe_node(RDMA, root=tree.root, node="n", environ={})
    first = next(c for c in report.checks if c.status == "missing")
    assert first.name == check
    assert first.fix


@pytest.mark.usefixtures("installed")
def test_the_announced_address(tmp_path: Path) -> None:
    root = healthy(tmp_path).root
    two = ProbeRequest(hosts=2, announce="localhost")
    loopback = probe_node(TCP, root=root, node="n", request=two, environ={}).check("reachability")
    assert loopback is not None
    assert (loopback.status, "RTQ_LOCAL_HOSTNAME" in loopback.fix) == ("missing", True)
    one = ProbeRequest(hosts=1, announce="localhost")
    assert statuses(probe_node(TCP, root=root, node="n", request=one, environ={}))["reachability"] == "ok"
    own = probe_node(TCP, root=root, node="n", request=one, environ={"RTQ_LOCAL_HOSTNAME": "::1"})
    assert own.address == "::1", "each node's own setting goes first"


@pytest.mark.usefixtures("installed")
def test_a_bad_size_is_a_usage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RTQ_SEGMENT_MB", "4GB")
    with pytest.raises(UsageError, match="RTQ_SEGMENT_MB"):
        probe_node(RDMA, root=tmp_path, node="n")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("seed", range(25))
def test_garbage_never_raises(tmp_path: Path, seed: int) -> None:
    """Any file of the tree may hold anything, be a folder, a dangling link, a FIFO, or be gone (FC-09)."""
    chance = random.Random(seed)
    tree = healthy(tmp_path).gpus(1).hca("rxe0", pci=False, ip="10.0.0.2")
    files = sorted(p for p in tmp_path.rglob("*") if p.is_file() and not p.is_symlink())
    for path in chance.sample(files, k=len(files) // 2):
        path.unlink()
        _vandalise(path, chance)
    report = probe_node(GDR, root=tree.root, node="n", environ={})
    assert set(statuses(report).values()) <= {"ok", "degraded", "missing"}
    assert all(c.evidence and (c.status == "ok" or _way_out(report, c)) for c in report.checks)
    assert msgspec.convert(msgspec.to_builtins(report), NodeReport) == report


def _way_out(report: NodeReport, check: Check) -> str:
    """What to do about a check that failed: its own fix, or that of the check that left it nothing to look at."""
    before = report.check(check.evidence.removeprefix("no device passed "))
    return check.fix or (before.fix if before is not None and before.status == "missing" else "")


def _vandalise(path: Path, chance: random.Random) -> None:
    kind = chance.choice(["gone", "garbage", "empty", "folder", "dangling", "loop", "fifo", "long"])
    if kind == "garbage":
        path.write_bytes(chance.randbytes(40))
    elif kind == "empty":
        path.touch()
    elif kind == "folder":
        path.mkdir()
    elif kind == "dangling":
        path.symlink_to("/nowhere/at/all")
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "long":
        path.write_bytes(b"9" * 3_000_000)


def test_with_check_replaces_and_keeps_the_order() -> None:
    report = NodeReport(
        node="n",
        node_id="1",
        checks=(Check(name="mooncake", status="ok", evidence="x"), Check(name="gdr", status="ok", evidence="y")),
    )
    dialled = Check(name="reachability", status="missing", evidence="n2 cannot be reached", fix="open the port")
    once = with_check(report, dialled)
    assert [c.name for c in once.checks] == ["mooncake", "reachability", "gdr"]
    assert with_check(once, dialled) == once


# --- Mooncake, imported for real in a child ---


def test_the_installed_mooncake() -> None:
    facts = inspect_mooncake(60)
    assert facts.problem == ""
    assert facts.version == metadata.version("mooncake-transfer-engine-non-cuda")
    assert facts.has_cuda is False
    assert facts.lazy_mount or facts.release < (0, 3, 13)


def test_another_wheel_on_the_path(mooncake_0310: Path) -> None:
    facts = inspect_mooncake(60, first_path=str(mooncake_0310))
    assert (facts.version, facts.lazy_mount) == ("0.3.10.post2", False)
    assert facts.release == (0, 3, 10)


def test_a_missing_system_library_for_real(tmp_path: Path) -> None:
    """The real wheel, its need for libibverbs changed to a library that is not there: the loader itself refuses."""
    _copy_wheel(tmp_path, b"libibverbs.so.1", b"libibverbs.so.7")
    facts = inspect_mooncake(60, first_path=str(tmp_path))
    assert facts.problem == "libibverbs.so.7 missing"
    assert facts.fix == "install libibverbs1 (apt-get install libibverbs1)"
    assert facts.version == ""


def _copy_wheel(folder: Path, old: bytes, new: bytes) -> None:
    source = Path(str(metadata.distribution("mooncake-transfer-engine-non-cuda").locate_file("mooncake")))
    target = folder / "mooncake"
    target.mkdir()
    for name in ("__init__.py", "buffer_pool.py"):
        if (source / name).exists():
            shutil.copy(source / name, target)
    (native,) = source.glob("store*.so")
    data = native.read_bytes()
    assert data.count(old + b"\0") >= 1
    (target / native.name).write_bytes(data.replace(old + b"\0", new + b"\0"))


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "import crashed with SIGSEGV"),
        ("import os; os._exit(3)", "import ended the process with code 3"),
        ("import time; time.sleep(60)", "import did not finish within 2 s"),
        ("raise RuntimeError('two\\nlines')", "import fails: RuntimeError: two lines"),
        ("import a_module_nobody_has", "Mooncake needs the Python module a_module_nobody_has"),
        ("x = 1", "import fails: AttributeError"),
        ("print('noise on stdout'); raise ImportError('no')", "import fails: ImportError: no"),
    ],
)
def test_an_import_that_goes_wrong_in_any_way(tmp_path: Path, module: str, problem: str) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake/__init__.py").touch()
    (tmp_path / "mooncake/store.py").write_text(module)
    facts = inspect_mooncake(2 if "sleep" in module else 60, first_path=str(tmp_path))
    assert problem in facts.problem
    assert facts.fix


def test_the_current_folder_is_not_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake/__init__.py").write_text("raise RuntimeError('taken from the current folder')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [entry for entry in sys.path if entry])
    assert inspect_mooncake(60).problem == ""


def test_no_store_module(tmp_path: Path) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake/__init__.py").touch()
    assert "installed without its store module" in inspect_mooncake(60, first_path=str(tmp_path)).problem


def test_a_source_build_without_metadata_is_degraded(tmp_path: Path) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake/__init__.py").touch()
    (tmp_path / "mooncake/store.py").write_text("class MooncakeDistributedStore: pass")
    request = ProbeRequest(mooncake_path=str(tmp_path))
    report = probe_node(TCP, root=healthy(tmp_path / "root").root, node="n", request=request)
    check = report.check("mooncake")
    assert check is not None
    assert check.status == "degraded"
    assert "version is unknown" in check.evidence


@pytest.mark.parametrize(
    ("error", "module", "problem", "fix"),
    [
        (
            "ImportError: libcudart.so.12: cannot open shared object file: x",
            "",
            "libcudart.so.12 missing",
            "CUDA runtime",
        ),
        ("ImportError: libfoo.so.3: cannot open shared object file: x", "", "libfoo.so.3 missing", "ships libfoo.so.3"),
        ("ModuleNotFoundError: No module named 'mooncake'", "mooncake", "Mooncake is not installed", "with pip"),
        ("ImportError: /x/store.so: invalid ELF header", "", "import fails", "reinstall"),
    ],
)
def test_import_errors_in_plain_words(error: str, module: str, problem: str, fix: str) -> None:
    said, way_out = explain_import_error(error, module)
    assert problem in said
    assert fix in way_out


def test_real_root_of_this_machine() -> None:
    """Whatever this machine is, the probe of the real root ends with a full report."""
    tree_report = probe_node(GDR, root=Path("/"), node="here")
    assert set(statuses(tree_report)) == set(CHECKS)
