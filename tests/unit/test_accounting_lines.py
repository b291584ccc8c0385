"""The step line and the JSON lines."""

from __future__ import annotations

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_tq_rdma.accounting import notes
from relax_tq_rdma.accounting.journal import Journal
from relax_tq_rdma.accounting.lines import parse_step_line, step_line
from relax_tq_rdma.accounting.records import FieldFlow, Flow, PoolState, Staged, StepSummary
from tests.accounting_process import python


def summary(**changes):
    values = {
        "step": "train_3",
        "update": 1,
        "put": Flow(
            rows=64,
            bytes=800,
            unique_bytes=100,
            fast_bytes=200,
            slow_bytes=600,
            seconds=0.5,
            wire_bytes=164,
            saved_bytes=700,
        ),
        "get": Flow(rows=64, bytes=800, fast_bytes=200, slow_bytes=600, seconds=0.25, saved_bytes=700),
        "stages": {"put": 0.5, "get": 0.25, "get_meta": 0.0012, "fanout": 0.1},
        "fields": (),
        "effective_s": 2.0,
    }
    return StepSummary(**(values | changes))


def test_the_line_of_a_step():
    assert step_line(summary(), node="n1", pid=42) == (
        "[dataplane] step=train_3 put_rows=64 put_bytes=800 put_fast_bytes=200 put_slow_bytes=600 put_wire_bytes=164 "
        "put_saved_bytes=700 put_s=0.5000 put_GBps=0.000 unique_bytes=100 redundancy=8.0x unique_by=identity "
        "get_rows=64 get_bytes=800 get_fast_bytes=200 get_slow_bytes=600 get_s=0.2500 get_GBps=0.000 "
        "effective_bytes=100 effective_s=2.0000 effective_GBps=0.000 get_meta_s=0.0012 fanout_s=0.1000 node=n1 pid=42"
    )


def test_rates_are_ten_to_the_ninth_bytes_a_second():
    flow = Flow(rows=1, bytes=3_000_000_000, unique_bytes=1, seconds=2.0)
    assert parse_step_line(step_line(summary(put=flow)))["put_GBps"] == "1.500"


def test_a_side_that_moved_nothing_is_left_out():
    pairs = parse_step_line(step_line(summary(put=Flow(), effective_s=None)))
    assert not [key for key in pairs if key.startswith(("put_", "effective", "unique", "redundancy"))]


def test_failures_show_even_when_nothing_moved():
    pairs = parse_step_line(step_line(summary(put=Flow(failed=1, retried=2))))
    assert (pairs["put_failed"], pairs["put_retried"]) == ("1", "2")
    assert "put_bytes" not in pairs


def test_an_update_and_unmeasured_leaves_are_marked():
    pairs = parse_step_line(step_line(summary(update=2, unmeasured=3)))
    assert (pairs["update"], pairs["unmeasured"]) == ("2", "3")


@given(st.text(min_size=1), st.text())
def test_any_partition_id_and_node_survive_on_one_line(step, node):
    line = step_line(summary(step=step), node=node)
    assert len(line.splitlines()) == 1
    pairs = parse_step_line(line)
    assert pairs["step"] == step
    assert pairs.get("node", "") == node


@pytest.mark.parametrize("text", ["", "step=train_3", "[dataplane] backend=SimpleStorage", "[dataplane] step=a b=c d"])
def test_other_text_is_no_step_line(text):
    with pytest.raises(ValueError, match="not a step line"):
        parse_step_line(text)


# --- JSON lines -------------------------------------------------------------------------------------------------------

FIELD = FieldFlow(
    field="mm",
    direction="put",
    path="slow",
    rows=8,
    bytes=2**53 + 1,
    unique_bytes=5,
    unique_by="content",
    dtypes=("int64",),
)


@pytest.fixture
def fresh_notes(monkeypatch):
    monkeypatch.setattr(notes, "_SAID", set())


def test_verbose_writes_one_json_line_a_field(tmp_path):
    journal = Journal(tmp_path / "new" / "a.jsonl")
    journal.write(summary(fields=(FIELD, FIELD)))
    journal.write(summary(fields=(FIELD,), update=2))
    lines = [json.loads(line) for line in journal.path.read_text().splitlines()]
    assert len(lines) == 3
    assert lines[0] == {
        "schema": 1,
        "step": "train_3",
        "update": 1,
        "field": "mm",
        "direction": "put",
        "path": "slow",
        "rows": 8,
        "bytes": 2**53 + 1,
        "unique_bytes": 5,
        "unique_by": "content",
        "dtypes": ["int64"],
        "unmeasured": 0,
        "wire_bytes": None,
        "saved_bytes": 0,
    }


@pytest.mark.parametrize("where", ["/dev/full", "/proc/nowhere/a.jsonl", "/dev/null/a.jsonl"])
def test_a_full_disk_or_bad_folder_costs_one_warning_and_no_error(where, caplog, fresh_notes):
    from pathlib import Path

    journal = Journal(Path(where))
    with caplog.at_level(logging.WARNING):
        journal.write(summary(fields=(FIELD,)))
        journal.write(summary(fields=(FIELD,)))
    (record,) = caplog.records
    assert where in record.getMessage()
    assert "RTQ_ACCOUNTING_DIR" in record.getMessage()


def test_a_disk_that_fills_up_in_mid_line_spoils_no_other_line(tmp_path):
    path = tmp_path / "a.jsonl"
    done = python(
        f"""
import resource
from pathlib import Path
from tests.unit.test_accounting_lines import FIELD, summary
from relax_tq_rdma.accounting.journal import Journal
journal = Journal(Path({str(path)!r}))
journal.write(summary(fields=(FIELD,), update=1))
size = journal.path.stat().st_size
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (size * 3 // 2, hard))
journal.write(summary(fields=(FIELD,), update=2))
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
journal.write(summary(fields=(FIELD,), update=3))
"""
    )
    assert done.returncode == 0, done.stderr
    assert "is not written" in done.stderr
    assert [json.loads(line)["update"] for line in path.read_text().splitlines()] == [1, 3]


def staged_step(**pool):
    staged = (
        Staged(direction="get", rung="lend", values=3, bytes=300),
        Staged(direction="put", rung="call", values=1, bytes=7),
    )
    return StepSummary(
        step="s", update=1, put=Flow(), get=Flow(), stages={}, fields=(), staged=staged, pool=PoolState(**pool)
    )


def test_the_line_says_by_which_memory_bytes_went_and_what_to_do():
    pairs = parse_step_line(step_line(staged_step(capacity=1000, held=5, peak=9, retired=2, advised_mb=128)))
    assert (pairs["get_lend_bytes"], pairs["put_call_bytes"]) == ("300", "7")
    assert (pairs["pool_held_bytes"], pairs["pool_peak_bytes"], pairs["pool_retired_bytes"]) == ("5", "9", "2")
    assert pairs["advised_host_staging_mb"] == "128"
    quiet = parse_step_line(step_line(staged_step(capacity=1000)))
    assert not {"pool_retired_bytes", "advised_host_staging_mb"} & set(quiet)


def test_verbose_writes_one_more_line_with_the_pool(tmp_path):
    Journal(tmp_path / "a.jsonl").write(staged_step(capacity=1000, held=5))
    [line] = map(json.loads, (tmp_path / "a.jsonl").read_text().splitlines())
    assert line["step"] == "s"
    assert line["staged"][0] == {"direction": "get", "rung": "lend", "values": 3, "bytes": 300}
    assert line["pool"] == {"capacity": 1000, "held": 5, "peak": 0, "retired": 0, "advised_mb": 0}
