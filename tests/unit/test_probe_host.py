"""Limits, memory, /dev/shm, GPUs and the memcpy hazard of a node (FC-05, FC-10, FC-15)."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest

from relax_tq_rdma import Settings
from relax_tq_rdma.transport import host_checks
from relax_tq_rdma.transport.memory import MIB, ClientSizes, MemoryPlan
from relax_tq_rdma.transport.mooncake_facts import MooncakeFacts
from relax_tq_rdma.transport.sysfs import Tree
from tests.fake_tree import GIB, FakeTree, as_nobody, healthy, public_folder

SYSTEM = Tree(Path("/"))


def needs(mib: int, processes: int = 1, staging: int = 0, kept: int = 0) -> MemoryPlan:
    sizes = ClientSizes(segment=mib * MIB, buffer=0, staging=staging * MIB, gpu_staging=0, sources=kept * MIB)
    return MemoryPlan(sizes=sizes, processes=processes, mounting=processes, lazy=True)


# --- memlock ---


@pytest.mark.parametrize(
    ("soft", "need_mib", "status", "shown"),
    [
        (64 * 1024, 64, "missing", "limit 64 KiB, need 64 MiB"),
        (8 * MIB, 64, "missing", "limit 8 MiB, need 64 MiB"),
        (4 * MIB, 4, "ok", "limit 4 MiB, need 4 MiB"),
    ],
)
def test_the_process_own_lowered_limit(soft: int, need_mib: int, status: str, shown: str) -> None:
    """A real RLIMIT_MEMLOCK, lowered in a child without privileges."""
    if soft > _hard():
        pytest.skip(f"the hard limit here is {_hard()}: it cannot be raised to {soft}")

    def look() -> list[Any]:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, _hard()))
        check = host_checks.check_memlock(SYSTEM, needs(need_mib))
        return [check.status, check.evidence, check.fix]

    got, evidence, fix = as_nobody(look)
    assert (got, shown in evidence) == (status, True)
    if status == "missing":
        assert "ulimit -l unlimited" in fix
        assert "RTQ_SEGMENT_MB" in fix


def _hard() -> int:
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    return 2**62 if hard == resource.RLIM_INFINITY else hard


def test_unlimited_is_not_a_small_number(tmp_path: Path) -> None:
    tree = Tree(FakeTree(tmp_path).memlock("unlimited").root)
    assert host_checks.memlock_limit(tree) == (None, "")
    check = host_checks.check_memlock(tree, needs(2**20))
    assert check.status == "ok"
    assert "unlimited" in check.evidence


def test_the_limit_of_a_tree(tmp_path: Path) -> None:
    tree = Tree(FakeTree(tmp_path).memlock(65536).root)
    check = host_checks.check_memlock(tree, needs(64, processes=8, staging=1024))
    assert check.status == "missing"
    assert "limit 64 KiB, need 1.1 GiB a process (segment 64 MiB, buffer 0 B, staging 1 GiB), 8.5 GiB for 8" in (
        check.evidence
    )


def test_enough_for_one_process_but_not_for_all_is_degraded(tmp_path: Path) -> None:
    tree = Tree(FakeTree(tmp_path).memlock(100 * MIB).root)
    assert host_checks.check_memlock(tree, needs(64, processes=1)).status == "ok"
    check = host_checks.check_memlock(tree, needs(64, processes=8))
    assert check.status == "degraded"
    assert "holds one process (64 MiB), not 8 (512 MiB)" in check.evidence


def test_the_capability_lifts_the_limit_but_not_inside_a_user_namespace(tmp_path: Path) -> None:
    fake = FakeTree(tmp_path).memlock(65536, ipc_lock=True)
    assert host_checks.check_memlock(Tree(fake.root), needs(64)).status == "ok"
    fake.write("proc/self/uid_map", "         0          0 4294967295")
    assert host_checks.check_memlock(Tree(fake.root), needs(64)).status == "ok"
    fake.write("proc/self/uid_map", "         0     100000      65536")
    assert host_checks.check_memlock(Tree(fake.root), needs(64)).status == "missing"


@pytest.mark.parametrize("text", ["", "garbage", "Max locked memory     lots   lots   bytes", b"\xff\x00"])
def test_an_unreadable_limit_counts_as_no(tmp_path: Path, text: str | bytes) -> None:
    fake = FakeTree(tmp_path)
    assert "missing" in host_checks.check_memlock(Tree(tmp_path), needs(64)).evidence
    fake.write("proc/self/limits", text)
    assert host_checks.check_memlock(Tree(tmp_path), needs(64)).status == "missing"


# --- memory ---


def test_memory_against_the_plan(tmp_path: Path) -> None:
    tree = Tree(FakeTree(tmp_path).memory(8 * GIB).root)
    assert host_checks.check_memory(tree, needs(4096)).status == "ok"
    check = host_checks.check_memory(tree, needs(4096, processes=3))
    assert check.status == "missing"
    assert "need 12 GiB (3 processes, 3 with a segment), 8 GiB free in this node" in check.evidence


def test_what_readers_keep_is_a_limit_and_no_reason_not_to_start(tmp_path: Path) -> None:
    tree = Tree(FakeTree(tmp_path).memory(8 * GIB).root)
    assert host_checks.check_memory(tree, needs(2048, kept=1024)).status == "ok"
    check = host_checks.check_memory(tree, needs(2048, processes=3, kept=1024))
    assert check.status == "degraded"
    assert "need 6 GiB and up to 9 GiB with what is kept" in check.evidence
    assert "RTQ_DEDUP_CACHE_MB" in check.fix
    memlock = FakeTree(tmp_path / "limits").root
    assert "9 GiB" not in host_checks.check_memlock(Tree(memlock), needs(2048, processes=3, kept=1024)).evidence


def test_the_control_group_is_tighter_than_the_node(tmp_path: Path) -> None:
    fake = FakeTree(tmp_path).memory(512 * GIB)
    fake.write("sys/fs/cgroup/memory.max", "max")
    fake.write("sys/fs/cgroup/memory.current", str(GIB))
    fake.write("proc/self/cgroup", "0::/job/step")
    assert host_checks.available_memory(Tree(tmp_path)) == (512 * GIB, "this node")
    fake.write("sys/fs/cgroup/job/memory.max", str(16 * GIB))
    fake.write("sys/fs/cgroup/job/memory.current", str(12 * GIB))
    fake.write("sys/fs/cgroup/job/memory.stat", f"anon 1\ninactive_file {2 * GIB}")
    assert host_checks.available_memory(Tree(tmp_path)) == (6 * GIB, "this container")
    check = host_checks.check_memory(Tree(tmp_path), needs(8192))
    assert "6 GiB free in this container" in check.evidence


def test_an_older_control_group(tmp_path: Path) -> None:
    fake = FakeTree(tmp_path).memory(512 * GIB)
    fake.write("proc/self/cgroup", "9:memory:/docker/abc\n1:name=systemd:/x")
    fake.write("sys/fs/cgroup/memory/memory.limit_in_bytes", str(4 * GIB))
    fake.write("sys/fs/cgroup/memory/memory.usage_in_bytes", str(GIB))
    assert host_checks.available_memory(Tree(tmp_path)) == (3 * GIB, "this container")


def test_unmeasured_memory_is_said(tmp_path: Path) -> None:
    check = host_checks.check_memory(Tree(tmp_path), needs(64))
    assert check.status == "degraded"
    assert "not measured: /proc/meminfo is missing" in check.evidence


# --- /dev/shm ---


def test_shm(tmp_path: Path) -> None:
    assert host_checks.check_shm(Tree(FakeTree(tmp_path).shm().root)).status == "ok"
    assert list((tmp_path / "dev/shm").iterdir()) == [], "the probe leaves nothing behind"
    absent = host_checks.check_shm(Tree(tmp_path / "other"))
    assert absent.status == "missing"
    assert "/dev/shm cannot be written: missing" in absent.evidence


def test_shm_not_writable() -> None:
    with public_folder() as folder:
        FakeTree(folder).shm()
        (folder / "dev/shm").chmod(0o555)
        evidence = as_nobody(lambda: host_checks.check_shm(Tree(folder)).evidence)
    assert "not permitted" in evidence


def test_full_shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(tmp_path)
    monkeypatch.setattr(host_checks, "SHM_FLOOR", real.f_bavail * real.f_frsize * 2)  # all there is, is too little
    check = host_checks.check_shm(Tree(FakeTree(tmp_path).shm().root))
    assert check.status == "missing"
    assert "/dev/shm is full" in check.evidence
    assert "--shm-size" in check.fix


# --- MC_STORE_MEMCPY ---


@pytest.mark.parametrize(
    ("value", "version", "status"),
    [
        (None, "0.3.10.post2", "ok"),
        ("0", "0.3.10.post2", "ok"),
        ("OFF", "0.3.10.post2", "ok"),
        ("1", "0.3.10.post2", "missing"),
        ("1", "0.3.9", "missing"),
        ("", "0.3.10", "missing"),  # Mooncake reads an empty text as on
        ("nonsense", "0.3.10", "missing"),
        ("1", "", "missing"),
        ("1", "0.3.11", "degraded"),
        ("true", "0.3.13.post1", "degraded"),
        ("0", "", "ok"),
    ],
)
def test_memcpy_hazard(value: str | None, version: str, status: str) -> None:
    environ = {} if value is None else {"MC_STORE_MEMCPY": value}
    check = host_checks.check_memcpy_hazard(environ, MooncakeFacts(version=version))
    assert check.status == status
    assert (status == "ok") == (check.fix == "")


# --- GDR ---

CUDA = MooncakeFacts(version="0.3.13", distribution="mooncake-transfer-engine")


@pytest.mark.parametrize(
    ("peermem", "open_module", "kernel", "status", "evidence"),
    [
        (True, False, "5.4.0", "ok", "8 GPU, nvidia_peermem"),
        (False, True, "5.15.0-91-generic", "ok", "8 GPU, dma-buf"),
        (True, True, "6.1.0", "ok", "8 GPU, nvidia_peermem and dma-buf"),
        (False, True, "5.4.0", "missing", "neither nvidia_peermem nor dma-buf"),
        (False, False, "6.1.0", "missing", "neither nvidia_peermem nor dma-buf"),
        (False, True, "garbage", "missing", "neither"),
    ],
)
def test_gdr(tmp_path: Path, peermem: bool, open_module: bool, kernel: str, status: str, evidence: str) -> None:
    fake = FakeTree(tmp_path).gpus(8, peermem=peermem, open_module=open_module, kernel=kernel)
    check = host_checks.check_gdr(Tree(fake.root), CUDA)
    assert check.status == status
    assert evidence in check.evidence
    assert "gdrdrv not loaded" in check.evidence
    fake.write("sys/module/gdrdrv/refcnt", "0")
    assert "gdrdrv" not in host_checks.check_gdr(Tree(fake.root), CUDA).evidence


def test_gdr_needs_a_gpu_and_a_build_with_cuda(tmp_path: Path) -> None:
    assert "no CUDA device" in host_checks.check_gdr(Tree(tmp_path), CUDA).evidence
    fake = FakeTree(tmp_path).gpus(1)
    cpu = MooncakeFacts(version="0.3.13", distribution="mooncake-transfer-engine-non-cuda")
    check = host_checks.check_gdr(Tree(fake.root), cpu)
    assert check.status == "missing"
    assert "build without CUDA" in check.evidence


def test_settings_default_is_not_gdr(tmp_path: Path) -> None:
    assert Settings().use_gdr is False
    assert host_checks.gpu_count(Tree(healthy(tmp_path).gpus(3).root)) == 3
