"""Snapshot files: exact sums over live and dead processes, bounded, safe against crashes and strangers' files."""

from __future__ import annotations

import logging
import os
import pickle
import time

import msgspec
import pytest

from relax_tq_rdma.accounting import notes, snapshot
from relax_tq_rdma.accounting.records import Histogram, Totals
from relax_tq_rdma.accounting.snapshot import Snapshot, compact, read_node, remove_finished, write_json
from relax_tq_rdma.transport.process import ProcessId, boot_scope, own_id

KEY = ("dataplane_bytes_total", ("mm", "slow", "put"))
BACKEND = ("SimpleStorage", "zmq", "-", "off")


@pytest.fixture(autouse=True)
def fresh_notes(monkeypatch):
    monkeypatch.setattr(notes, "_SAID", set())


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "job"
    path.mkdir()
    return path


def dead(n=0):
    """A process that cannot exist: pids end at 2^22."""
    return ProcessId(pid=(1 << 22) + 1 + n, start_ticks=1, boot=boot_scope())


def write(folder, size, owner=None, serial=1, **changes):
    histogram = Histogram()
    histogram.observe(1000)
    totals = Totals(counters={KEY: size}, histograms={("dataplane_stage_seconds", ("put",)): histogram})
    value = Snapshot(
        **{
            "job": "j",
            "node": "n",
            "owner": owner or own_id(),
            "serial": serial,
            "written": 1.0,
            "rows": totals.to_rows(),
            "backend": BACKEND,
        }
        | changes
    )
    write_json(folder / value.name, value)
    return folder / value.name


def total(folder):
    return read_node(folder).totals.counters.get(KEY, 0)


def test_live_and_dead_processes_add_up_exactly(folder):
    write(folder, 2**53)
    write(folder, 1, dead())
    view = read_node(folder)
    assert view.totals.counters[KEY] == 2**53 + 1
    assert view.totals.histograms["dataplane_stage_seconds", ("put",)].count == 2
    assert (view.live, view.ended) == (1, 1)


def test_gauges_come_from_live_processes_only(folder):
    write(folder, 1, dead(), backend=("MooncakeStore", "tcp", "-", "off"))
    assert read_node(folder).backends == ()
    write(folder, 1)
    assert read_node(folder).backends == (BACKEND,)


def test_two_ledgers_of_one_process_are_one_process(folder):
    write(folder, 1, serial=1)
    write(folder, 2, serial=2)
    view = read_node(folder)
    assert (view.live, view.totals.counters[KEY]) == (1, 3)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not json",
        b"{}",
        pickle.dumps({"rows": []}),
        b'{"job":"j","node":"n","owner":{"pid":1,"start_ticks":1,"boot":"b"},"serial":1,"written":1,"rows":[],"schema":9}',
        b'{"job":"j","node":"n","owner":{"pid":1,"start_ticks":1,"boot":"b"},"serial":1,"written":1,"rows":[["x",[],1]]}',
        b" " * (snapshot.MAX_BYTES + 1),
    ],
    ids=["empty", "text", "no fields", "pickle", "newer schema", "unknown metric", "huge"],
)
def test_a_file_that_cannot_be_trusted_is_left_out_with_one_warning(folder, caplog, content):
    write(folder, 5)
    bad = write(folder, 7, dead())
    bad.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert total(folder) == 5
        assert total(folder) == 5
    (record,) = caplog.records
    assert bad.name in record.getMessage()


def test_a_snapshot_under_another_name_is_not_counted_twice(folder):
    original = write(folder, 5, dead(0))
    (folder / dead_name(1)).write_bytes(original.read_bytes())
    assert total(folder) == 5


def dead_name(n):
    return Snapshot(job="", node="", owner=dead(n), serial=1, written=0, rows=[]).name


def test_many_dead_processes_become_one_file(folder):
    live = write(folder, 1000)
    for n in range(snapshot.KEEP_DEAD + 1):
        write(folder, 1, dead(n), written=5.0 if n == 3 else 2.0)
    compact(folder)
    files = set(os.listdir(folder))
    assert files == {live.name, snapshot.RETIRED, snapshot.LOCK}
    view = read_node(folder)
    assert view.totals.counters[KEY] == 1000 + snapshot.KEEP_DEAD + 1
    assert (view.live, view.ended) == (1, snapshot.KEEP_DEAD + 1)
    assert view.written == 5.0, "the newest news, also of those that are summed up"


def test_compaction_goes_on_for_the_life_of_a_job(folder):
    for n in range(5 * (snapshot.KEEP_DEAD + 1)):
        write(folder, 1, dead(n))
        compact(folder)
    assert len(os.listdir(folder)) <= snapshot.KEEP_DEAD + 2
    assert total(folder) == 5 * (snapshot.KEEP_DEAD + 1)
    assert read_node(folder).ended == 5 * (snapshot.KEEP_DEAD + 1)


def test_few_dead_processes_stay_as_they_are(folder):
    write(folder, 1, dead())
    compact(folder)
    assert snapshot.RETIRED not in os.listdir(folder)


def test_a_crash_between_sum_and_removal_counts_nothing_twice(folder, monkeypatch):
    for n in range(snapshot.KEEP_DEAD + 1):
        write(folder, 1, dead(n))

    def crash(self, missing_ok=False):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(snapshot.Path, "unlink", crash)
        with pytest.raises(KeyboardInterrupt):
            compact(folder)
    assert total(folder) == snapshot.KEEP_DEAD + 1
    write(folder, 1, dead(1000))
    compact(folder)
    assert total(folder) == snapshot.KEEP_DEAD + 2
    assert sorted(os.listdir(folder)) == [snapshot.LOCK, snapshot.RETIRED]


def test_files_of_another_boot_or_container_are_not_summed_away(folder):
    for n in range(snapshot.KEEP_DEAD + 5):
        write(folder, 1, ProcessId(pid=n + 1, start_ticks=1, boot="another:boot"))
    compact(folder)
    assert snapshot.RETIRED not in os.listdir(folder)
    assert total(folder) == snapshot.KEEP_DEAD + 5


def test_reading_does_not_wait_for_ever_for_a_held_lock(folder, monkeypatch):
    import fcntl

    monkeypatch.setattr(snapshot, "READ_WAIT_S", 0.1)
    write(folder, 5)
    fd = os.open(folder / snapshot.LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        began = time.monotonic()
        assert total(folder) == 5
        assert time.monotonic() - began < 2
    finally:
        os.close(fd)


def test_a_fork_while_the_lock_is_held_does_not_keep_it(folder):
    """The child shares the open file: closing it in the parent alone would leave the lock held."""
    with snapshot._locked(folder, 2) as held:  # LOCK_EX
        assert held
        pid = os.fork()
        if pid == 0:
            time.sleep(5)
            os._exit(0)
    try:
        with snapshot._locked(folder, 2) as held:
            assert held
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


# --- finished jobs ----------------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path):
    (tmp_path / "mine").mkdir()
    return tmp_path


def finished(root, name="old", owner=None):
    folder = root / name
    folder.mkdir()
    write(folder, 1, owner or dead())
    for extra in (snapshot.RETIRED, snapshot.LABELS, snapshot.LOCK, "serve-127.0.0.1:9400.lock"):
        (folder / extra).write_text("")
    return folder


def later():
    return time.time() + snapshot.FINISHED_AFTER_S + 60


def test_a_finished_job_is_removed_after_its_time(root):
    folder = finished(root)
    remove_finished(root, root / "mine")
    assert folder.exists()
    remove_finished(root, root / "mine", now=later())
    assert not folder.exists()


def test_a_job_with_a_live_process_is_never_removed(root):
    folder = finished(root, owner=own_id())
    remove_finished(root, root / "mine", now=later())
    assert len(list(folder.iterdir())) == 5


def test_the_own_job_is_never_removed(root):
    folder = finished(root)
    remove_finished(root, folder, now=later())
    assert folder.exists()


def test_files_that_are_not_ours_stay(root, tmp_path_factory):
    folder = finished(root)
    (folder / "thesis.txt").write_text("all of it")
    outside = tmp_path_factory.mktemp("outside")
    (outside / dead_name(0)).write_text("{}")
    (root / "link").symlink_to(outside)
    remove_finished(root, root / "mine", now=later())
    assert os.listdir(folder) == ["thesis.txt"]
    assert (outside / dead_name(0)).exists()


@pytest.mark.parametrize(("job", "expected"), [("a1b2", "a1b2"), ("../../etc", "__.._etc"), ("", "_"), ("..", "_")])
def test_a_job_token_cannot_leave_the_folder(tmp_path, job, expected):
    folder = snapshot.job_folder(tmp_path, job)
    assert folder.parent == tmp_path
    assert folder.name == expected


def test_snapshots_are_plain_json(folder):
    path = write(folder, 2**53 + 1)
    rows = msgspec.json.decode(path.read_bytes())["rows"]
    assert ["dataplane_bytes_total", ["mm", "slow", "put"], 2**53 + 1] in rows
