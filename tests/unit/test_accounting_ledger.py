"""The ledger: exact, bounded, and only what was delivered counts (design §8, FC-48)."""

from __future__ import annotations

import threading

import pytest

from relax_tq_rdma.accounting.ledger import KEEP_STEPS, Ledger
from relax_tq_rdma.accounting.names import FIELD_LIMIT, METRICS
from relax_tq_rdma.accounting.records import Batch, FieldStats, PoolState, Staged, Totals

S = 1_000_000_000


class Clock:
    def __init__(self):
        self.now = 0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def ledger(clock):
    return Ledger(clock=clock)


def batch(size=100, *, field="mm", path="slow", rows=8, unique=None, unique_by="identity"):
    stats = FieldStats(name=field, path=path, rows=rows, bytes=size, unique_bytes=size if unique is None else unique)
    return Batch(rows=rows, fields=(stats,), unique_by=unique_by)


def put(ledger, step="train_0", what=None, direction="put", result="ok"):
    ledger.end(ledger.begin(direction, step), result, what or batch())


def counter(ledger, name, *labels):
    return ledger.totals().counters.get((name, labels), 0)


def test_a_delivered_put_counts_in_totals_and_in_its_step(ledger):
    put(ledger, what=batch(800, unique=100))
    assert counter(ledger, "dataplane_bytes_total", "mm", "slow", "put") == 800
    assert counter(ledger, "dataplane_bytes_unique_total", "mm") == 100
    assert counter(ledger, "dataplane_rows_total", "mm", "slow", "put") == 8
    assert counter(ledger, "dataplane_operations_total", "put", "ok") == 1
    step = ledger.step("train_0")
    assert (step.put.rows, step.put.bytes, step.put.unique_bytes, step.put.slow_bytes) == (8, 800, 100, 800)


def test_a_get_adds_no_unique_bytes_to_the_metric(ledger):
    put(ledger, direction="get")
    assert counter(ledger, "dataplane_bytes_total", "mm", "slow", "get") == 100
    assert counter(ledger, "dataplane_bytes_unique_total", "mm") == 0


@pytest.mark.parametrize("result", ["failed", "cancelled"])
def test_what_was_not_delivered_adds_no_bytes_and_no_time(ledger, result):
    """FC-48: a put that fails after two retries."""
    operation = ledger.begin("put", "train_0")
    ledger.retried("put", "train_0")
    ledger.retried("put", "train_0")
    ledger.end(operation, result, batch())
    totals = ledger.totals()
    assert totals.counters == {
        ("dataplane_operations_total", ("put", "retried")): 2,
        ("dataplane_operations_total", ("put", result)): 1,
    }
    assert totals.histograms == {}
    step = ledger.step("train_0")
    assert (step.put.bytes, step.put.failed, step.put.retried) == (0, 1, 2)


def test_a_put_that_succeeds_after_a_retry_counts_once(ledger):
    operation = ledger.begin("put", "train_0")
    ledger.retried("put", "train_0")
    ledger.end(operation, "ok", batch(100))
    assert counter(ledger, "dataplane_bytes_total", "mm", "slow", "put") == 100


def test_integers_stay_exact_beyond_two_to_the_53(ledger):
    put(ledger, what=batch(2**53))
    put(ledger, what=batch(1))
    assert counter(ledger, "dataplane_bytes_total", "mm", "slow", "put") == 2**53 + 1
    assert Totals.from_rows(ledger.totals().to_rows()).counters == ledger.totals().counters


def test_a_deduplicated_group_keeps_logical_wire_and_saved_apart(ledger):
    """FC-48: a group of 8, written once."""
    put(ledger, what=batch(8 * 1000, unique=1000))
    ledger.wire("mm", "put", 1000 + 8 * 64, 7 * 1000, "train_0")
    step = ledger.step("train_0")
    assert (step.put.bytes, step.put.unique_bytes, step.put.wire_bytes, step.put.saved_bytes) == (
        8000,
        1000,
        1512,
        7000,
    )
    assert counter(ledger, "dataplane_bytes_total", "mm", "slow", "put") == 8000
    assert counter(ledger, "dataplane_bytes_wire_total", "mm", "put") == 1512
    assert counter(ledger, "dataplane_bytes_saved_total", "mm", "put") == 7000


def test_wire_bytes_are_unknown_until_somebody_reports_them(ledger):
    put(ledger)
    assert ledger.step("train_0").put.wire_bytes is None


def test_ten_thousand_field_names_take_bounded_memory(ledger):
    for i in range(10_000):
        put(ledger, what=batch(1, field=f"field_{i}", rows=1))
    fields = {labels[0] for name, labels in ledger.totals().counters if name == "dataplane_bytes_total"}
    assert len(fields) == FIELD_LIMIT + 1
    assert "field_0" in fields
    assert "field_9999" not in fields
    assert counter(ledger, "dataplane_bytes_total", "other", "slow", "put") == 10_000 - FIELD_LIMIT
    assert len(ledger.step("train_0").fields) == FIELD_LIMIT + 1
    assert ledger.step("train_0").put.bytes == 10_000


def test_only_the_last_steps_are_kept_and_totals_lose_nothing(ledger):
    for i in range(100):
        put(ledger, f"train_{i}")
    assert [s.step for s in ledger.steps()] == [f"train_{i}" for i in range(100 - KEEP_STEPS, 100)]
    assert counter(ledger, "dataplane_bytes_total", "mm", "slow", "put") == 100 * 100


def test_label_values_outside_their_set_become_other(ledger):
    ledger.fallback("MooncakeStore/rdma", "MooncakeStore/tcp", "rdma_gid")
    ledger.fallback("MooncakeStore/rdma", "somewhere", "no route to host 10.0.0.1")
    assert counter(ledger, "dataplane_fallback_total", "MooncakeStore/rdma", "MooncakeStore/tcp", "rdma_gid") == 1
    assert counter(ledger, "dataplane_fallback_total", "MooncakeStore/rdma", "other", "other") == 1


# --- time -------------------------------------------------------------------------------------------------------------


def test_overlapping_operations_count_their_common_time_once(ledger, clock):
    first = ledger.begin("put", "train_0")
    clock.now = 1 * S
    second = ledger.begin("put", "train_0")
    clock.now = 3 * S
    ledger.end(first, "ok", batch())
    clock.now = 4 * S
    ledger.end(second, "ok", batch())
    clock.now = 9 * S
    third = ledger.begin("put", "train_0")
    clock.now = 10 * S
    ledger.end(third, "ok", batch())
    assert ledger.step("train_0").put.seconds == 5.0
    assert ledger.totals().histograms["dataplane_stage_seconds", ("put",)].sum_ns == (3 + 3 + 1) * S


def test_measuring_a_result_takes_no_time_from_the_get(ledger, clock):
    operation = ledger.begin("get", "train_0")
    clock.now = 2 * S
    ledger.stop(operation)
    clock.now = 5 * S
    ledger.end(operation, "ok", batch())
    assert ledger.step("train_0").get.seconds == 2.0


def test_effective_bandwidth_is_first_put_to_last_rebuild_without_saved_bytes(ledger, clock):
    """RFC §5.3."""
    clock.now = 1 * S
    operation = ledger.begin("put", "train_0")
    clock.now = 2 * S
    ledger.end(operation, "ok", batch(8000))
    assert ledger.step("train_0").effective_s is None
    clock.now = 5 * S
    operation = ledger.begin("get", "train_0")
    clock.now = 6 * S
    ledger.end(operation, "ok", batch(8000))
    ledger.wire("mm", "get", 1000, 7000, "train_0")
    assert ledger.step("train_0").effective_s == 5.0
    clock.now = 7 * S
    ledger.stage("rebuild", 1 * S, "train_0")
    step = ledger.step("train_0")
    assert (step.effective_bytes, step.effective_s) == (1000, 6.0)


def test_a_consumer_alone_knows_no_effective_bandwidth(ledger):
    put(ledger, direction="get")
    assert ledger.step("train_0").effective_s is None


def test_stages_go_to_their_step_or_to_the_newest(ledger):
    ledger.stage("image_processor", 5, None)  # before any step: in the totals only
    put(ledger, "train_0")
    put(ledger, "train_1")
    ledger.stage("get_meta", 2 * S, "train_0")
    ledger.stage("decode", 3 * S)
    assert ledger.step("train_0").stages["get_meta"] == 2.0
    assert ledger.step("train_1").stages["decode"] == 3.0
    assert ledger.totals().histograms["dataplane_stage_seconds", ("image_processor",)].count == 1


def test_register_and_alloc_feed_their_own_metrics_and_the_stage(ledger):
    ledger.registered("get", "fast", 3, 2 * S)
    ledger.allocated(1 * S)
    histograms = ledger.totals().histograms
    assert counter(ledger, "dataplane_mr_register_total", "get", "fast") == 3
    assert histograms["dataplane_mr_register_seconds", ()].sum_ns == 2 * S
    assert histograms["dataplane_stage_seconds", ("register",)].sum_ns == 2 * S
    assert histograms["dataplane_get_alloc_seconds", ()].sum_ns == 1 * S
    assert histograms["dataplane_stage_seconds", ("alloc",)].sum_ns == 1 * S


def test_fanout_counts_by_mode(ledger):
    ledger.fanout("per_rank", 4)
    assert ledger.totals().histograms["dataplane_fanout_seconds", ("per_rank",)].count == 1


# --- when a step is summed up -----------------------------------------------------------------------------------------


def due(ledger):
    return [(s.step, s.update, s.put.bytes) for s in ledger.take_due()]


def test_a_step_is_due_when_it_is_cleared(ledger):
    put(ledger)
    assert due(ledger) == []
    ledger.cleared("train_0")
    assert due(ledger) == [("train_0", 1, 100)]
    ledger.cleared("train_0")
    ledger.cleared("never seen")
    assert due(ledger) == []


def test_a_step_is_due_when_a_newer_one_is_first_seen(ledger):
    put(ledger, "train_0")
    ledger.begin("put", "train_1")
    assert due(ledger) == [("train_0", 1, 100)]


def test_a_step_with_traffic_in_flight_is_due_when_that_is_over(ledger):
    late = ledger.begin("put", "train_0")
    put(ledger, "train_1")
    assert due(ledger) == []
    ledger.end(late, "ok", batch())
    assert due(ledger) == [("train_0", 1, 100)]


def test_late_traffic_makes_an_update_of_the_whole_step(ledger):
    put(ledger, "train_0")
    put(ledger, "train_1")
    assert due(ledger) == [("train_0", 1, 100)]
    for _ in range(9):
        put(ledger, "train_0")
    assert due(ledger) == [], "one line, not nine"
    put(ledger, "train_2")
    assert due(ledger) == [("train_0", 2, 1000), ("train_1", 1, 100)]
    put(ledger, "train_0")
    ledger.cleared("train_0")
    assert due(ledger) == [("train_0", 3, 1100)]
    put(ledger, "train_0")
    assert [(s.step, s.update) for s in ledger.drain()] == [("train_0", 4), ("train_2", 1)]


def test_a_step_cleared_piece_by_piece_is_summed_up_twice_at_most(ledger):
    for _ in range(10):
        put(ledger)
        ledger.cleared("train_0")
    put(ledger, "train_1")
    assert due(ledger)[0][:2] == ("train_0", 1)
    assert ledger.drain()[0].step == "train_1"
    assert ledger.step("train_0").put.bytes == 1000


def test_an_evicted_step_is_still_reported_with_what_was_in_flight(ledger):
    late = ledger.begin("put", "train_0")
    for i in range(1, KEEP_STEPS + 3):
        put(ledger, f"train_{i}")
    assert ledger.step("train_0") is None
    ledger.take_due()
    ledger.end(late, "ok", batch(7))
    assert due(ledger) == [("train_0", 1, 7)]


def test_an_evicted_step_that_had_its_line_is_still_reported_with_what_was_in_flight(ledger):
    put(ledger, "train_0")
    late = ledger.begin("put", "train_0")
    ledger.cleared("train_0")
    assert due(ledger) == [("train_0", 1, 100)]
    for i in range(1, KEEP_STEPS + 3):
        put(ledger, f"train_{i}")
    ledger.take_due()
    ledger.end(late, "ok", batch(7))
    assert due(ledger) == [("train_0", 2, 107)]


def test_drain_reports_every_step_with_news_once(ledger):
    put(ledger, "train_0")
    put(ledger, "train_1")
    assert [(s.step, s.update) for s in ledger.drain()] == [("train_0", 1), ("train_1", 1)]
    assert ledger.drain() == []


def test_a_put_without_a_partition_counts_in_the_totals(ledger):
    put(ledger, "")
    assert ledger.steps() == ()
    assert counter(ledger, "dataplane_bytes_total", "mm", "slow", "put") == 100


# --- threads ----------------------------------------------------------------------------------------------------------


def test_many_threads_lose_nothing():
    ledger = Ledger()

    def work(k):
        for i in range(500):
            put(ledger, f"train_{i % 3}", batch(3, field=f"f{k}"))
            ledger.stage("decode", 10)
            ledger.take_due()

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    totals = ledger.totals()
    assert sum(v for (n, _), v in totals.counters.items() if n == "dataplane_bytes_total") == 8 * 500 * 3
    assert totals.histograms["dataplane_stage_seconds", ("decode",)].count == 8 * 500
    assert sum(step.put.bytes for step in ledger.steps()) == 8 * 500 * 3


# --- the vocabulary ---------------------------------------------------------------------------------------------------


def test_metric_names_and_labels_are_those_of_the_rfc():
    """RFC §4.1 and §4.6, exactly."""
    expected = {
        "dataplane_bytes_total": ("counter", {"field", "path", "direction"}),
        "dataplane_bytes_unique_total": ("counter", {"field"}),
        "dataplane_stage_seconds": ("histogram", {"stage"}),
        "dataplane_fanout_seconds": ("histogram", {"mode"}),
        "dataplane_backend_info": ("gauge", {"backend", "protocol", "device", "gdr"}),
        "dataplane_fallback_total": ("counter", {"from", "to", "reason"}),
        "dataplane_mr_register_total": ("counter", {"direction", "path"}),
        "dataplane_mr_register_seconds": ("histogram", set()),
        "dataplane_get_alloc_seconds": ("histogram", set()),
        "dataplane_operations_total": ("counter", {"direction", "result"}),
    }
    assert {name: (METRICS[name].kind, set(METRICS[name].labels)) for name in expected} == expected


def test_no_label_names_a_key_a_job_or_a_host():
    assert not {"key", "job", "host", "node", "pid"} & {label for m in METRICS.values() for label in m.labels}


@pytest.mark.parametrize(
    "row",
    [
        ("dataplane_unknown_total", (), 1),
        ("dataplane_bytes_total", ("mm",), 1),
        ("dataplane_bytes_unique_total", ("mm",), -1),
        ("dataplane_stage_seconds", ("put",), 3),
        ("dataplane_stage_seconds", ("put",), ([1], 2)),
        ("dataplane_stage_seconds", ("put",), ([0] * 16 + [-1], 2)),
        ("dataplane_backend_info", ("a", "b", "c", "d"), 1),
    ],
)
def test_totals_refuse_what_they_do_not_know(row):
    with pytest.raises(ValueError, match="metric"):
        Totals.from_rows([row])


def test_what_the_staging_moved_is_summed_for_its_step(ledger):
    put(ledger, "train_0")
    ledger.staged("get", "copy", 2, 20)
    ledger.staged("get", "copy", 1, 10)
    put(ledger, "train_1")
    ledger.staged("put", "call", 4, 40)
    ledger.pool(PoolState(capacity=100, held=7, peak=9))
    assert ledger.step("train_0").staged == (Staged(direction="get", rung="copy", values=3, bytes=30),)
    assert ledger.step("train_0").pool is None
    assert ledger.step("train_1").staged == (Staged(direction="put", rung="call", values=4, bytes=40),)
    assert ledger.step("train_1").pool.held == 7
    assert ledger.gauges()["dataplane_staging_held_bytes"] == 7
