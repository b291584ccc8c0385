"""The memory plan: who mounts a segment, and what a node needs (design §8)."""

from __future__ import annotations

import pytest

from relax_tq_rdma import Settings, UsageError
from relax_tq_rdma.transport import memory

GIB = 2**30
MIB = 2**20


@pytest.fixture(autouse=True)
def _defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RTQ_SEGMENT_MB", "RTQ_LOCAL_BUFFER_MB", "RTQ_RECYCLED_MB", "RTQ_DEDUP_CACHE_MB"):
        monkeypatch.delenv(name, raising=False)


MOONCAKE = Settings(storage_backend="mooncake")


def test_only_producers_mount_where_the_wheel_can_wait() -> None:
    plan = memory.plan(MOONCAKE, processes=9, producers=1, lazy=True)
    assert plan.node_bytes == 4 * GIB + 9 * 256 * MIB
    assert plan.process_bytes == 4 * GIB + 256 * MIB


def test_every_client_mounts_with_an_older_wheel() -> None:
    plan = memory.plan(MOONCAKE, processes=8, producers=1, lazy=False)
    assert plan.mounting == 8
    assert plan.node_bytes == 8 * (4 * GIB + 256 * MIB)


def test_sizes_follow_settings_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RTQ_SEGMENT_MB", "64")
    monkeypatch.setenv("RTQ_LOCAL_BUFFER_MB", "16")
    settings = Settings(
        storage_backend="mooncake", host_staging=True, host_staging_mb=512, use_gdr=True, gdr_staging_mb=128
    )
    plan = memory.plan(settings, processes=2, producers=2, lazy=True)
    assert plan.reserved_bytes == 2 * (64 + 16 + 512) * MIB, "GPU memory is not host memory"
    assert plan.node_bytes == plan.reserved_bytes + 2 * 512 * MIB, "results are copied out of the pool when it is full"
    assert plan.largest_region == (16 + 512) * MIB, "the pool is a part of the local buffer"
    rows = {row.what: row for row in memory.rows(plan)}
    assert rows["GDR staging"].where == "gpu"
    assert rows["host staging"].knob == "--tq-host-staging-mb"
    assert sum(row.node_bytes for row in rows.values() if row.where == "host") == plan.node_bytes


def test_parts_a_job_does_not_use_are_left_out() -> None:
    rows = memory.rows(memory.plan(MOONCAKE, processes=1, producers=1, lazy=True))
    assert [row.what for row in rows] == ["segment", "local buffer"]


def test_what_readers_keep_counts_and_is_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RTQ_RECYCLED_MB", "100")
    monkeypatch.setenv("RTQ_DEDUP_CACHE_MB", "50")
    settings = Settings(storage_backend="mooncake", normalize_multimodal=True, dedup_multimodal=True)
    plan = memory.plan(settings, processes=3, producers=1, lazy=True)
    assert plan.node_bytes - plan.reserved_bytes == 3 * (100 + 50) * MIB
    assert plan.process_bytes - plan.pinned_bytes == (100 + 50) * MIB
    rows = {row.what: row for row in memory.rows(plan)}
    assert (rows["copies, reused"].knob, rows["dedup cache"].knob) == ("RTQ_RECYCLED_MB", "RTQ_DEDUP_CACHE_MB")
    assert sum(row.node_bytes for row in rows.values()) == plan.node_bytes


@pytest.mark.parametrize("text", ["4G", "-1", "0", "1.5", "x", "\u0664", "9" * 13, "9" * 5000])
def test_a_size_that_is_none_is_refused_by_name(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RTQ_SEGMENT_MB", text)
    with pytest.raises(UsageError, match=r"RTQ_SEGMENT_MB=.*whole number"):
        memory.client_sizes(MOONCAKE)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (65536, "64 KiB"), (MIB, "1 MiB"), (int(1.5 * GIB), "1.5 GiB"), (123 * GIB + 1, "123 GiB")],
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert memory.shown(size) == text
