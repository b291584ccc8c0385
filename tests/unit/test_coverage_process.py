"""The record of this process: what it counts and notes, when it appears, and that it goes with the last manager."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from relax_tq_rdma import Settings, __version__, coverage
from relax_tq_rdma.coverage import board, reporter
from relax_tq_rdma.coverage.process import Process, whoami
from relax_tq_rdma.coverage.records import JobRecord, ProcessRecord
from relax_tq_rdma.section import JobSection
from relax_tq_rdma.transport.report import Decision

SECTION = JobSection(
    job="j1",
    settings=Settings(accounting="summary"),
    decision=Decision(backend="SimpleStorage", protocol="zmq"),
    plugin_version=__version__,
)


class Manager:
    """As far as the record looks at one."""

    def __init__(self, held: int | None = None) -> None:
        if held is not None:
            counts = SimpleNamespace(capacity=100, held=held, peak=50, retired=1, retired_regions=2, misses=3)
            self.storage_client = SimpleNamespace(protocol="tcp", staging_counts=lambda: counts)


class Board:
    """The board of a cluster, in memory."""

    def __init__(self) -> None:
        self.records: dict[str, Any] = {}
        self.gone = ""

    def put(self, record: Any) -> None:
        if self.gone:
            raise board.Unreachable(self.gone)
        self.records[record.key] = record

    def remove(self, key: str) -> None:
        self.records.pop(key, None)

    def remove_job(self, job: str) -> None:
        self.records = {key: record for key, record in self.records.items() if not key.startswith(f"{job}/")}

    def remove_others(self, job: str) -> None:
        self.records = {key: record for key, record in self.records.items() if key.startswith(f"{job}/")}

    def read(self, job: str = "") -> Any:
        found = [record for key, record in self.records.items() if key.startswith(job)]
        jobs = [record for record in found if isinstance(record, JobRecord)]
        return board.Board(jobs, processes=[record for record in found if isinstance(record, ProcessRecord)])


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Iterator[Board]:
    fake = Board()
    for name in ("put", "remove", "remove_job", "remove_others", "read"):
        monkeypatch.setattr(board, name, getattr(fake, name))
    monkeypatch.setattr(reporter, "INTERVAL_SECONDS", 0.05)
    monkeypatch.setattr(coverage, "_process", None)
    yield fake
    if coverage._reporter is not None:
        coverage._reporter.stop()
    coverage._reporter = coverage._job = None


def soon(condition: Any) -> bool:
    ends = time.monotonic() + 10
    while not condition():
        if time.monotonic() > ends:
            return False
        time.sleep(0.01)
    return True


def test_a_process_is_on_the_board_from_its_first_manager_to_its_last(there: Board) -> None:
    one, two = Manager(), Manager()
    coverage.joined(one, SECTION)
    coverage.joined(two, SECTION)
    assert soon(lambda: len(there.records) == 1)
    [record] = there.records.values()
    assert (record.job, record.pid, record.plugin) == ("j1", os.getpid(), __version__)
    assert (record.backend, record.protocol, record.pool) == ("SimpleStorage", "zmq", None)
    coverage.left(one)
    coverage.left(one)
    assert len(there.records) == 1
    coverage.left(two)
    assert there.records == {}


def test_notes_and_counts_come_with_the_next_record(there: Board) -> None:
    manager = Manager(held=7)
    coverage.note("before the first manager")
    coverage.joined(manager, SECTION)
    coverage.note("something")
    coverage.note("something")
    coverage.count("rows put raw", 2)
    coverage.count("rows put raw", 3)
    assert soon(lambda: any(r.counts.get("rows put raw") == 5 for r in there.records.values()))
    [record] = there.records.values()
    assert record.notes == ("before the first manager", "something")
    assert (record.backend, record.protocol) == ("MooncakeStore", "tcp")
    assert (record.pool.held, record.pool.retired, record.pool.misses) == (7, 3, 3)


def test_the_pools_of_several_clients_add_up() -> None:
    process = Process()
    managers = [Manager(held=7), Manager(held=5)]
    for manager in managers:
        process.joined(manager, SECTION)
    record = process.record()
    assert record is not None
    assert record.pool is not None
    assert (record.pool.capacity, record.pool.held) == (200, 12)


def test_a_manager_that_nobody_closed_is_not_held() -> None:
    process = Process()
    process.joined(Manager(held=7), SECTION)
    record = process.record()
    assert record is not None
    assert record.pool is None


def test_a_hook_that_failed_is_told_by_the_first_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "relax_tq_rdma_hook_failed", "ImportError: x", raising=False)
    process = Process()
    process.joined(Manager(), SECTION)
    record = process.record()
    assert record is not None
    assert record.notes == ("the plugin could not be loaded at the start of this process (ImportError: x)",)


def test_notes_are_bounded() -> None:
    process = Process()
    process.joined(Manager(), SECTION)
    for number in range(1000):
        process.note(f"note {number}")
    record = process.record()
    assert record is not None
    assert len(record.notes) == 20


def test_a_process_that_cannot_reach_the_board_works_on(there: Board, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="relax_tq_rdma.coverage.reporter")
    there.gone = "this process is not connected to Ray"
    manager = Manager()
    coverage.joined(manager, SECTION)
    assert soon(lambda: "relax-tq-rdma status does not list this process" in caplog.text)
    there.gone = ""
    assert soon(lambda: len(there.records) == 1), "Ray was started again: a global restart"
    coverage.left(manager)


def test_a_forked_child_has_no_record_of_its_parent_s(there: Board) -> None:
    manager = Manager()
    coverage.joined(manager, SECTION)
    child = os.fork()
    if child == 0:
        os._exit(0 if coverage._reporter is None and coverage._process is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    coverage.left(manager)


def test_the_driver_says_whether_all_are_alike(there: Board, capsys: pytest.CaptureFixture[str]) -> None:
    coverage.compare_at_start()
    assert capsys.readouterr().err == "", "no job was begun here"
    stale = Manager()
    coverage.joined(stale, JobSection(**{**_fields(SECTION), "job": "j0"}))
    assert soon(lambda: len(there.records) == 1)
    coverage.left(stale)
    there.put(_record("j0", 1))
    coverage.begin(SECTION, "[dataplane] ...")
    assert not any(key.startswith("j0/") for key in there.records), "what an earlier job left is gone"
    there.put(_record("j1", 1))
    coverage.compare_at_start()
    assert capsys.readouterr().err == "[dataplane] coverage: 1 process on 1 node, seams T2, all alike\n"
    there.put(_record("j1", 2, plugin="0.0.1"))
    coverage.compare_at_start()
    said = capsys.readouterr().err
    assert said.startswith("[dataplane] WARNING Rank (pid 2 on a) runs relax-tq-rdma 0.0.1, the driver ")
    coverage.end("j1")
    assert there.records == {}


def test_a_job_is_on_the_board_from_the_beginning_of_its_start(there: Board) -> None:
    coverage.starting("j1")
    [record] = there.records.values()
    assert (record.key, record.driver) == ("j1/start", f"pid {os.getpid()} on {coverage_node()}")
    coverage.begin(SECTION, "[dataplane] ...")
    assert list(there.records) == ["j1/job"]
    coverage.starting("j2")
    coverage.end("j2")
    assert list(there.records) == ["j1/job"], "a start that failed leaves nothing, and those of others alone"


def test_a_start_goes_on_where_nobody_can_be_told(there: Board) -> None:
    there.gone = "this process is not connected to Ray"
    coverage.starting("j1")
    assert there.records == {}


def test_who_this_is() -> None:
    assert whoami() == f"driver, pid {os.getpid()} on {coverage_node()}, relax-tq-rdma {__version__}"


def coverage_node() -> str:
    import socket

    return socket.gethostname().partition(".")[0]


def _fields(section: JobSection) -> dict[str, Any]:
    return {name: getattr(section, name) for name in section.__struct_fields__}


def _record(job: str, pid: int, plugin: str = __version__) -> ProcessRecord:
    return ProcessRecord(
        job=job,
        role="Rank",
        node="a",
        node_id="n",
        pid=pid,
        start_ticks=1,
        plugin=plugin,
        transfer_queue="0.1.11",
        mooncake="",
        seams={"T2": "taken"},
        backend="SimpleStorage",
        protocol="zmq",
        joined=1.0,
        written=1.0,
    )
