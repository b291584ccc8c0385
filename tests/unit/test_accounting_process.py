"""One accounting per process, whatever happens to the module: reload, a second name, forks (FC-48)."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys

import pytest
import torch

from relax_tq_rdma import accounting
from relax_tq_rdma.accounting import notes, process
from relax_tq_rdma.accounting.snapshot import read_node
from tests.accounting_process import python

KEY = ("dataplane_bytes_total", ("x", "fast", "put"))


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("RTQ_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(notes, "_SAID", set())
    yield tmp_path / "run"
    accounting.configure("off")


def count(size=1):
    ledger = accounting.ledger()
    ledger.end(ledger.begin("put", "train_0"), "ok", accounting.measure({"x": torch.zeros(size, dtype=torch.uint8)}))


def published(run_dir, job="job"):
    accounting.flush()
    return read_node(run_dir / "metrics" / job).totals.counters[KEY]


def test_configure_twice_keeps_the_counts(run_dir):
    accounting.configure("summary", job="job", sink=print)
    count(5)
    accounting.configure("summary", job="job")
    assert accounting.ledger().totals().counters[KEY] == 5


def test_off_and_on_again_never_makes_the_node_sum_shrink(run_dir):
    for _ in range(3):
        accounting.configure("summary", job="job", sink=lambda line: None)
        count(5)
        with accounting.stage("decode"):
            pass
        accounting.configure("off")
    assert read_node(run_dir / "metrics" / "job").totals.counters[KEY] == 15


def test_reload_keeps_ledger_and_counts(run_dir):
    accounting.configure("summary", job="job", sink=lambda line: None)
    count(5)
    before = accounting.ledger()
    for name in ("process", "stages", "mixin"):
        importlib.reload(sys.modules[f"relax_tq_rdma.accounting.{name}"])
    importlib.reload(accounting)
    assert accounting.ledger() is before
    with accounting.stage("decode"):
        count(2)
    assert published(run_dir) == 7


def test_a_second_name_shares_the_ledger(run_dir):
    accounting.configure("summary", job="job", sink=lambda line: None)
    spec = importlib.util.find_spec("relax_tq_rdma.accounting.process")
    twin_spec = importlib.util.spec_from_file_location("plugin_twin", spec.origin)
    twin = importlib.util.module_from_spec(twin_spec)
    twin_spec.loader.exec_module(twin)
    assert twin.current() is process.current()
    twin.configure("summary", job="job")
    assert twin.current() is process.current()
    twin.configure("off")
    assert accounting.ledger() is None


def test_a_process_that_moves_nothing_leaves_nothing(run_dir):
    accounting.configure("summary", job="job")
    accounting.flush()
    assert not run_dir.exists()


def test_without_a_job_token_a_process_is_its_own_job(run_dir):
    accounting.configure("summary", sink=lambda line: None)
    with accounting.stage("decode"):
        pass
    accounting.flush()
    (folder,) = (run_dir / "metrics").iterdir()
    assert folder.name.startswith(f"solo-{os.getpid()}-")


COUNT = """
import os, sys
from relax_tq_rdma import accounting
def count(n):
    stats = accounting.FieldStats(name="x", path="fast", rows=n, bytes=n, unique_bytes=n)
    ledger = accounting.ledger()
    ledger.end(ledger.begin("put", "train_0"), "ok", accounting.Batch(rows=n, fields=(stats,)))
    with accounting.stage("decode"):
        pass
accounting.configure("summary", job="job", node="n")
"""


def test_a_forked_child_starts_at_zero_in_its_own_file(run_dir):
    """Its counts do not vanish, and the parent's are not counted again."""
    done = python(
        COUNT
        + """
count(100)
pid = os.fork()
if pid == 0:
    assert accounting.ledger().steps() == ()
    count(7)
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
count(10)
"""
    )
    assert done.returncode == 0, done.stderr
    view = read_node(run_dir / "metrics" / "job")
    assert view.totals.counters[KEY] == 117
    assert view.ended == 2
    lines = [line for line in done.stderr.splitlines() if "DeprecationWarning" not in line and "os.fork()" not in line]
    assert sorted(line.split("put_bytes=")[1].split()[0] for line in lines) == ["110", "7"]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_of_multiprocessing_publish_at_their_end(run_dir, tmp_path, method):
    script = tmp_path / "job.py"
    script.write_text(
        COUNT
        + f"""
import multiprocessing
if __name__ == "__main__":
    context = multiprocessing.get_context({method!r})
    child = context.Process(target=count, args=(7,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
"""
    )
    done = python(f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')")
    assert done.returncode == 0, done.stderr
    assert read_node(run_dir / "metrics" / "job").totals.counters[KEY] == 7
    assert "put_bytes=7" in done.stderr


def test_the_last_step_line_comes_at_exit(run_dir):
    done = python(COUNT + "count(3)")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("[dataplane] step=train_0 put_rows=3 put_bytes=3 ")
    assert done.stdout == ""


def test_no_place_to_write_costs_the_metrics_and_nothing_else(tmp_path):
    done = python(
        f"""
import os, tempfile
gone = {str(tmp_path / "gone")!r}
os.mkdir(gone)
os.chdir(gone)
os.rmdir(gone)
tempfile._candidate_tempdir_list = lambda: ["/dev/null"]
from relax_tq_rdma import accounting
accounting.configure("verbose", job="job")
ledger = accounting.ledger()
ledger.end(ledger.begin("put", "train_0"), "ok")
accounting.current().tick()
accounting.configure("off")
""",
        RTQ_RUN_DIR="",
        XDG_RUNTIME_DIR="",
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("metrics of this process are not published") == 1
    assert "step=train_0" in done.stderr


def test_importing_and_using_it_while_off_is_light():
    done = python(
        """
import json, sys
from relax_tq_rdma import accounting
with accounting.stage("put"):
    pass
accounting.record_alloc(1.0)
heavy = ("torch", "numpy", "ray", "tensordict", "transfer_queue", "prometheus_client", "rich", "mooncake")
print(json.dumps([name for name in heavy if name in sys.modules]))
import threading
assert threading.active_count() == 1
"""
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
