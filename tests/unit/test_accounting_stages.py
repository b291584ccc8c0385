"""Stage timers: they time when on, cost nothing when off, and never break the job."""

from __future__ import annotations

import logging
import time

import pytest

from relax_tq_rdma import accounting
from relax_tq_rdma.accounting import notes
from relax_tq_rdma.accounting.names import STAGES
from relax_tq_rdma.transport.report import Decision, Fallback


@pytest.fixture
def on(tmp_path, monkeypatch):
    monkeypatch.setenv("RTQ_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(notes, "_SAID", set())
    accounting.configure("summary", job="stages", node="n", sink=lambda line: None)
    yield accounting.ledger()
    accounting.configure("off")


def histogram(ledger, name, *labels):
    return ledger.totals().histograms.get((name, labels))


@pytest.mark.parametrize("name", STAGES)
def test_every_stage_is_timed(on, name):
    with accounting.stage(name):
        time.sleep(0.002)
    found = histogram(on, "dataplane_stage_seconds", name)
    assert found.count == 1
    assert found.sum_ns >= 2_000_000


def test_fanout_is_timed_by_mode_and_as_a_stage(on):
    with accounting.fanout("per_rank"):
        pass
    assert histogram(on, "dataplane_fanout_seconds", "per_rank").count == 1
    assert histogram(on, "dataplane_stage_seconds", "fanout").count == 1


def test_a_block_that_raises_is_not_counted_and_raises(on):
    with pytest.raises(KeyError), accounting.stage("decode"):
        raise KeyError("x")
    assert histogram(on, "dataplane_stage_seconds", "decode") is None


@pytest.mark.parametrize(("timer", "name"), [(accounting.stage, "cooking"), (accounting.fanout, "rank7")])
def test_an_unknown_name_is_said_once_and_ignored(on, caplog, timer, name):
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with timer(name):
                pass
    (record,) = caplog.records
    assert name in record.getMessage()
    assert on.totals().histograms == {}


def test_off_reads_no_clock_and_makes_no_object(monkeypatch):
    accounting.configure("off")

    def no_clock():
        raise AssertionError("the clock was read")

    monkeypatch.setattr(time, "perf_counter_ns", no_clock)
    first = accounting.stage("put")
    with first:
        pass
    assert accounting.stage("get") is first
    assert accounting.fanout("rank0") is first


def test_off_records_nothing():
    accounting.configure("off")
    accounting.record_register("get", "fast", 0.1)
    accounting.record_alloc(0.1)
    accounting.record_retry("put")
    accounting.record_wire("mm", "put", wire_bytes=1)
    accounting.record_fallback(
        Fallback(from_="MooncakeStore/rdma", to="MooncakeStore/tcp", reason="r", check="memlock")
    )
    accounting.set_backend(Decision(backend="SimpleStorage", protocol="zmq"))
    accounting.flush()
    assert accounting.ledger() is None


def test_records_reach_the_ledger(on):
    accounting.record_register("get", "fast", 0.5, regions=2)
    accounting.record_alloc(0.25)
    accounting.record_retry("put")
    accounting.record_wire("mm", "put", wire_bytes=10, saved_bytes=70)
    accounting.record_fallback(
        Fallback(from_="MooncakeStore/rdma", to="MooncakeStore/tcp", reason="GID all zero on n2", check="rdma_gid")
    )
    totals = on.totals()
    assert totals.counters == {
        ("dataplane_mr_register_total", ("get", "fast")): 2,
        ("dataplane_operations_total", ("put", "retried")): 1,
        ("dataplane_bytes_wire_total", ("mm", "put")): 10,
        ("dataplane_bytes_saved_total", ("mm", "put")): 70,
        ("dataplane_fallback_total", ("MooncakeStore/rdma", "MooncakeStore/tcp", "rdma_gid")): 1,
    }
    assert histogram(on, "dataplane_mr_register_seconds").sum_ns == 500_000_000
    assert histogram(on, "dataplane_get_alloc_seconds").sum_ns == 250_000_000
