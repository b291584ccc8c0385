"""``relax-tq-rdma metrics`` and the reference page of the metrics."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import msgspec
import pytest

from relax_tq_rdma.accounting import cli, names
from relax_tq_rdma.accounting.ledger import Ledger
from relax_tq_rdma.accounting.records import Batch, FieldStats
from relax_tq_rdma.accounting.snapshot import Snapshot, job_folder, write_json
from relax_tq_rdma.errors import DataplaneError, UsageError
from relax_tq_rdma.transport.process import own_id

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("RTQ_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("COLUMNS", "40")  # nothing is lost on a narrow terminal
    return tmp_path / "run"


def publish(run_dir, job, size, written=1.0, owner=None):
    ledger = Ledger()
    stats = FieldStats(name="mm", path="slow", rows=8, bytes=size, unique_bytes=size // 8)
    ledger.end(ledger.begin("put", "train_0"), "ok", Batch(rows=8, fields=(stats,)))
    folder = job_folder(run_dir / "metrics", job)
    folder.mkdir(parents=True, mode=0o700)
    run_dir.chmod(0o700)
    folder.parent.chmod(0o700)
    value = Snapshot(
        job=job,
        node="n",
        owner=owner or own_id(),
        serial=1,
        written=written,
        rows=ledger.totals().to_rows(),
        backend=("SimpleStorage", "zmq", "-", "off"),
    )
    write_json(folder / value.name, value)


def test_json_holds_exact_integers(run_dir, capsys):
    publish(run_dir, "a", 8 * (2**53 + 1))
    assert cli.run(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["job"], found["live_processes"], found["ended_processes"]) == (1, "a", 1, 0)
    assert found["published"] == 1.0
    assert found["backends"] == [{"backend": "SimpleStorage", "protocol": "zmq", "device": "-", "gdr": "off"}]
    assert {
        "name": "dataplane_bytes_total",
        "labels": {"field": "mm", "path": "slow", "direction": "put"},
        "value": 8 * (2**53 + 1),
    } in found["counters"]
    (histogram,) = found["histograms"]
    assert (histogram["name"], histogram["labels"], histogram["count"]) == (
        "dataplane_stage_seconds",
        {"stage": "put"},
        1,
    )


def test_the_tables_show_the_same(run_dir, capsys):
    publish(run_dir, "a", 800_000)
    assert cli.run([]) == 0
    out = capsys.readouterr().out
    assert re.match(r"job a runs on this node, last news \d+ d \d+ h ago: 1 live process, 0 ended\n", out)
    (row,) = [line.split() for line in out.splitlines() if line.startswith("mm")]
    assert row == ["mm", "put", "slow", "8", "800,000", "100,000", "8.0x", "-", "-"]
    assert ["operations", "put,", "ok", "1"] in [line.split() for line in out.splitlines()]


def test_the_job_that_published_last_is_shown_unless_one_is_named(run_dir, capsys):
    publish(run_dir, "old", 8, written=1.0)
    publish(run_dir, "new", 8, written=2.0)
    cli.run(["--json"])
    assert json.loads(capsys.readouterr().out)["job"] == "new"
    cli.run(["--json", "--job", "old"])
    assert json.loads(capsys.readouterr().out)["job"] == "old"


def test_a_job_that_has_ended_is_said_to_have(run_dir, capsys):
    dead = msgspec.structs.replace(own_id(), start_ticks=1)
    publish(run_dir, "a", 8, written=time.time() - 130, owner=dead)
    assert cli.run([]) == 0
    out = capsys.readouterr().out
    assert re.match(r"job a has ended on this node, last news 2 min \d+ s ago: 0 live processes, 1 ended\n", out)


@pytest.mark.parametrize("argv", [[], ["--job", "nobody"]])
def test_nothing_published_is_one_sentence_with_a_way_out(run_dir, argv):
    with pytest.raises(DataplaneError, match="--dataplane-accounting summary") as caught:
        cli.run(argv)
    assert len(str(caught.value).splitlines()) == 1


def test_the_jobs_that_are_there_are_named_beside_one_that_is_not(run_dir):
    for number in range(10):
        publish(run_dir, f"j{number}", 8)
    with pytest.raises(DataplaneError, match=r"no metrics of job 'x' in .*, but of j0, j1, .*, j7 and 2 more: start"):
        cli.run(["--job", "x"])


def test_the_help_is_for_people(capsys):
    with pytest.raises(SystemExit) as end:
        cli.run(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert "Show the byte and stage totals of a job on this node" in text
    assert "`" not in text


def test_a_wrong_argument_is_a_usage_error(run_dir):
    with pytest.raises(UsageError):
        cli.run(["--nonsense"])


@pytest.mark.parametrize("metric", names.METRICS.values(), ids=lambda m: m.name)
def test_the_reference_page_lists_every_metric_with_its_labels(metric):
    labels = ", ".join(f"`{label}`" for label in metric.labels) or "none"
    assert f"| `{metric.name}` | {metric.kind} | {labels} |" in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("stage", names.STAGES)
def test_the_reference_page_lists_every_stage(stage):
    assert f"`{stage}`" in PAGE.read_text(encoding="utf-8")
