"""``install`` and ``uninstall``: what they touch, in which order, and what they refuse."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import transfer_queue as tq
from transfer_queue import interface
from transfer_queue.storage.clients.base import StorageClientFactory
from transfer_queue.storage.managers.base import StorageManager, StorageManagerFactory

import relax_tq_rdma
from relax_tq_rdma import SeamError, Settings, StartError, UsageError
from relax_tq_rdma.compat import HostFacts
from relax_tq_rdma.seams import tq_init
from relax_tq_rdma.section import JobSection
from relax_tq_rdma.summary import parse_start_line
from relax_tq_rdma.transport.report import Decision

pytestmark = pytest.mark.tq_versions

COUNTING = Settings(accounting="summary")


def touched() -> list[Any]:
    """Everything that installing may change."""
    return [
        (tq.init, tq.close, interface.init, interface.close),
        dict(StorageManagerFactory._registry),
        dict(StorageClientFactory._registry),
        sys.meta_path[:],
    ]


@pytest.fixture(autouse=True)
def untouched_afterwards() -> Iterator[None]:
    before = touched()
    yield
    relax_tq_rdma.uninstall()
    assert touched() == before


def test_with_no_flag_nothing_is_touched_and_the_start_line_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    before = touched()
    relax_tq_rdma.install(Settings())
    relax_tq_rdma.install(Settings())
    assert touched() == before
    [line] = capsys.readouterr().err.splitlines()
    assert parse_start_line(line)["backend"] == "SimpleStorage"
    assert relax_tq_rdma.current_start_line() == line
    assert relax_tq_rdma.current_decision() == Decision(backend="SimpleStorage", protocol="zmq")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RTQ_SEGMENT_MB", "4G"),
        ("RTQ_LOCAL_BUFFER_MB", "9" * 13),
        ("RTQ_DEDUP_CACHE_MB", "\udcff"),
        ("RTQ_RECYCLED_MB", "-1"),
        ("RTQ_STORE_CALL_SECONDS", "nan"),
        ("RTQ_STORE_WAIT_SECONDS", "0"),
        ("RTQ_COHORT_SPLIT_SECONDS", "soon"),
        ("RTQ_PAYLOAD_CHECKSUM", "yes"),
    ],
)
def test_a_variable_whose_value_is_none_is_refused_in_the_driver(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=rf"^{name}=.*: expected [^\n]{{5,90}}$"):
        relax_tq_rdma.install(COUNTING)
    relax_tq_rdma.install(Settings())  # nothing of it is used


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({}, "off"),
        ({"per_rank_fetch": True, "tensor_parallel": 2, "pipeline_parallel": 1, "context_parallel": 1}, "on:x2"),
        ({"per_rank_fetch": True, "rollout_routed_experts": True}, "off:rollout_routed_experts"),
    ],
)
def test_with_no_flag_the_line_says_what_the_host_s_switch_comes_to(
    capsys: pytest.CaptureFixture[str], facts: dict[str, Any], said: str
) -> None:
    relax_tq_rdma.install(Settings(), host=HostFacts(**facts))
    *_, line = capsys.readouterr().err.splitlines()
    assert parse_start_line(line)["per_rank_fetch"] == said
    assert relax_tq_rdma.current_start_line() == line


def test_where_the_host_has_a_data_plane_of_its_own_no_line_is_claimed(capsys: pytest.CaptureFixture[str]) -> None:
    relax_tq_rdma.install(Settings(), host=HostFacts(own_data_plane=True))
    assert "backend=" not in capsys.readouterr().err
    assert relax_tq_rdma.current_start_line() == ""


def test_with_no_flag_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, relax_tq_rdma as r; r.install(r.Settings()); r.uninstall(); "
        "print(*sorted({'torch', 'ray', 'transfer_queue', 'mooncake', 'tensordict', 'omegaconf'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "")


@pytest.mark.parametrize(
    "settings",
    [
        COUNTING,
        Settings(storage_backend="mooncake", mooncake_auto_init="job-owned"),
        argparse.Namespace(dataplane_accounting="verbose", unknown_to_us=1),
        None,
    ],
)
def test_install_takes_both_seams_and_uninstall_gives_them_back(settings: Any) -> None:
    before = touched()
    relax_tq_rdma.install(settings)
    assert (relax_tq_rdma.current_decision(), relax_tq_rdma.current_start_line()) == (None, ""), "no init so far"
    assert tq.init is interface.init is not before[0][0]
    assert StorageManagerFactory._registry["SimpleStorage"] is not before[1]["SimpleStorage"]
    relax_tq_rdma.uninstall()
    relax_tq_rdma.uninstall()
    assert touched() == before


def test_repeating_an_install_changes_nothing() -> None:
    relax_tq_rdma.install(COUNTING)
    first = touched()
    relax_tq_rdma.install(Settings(accounting="summary"))
    relax_tq_rdma.install()
    assert touched() == first


def test_other_settings_are_refused_until_uninstalled() -> None:
    relax_tq_rdma.install(COUNTING)
    with pytest.raises(UsageError, match=r"called before with other settings.*uninstall\(\) first"):
        relax_tq_rdma.install(Settings(accounting="verbose"))
    relax_tq_rdma.uninstall()
    relax_tq_rdma.install(Settings(accounting="verbose"))


def test_a_process_that_was_made_ready_as_a_worker_can_become_the_driver() -> None:
    relax_tq_rdma.install()
    relax_tq_rdma.install(COUNTING)
    assert tq_init._guard_of(tq.init)._settings == COUNTING


def test_flags_that_cannot_work_together_install_nothing() -> None:
    before = touched()
    with pytest.raises(UsageError, match="--tq-dedup-multimodal needs --tq-normalize-multimodal"):
        relax_tq_rdma.install(Settings(dedup_multimodal=True))
    assert touched() == before


def test_findings_that_do_not_stop_the_job_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    colocate = HostFacts(fully_async=False, hybrid=False)
    relax_tq_rdma.install(COUNTING, host=colocate)
    assert "[dataplane] NOTE in colocate mode" in capsys.readouterr().err


def test_a_seam_that_does_not_fit_stops_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    before = touched()
    monkeypatch.delattr(StorageManager, "notify_data_update")
    with pytest.raises(SeamError, match=r"seam T2 .*no AsyncSimpleStorageManager\.notify_data_update"):
        relax_tq_rdma.install(COUNTING)
    assert touched() == before


def test_a_seam_that_does_not_fit_is_a_note_where_no_layer_is_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(StorageManager, "notify_data_update")
    relax_tq_rdma.install(Settings())
    relax_tq_rdma.uninstall()
    before = touched()
    relax_tq_rdma.install()
    assert "no AsyncSimpleStorageManager.notify_data_update" in caplog.text
    assert touched()[1:3] == before[1:3]  # the registries stay upstream's; init only watches for a job that needs us


def test_uninstall_is_refused_while_the_data_plane_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    relax_tq_rdma.install(COUNTING)
    guard = tq_init._guard_of(tq.init)
    decision = Decision(backend="SimpleStorage", protocol="zmq")
    guard._joined = JobSection(job="job1", settings=COUNTING, decision=decision, plugin_version="0")
    assert relax_tq_rdma.current_decision() == decision
    with pytest.raises(StartError, match=r"call transfer_queue\.close\(\) first"):
        relax_tq_rdma.uninstall()
    guard._joined = None


@pytest.mark.parametrize("wrong", ["--dataplane-accounting", {"accounting": "summary"}, []])
def test_install_refuses_what_are_no_settings(wrong: Any) -> None:
    with pytest.raises(UsageError, match=r"takes Settings .* Settings.from_flags"):
        relax_tq_rdma.install(wrong)
