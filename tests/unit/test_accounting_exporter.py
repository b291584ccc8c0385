"""The Prometheus side: exact names, its own registry, bounded labels, and troubles that stay sentences (FC-48)."""

from __future__ import annotations

import logging
import socket
import sys
import urllib.request

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from relax_tq_rdma.accounting import names, notes, snapshot
from relax_tq_rdma.accounting.exporter import Endpoint, NodeCollector
from relax_tq_rdma.accounting.ledger import Ledger
from relax_tq_rdma.accounting.records import Batch, FieldStats, PoolState
from relax_tq_rdma.accounting.snapshot import Snapshot, write_json
from relax_tq_rdma.transport.process import own_id


@pytest.fixture(autouse=True)
def fresh_notes(monkeypatch):
    monkeypatch.setattr(notes, "_SAID", set())


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "job"
    path.mkdir()
    return path


def publish(folder, ledger, serial=1):
    value = Snapshot(
        job="j",
        node="n",
        owner=own_id(),
        serial=serial,
        written=1.0,
        rows=ledger.totals().to_rows(),
        gauges=ledger.gauges(),
        backend=("MooncakeStore", "rdma", "mlx5_0", "on"),
    )
    write_json(folder / value.name, value)


def busy_ledger(fields=("mm",), size=100):
    ledger = Ledger()
    for field in fields:
        stats = FieldStats(name=field, path="slow", rows=8, bytes=size, unique_bytes=size // 4)
        ledger.end(ledger.begin("put", "train_0"), "ok", Batch(rows=8, fields=(stats,)))
    ledger.stage("encode", 30_000_000)
    ledger.fanout("rank0", 7_000_000)
    ledger.registered("get", "fast", 3, 2_000_000)
    ledger.allocated(1_000_000)
    ledger.processor_called("served")
    ledger.fallback("MooncakeStore/rdma+gdr", "MooncakeStore/rdma", "gdr")
    ledger.wire("mm", "put", 40, 60, "train_0")
    ledger.left_raw("mm", 2, "train_0")
    ledger.staged("get", "lend", 8, size)
    ledger.pool(PoolState(capacity=1000, held=300, peak=400, retired=5))
    return ledger


def scrape(collector):
    registry = CollectorRegistry()
    registry.register(collector)
    return samples(generate_latest(registry).decode())


def samples(text):
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(found, name, **labels):
    return found[name, frozenset({k.rstrip("_"): v for k, v in labels.items()}.items())]


def test_every_metric_comes_out_under_its_exact_name(folder):
    publish(folder, busy_ledger())
    found = scrape(NodeCollector(folder))
    assert value(found, "dataplane_bytes_total", field="mm", path="slow", direction="put") == 100
    assert value(found, "dataplane_bytes_unique_total", field="mm") == 25
    assert value(found, "dataplane_bytes_wire_total", field="mm", direction="put") == 40
    assert value(found, "dataplane_bytes_saved_total", field="mm", direction="put") == 60
    assert value(found, "dataplane_operations_total", direction="put", result="ok") == 1
    assert value(found, "dataplane_image_processor_calls_total", result="served") == 1
    assert value(found, "dataplane_mr_register_total", direction="get", path="fast") == 3
    assert value(found, "dataplane_mr_register_seconds_sum") == 0.002
    assert value(found, "dataplane_get_alloc_seconds_count") == 1
    assert value(found, "dataplane_fanout_seconds_sum", mode="rank0") == 0.007
    assert value(found, "dataplane_rows_raw_total", field="mm") == 2
    assert value(found, "dataplane_staging_values_total", direction="get", rung="lend") == 8
    assert value(found, "dataplane_staging_bytes_total", direction="get", rung="lend") == 100
    assert value(found, "dataplane_staging_capacity_bytes") == 1000
    assert value(found, "dataplane_staging_held_bytes") == 300
    assert value(found, "dataplane_staging_peak_bytes") == 400
    assert value(found, "dataplane_staging_retired_bytes") == 5
    assert value(found, "dataplane_stage_seconds_bucket", stage="encode", le="0.025") == 0
    assert value(found, "dataplane_stage_seconds_bucket", stage="encode", le="0.05") == 1
    assert value(found, "dataplane_stage_seconds_bucket", stage="encode", le="+Inf") == 1
    assert (
        value(
            found,
            "dataplane_fallback_total",
            from_="MooncakeStore/rdma+gdr",
            to="MooncakeStore/rdma",
            reason="gdr",
        )
        == 1
    )
    assert (
        value(found, "dataplane_backend_info", backend="MooncakeStore", protocol="rdma", device="mlx5_0", gdr="on") == 1
    )
    assert {
        name.rpartition("_")[0] if name.endswith(("_sum", "_count", "_bucket")) else name for name, _ in found
    } == set(names.METRICS)


def test_two_processes_and_two_plugin_instances_add_up(folder):
    publish(folder, busy_ledger(), serial=1)
    publish(folder, busy_ledger(), serial=2)
    found = scrape(NodeCollector(folder))
    assert value(found, "dataplane_bytes_total", field="mm", path="slow", direction="put") == 200


def test_nothing_is_registered_with_the_default_registry(folder):
    """Another library may own the same names, also as a gauge that differs by ``_total`` only."""
    registry = CollectorRegistry()
    Gauge("dataplane_bytes", "someone else's", registry=registry)
    Counter("dataplane_operations", "someone else's", registry=registry)
    publish(folder, busy_ledger())
    before = set(REGISTRY._names_to_collectors)
    for _ in range(2):
        scrape(NodeCollector(folder))
    assert set(REGISTRY._names_to_collectors) == before


def test_fields_of_all_processes_together_are_bounded(folder):
    publish(folder, busy_ledger([f"a{i:02}" for i in range(60)], size=4), serial=1)
    publish(folder, busy_ledger([f"b{i:02}" for i in range(60)], size=4), serial=2)
    found = scrape(NodeCollector(folder))
    fields = {dict(labels)["field"] for name, labels in found if name == "dataplane_bytes_total"}
    assert len(fields) == names.FIELD_LIMIT + 1
    assert sum(v for (name, _), v in found.items() if name == "dataplane_bytes_total") == 120 * 4


def test_a_field_once_shown_stays_shown_also_by_the_next_server(folder):
    publish(folder, busy_ledger([f"m{i:02}" for i in range(60)], size=4), serial=1)
    first = scrape(NodeCollector(folder))
    publish(folder, busy_ledger([f"a{i:02}" for i in range(60)], size=4), serial=2)
    second = scrape(NodeCollector(folder))
    assert all(second[key] >= amount for key, amount in first.items())


def test_a_bad_label_file_is_written_anew(folder, caplog):
    (folder / snapshot.LABELS).write_bytes(b"\x80 not json")
    publish(folder, busy_ledger())
    assert scrape(NodeCollector(folder))
    assert "written anew" in caplog.text


def test_a_folder_that_is_gone_gives_an_empty_scrape(folder, caplog):
    collector = NodeCollector(folder)
    folder.rmdir()
    assert scrape(collector) == {}
    assert "cannot be read" in caplog.text


# --- the endpoint -----------------------------------------------------------------------------------------------------


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def endpoint(folder, port):
    made = Endpoint(folder, str(port))
    yield made
    made.close()


def get(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        return samples(reply.read().decode())


def test_one_endpoint_serves_and_the_next_stands_by(folder, port, endpoint):
    publish(folder, busy_ledger())
    endpoint.keep_up()
    standby = Endpoint(folder, str(port))
    standby.keep_up()
    assert (endpoint.serving, standby.serving) == (True, False)
    assert value(get(port), "dataplane_bytes_unique_total", field="mm") == 25
    endpoint.close()
    standby.keep_up()
    assert standby.serving
    assert value(get(port), "dataplane_bytes_unique_total", field="mm") == 25
    standby.close()


def test_it_binds_loopback(folder, port, endpoint):
    endpoint.keep_up()
    assert endpoint._server.server_address[0] == "127.0.0.1"


def test_a_port_in_use_is_one_sentence_and_is_taken_once_free(folder, port, endpoint, caplog):
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", port))
        stranger.listen()
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                endpoint.keep_up()
    (record,) = caplog.records
    assert str(port) in record.getMessage()
    assert "RTQ_METRICS_PORT" in record.getMessage()
    assert not endpoint.serving
    endpoint.keep_up()
    assert endpoint.serving


@pytest.mark.parametrize(
    "address", ["nine", "0", "70000", "127.0.0.1:", "-1", "\u0665:9400", "a" * 70 + ":9400", "../x:9400", "::1:9400"]
)
def test_an_address_that_is_none_is_one_sentence(folder, address, caplog):
    Endpoint(folder, address).keep_up()
    (record,) = caplog.records
    assert repr(address) in record.getMessage()


def test_without_an_address_nothing_listens_and_nothing_is_said(folder, caplog):
    endpoint = Endpoint(folder, "")
    endpoint.keep_up()
    assert not endpoint.serving
    assert caplog.records == []
    assert list(folder.iterdir()) == []


def test_without_prometheus_client_it_is_one_sentence(endpoint, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    for _ in range(3):
        endpoint.keep_up()
    (record,) = caplog.records
    assert "install prometheus-client" in record.getMessage()
    assert not endpoint.serving
