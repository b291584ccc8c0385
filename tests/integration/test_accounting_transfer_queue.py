"""Accounting around real TransferQueue: exact bytes for every payload kind, identical results, no cost when off."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from relax_tq_rdma import accounting
from relax_tq_rdma.accounting.lines import parse_step_line
from relax_tq_rdma.accounting.snapshot import read_node

pytestmark = pytest.mark.integration

ROWS = 8


def sample(patches):
    return {"pixel_values": torch.rand(patches, 6), "image_grid_thw": torch.tensor([[1, 1, patches]])}


def payload():
    shared = sample(4)
    return TensorDict(
        {
            "tokens": torch.arange(ROWS * 4).reshape(ROWS, 4),
            "log_probs": torch.nested.as_nested_tensor([torch.rand(n + 1) for n in range(ROWS)], layout=torch.jagged),
            "multimodal_train_inputs": [shared, shared, shared, shared, None, sample(2), sample(3), None],
            "prompts": [f"prompt {n}" for n in range(ROWS)],
        },
        batch_size=ROWS,
    )


LOGICAL = {
    ("tokens", "fast"): ROWS * 4 * 8,
    ("log_probs", "fast"): sum(range(1, ROWS + 1)) * 4,
    ("multimodal_train_inputs", "slow"): 4 * (4 * 24 + 24) + (2 * 24 + 24) + (3 * 24 + 24),
    ("prompts", "slow"): ROWS * len("prompt 0"),
}
UNIQUE = {**LOGICAL, ("multimodal_train_inputs", "slow"): (4 * 24 + 24) + (2 * 24 + 24) + (3 * 24 + 24)}


@pytest.fixture(scope="module")
def client():
    """A client of a real TransferQueue whose manager counts, as our staging layer composes it."""
    import ray
    import transfer_queue as tq
    from omegaconf import OmegaConf
    from transfer_queue.storage.managers.base import StorageManagerFactory
    from transfer_queue.storage.managers.simple_storage_manager import AsyncSimpleStorageManager

    class Counted(accounting.AccountingMixin, AsyncSimpleStorageManager):
        pass

    before = dict(StorageManagerFactory._registry)
    StorageManagerFactory.register("SimpleStorage")(Counted)
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    yield tq.get_client()
    tq.close()
    ray.shutdown()
    StorageManagerFactory._registry.clear()
    StorageManagerFactory._registry.update(before)


@pytest.fixture
def lines(tmp_path, monkeypatch):
    monkeypatch.setenv("RTQ_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("RTQ_ACCOUNTING_DIR", str(tmp_path / "journal"))
    yield []
    accounting.configure("off")


def move(client, data, partition):
    client.put(data=data, partition_id=partition)
    meta = client.get_meta(
        data_fields=list(data.keys()), batch_size=ROWS, partition_id=partition, task_name=f"read {partition}"
    )
    got = client.get_data(meta)
    client.clear_partition(partition)
    return got


def test_bytes_of_a_real_step_are_exact(client, lines, tmp_path):
    accounting.configure("summary", job="tq", sink=lines.append)
    move(client, payload(), "train_0")
    pairs = parse_step_line(lines[0])
    assert len(lines) == 1
    assert pairs["step"] == "train_0"
    assert int(pairs["put_bytes"]) == int(pairs["get_bytes"]) == sum(LOGICAL.values())
    assert int(pairs["unique_bytes"]) == sum(UNIQUE.values())
    assert int(pairs["put_fast_bytes"]) == sum(n for (_, path), n in LOGICAL.items() if path == "fast")
    assert (pairs["put_rows"], pairs["get_rows"]) == (str(ROWS), str(ROWS))
    assert float(pairs["effective_s"]) >= float(pairs["put_s"])
    accounting.flush()
    counters = read_node(tmp_path / "run" / "metrics" / "tq").totals.counters
    for direction in ("put", "get"):
        found = {
            labels[:2]: value
            for (name, labels), value in counters.items()
            if name == "dataplane_bytes_total" and labels[2] == direction
        }
        assert found == LOGICAL


def test_verbose_writes_the_fields_of_a_real_step(client, lines, tmp_path):
    import json

    accounting.configure("verbose", job="tq-verbose", sink=lines.append)
    move(client, payload(), "train_1")
    (file,) = (tmp_path / "journal").iterdir()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert {(r["field"], r["path"]): r["bytes"] for r in rows if r["direction"] == "put"} == LOGICAL
    assert {r["unique_by"] for r in rows if r["direction"] == "put"} == {"content"}
    # log_probs differ, token rows differ, prompts differ: only the shared pictures are copies.
    assert {(r["field"], r["path"]): r["unique_bytes"] for r in rows if r["direction"] == "put"} == UNIQUE


def test_results_are_the_same_with_accounting_on_and_off(client, lines):
    data = payload()
    off = move(client, data, "same_off")
    accounting.configure("summary", job="tq-same", sink=lines.append)
    on = move(client, data, "same_on")
    for got in (off, on):
        assert list(got.keys()) == list(off.keys())
        for field in ("tokens", "log_probs"):
            for a, b in zip(got[field].unbind(), data[field].unbind(), strict=True):
                assert torch.equal(a, b)
        for a, b in zip(got["multimodal_train_inputs"], data["multimodal_train_inputs"], strict=True):
            assert (a is None) == (b is None)
            assert a is None or all(torch.equal(a[key], b[key]) for key in b)
        assert list(got["prompts"]) == list(data["prompts"])


def test_a_failing_put_delivers_nothing(client, lines):
    def refuse(columns):
        raise ValueError("no such picture")

    accounting.configure("summary", job="tq-fail", sink=lines.append)
    data = TensorDict({"x": torch.zeros(ROWS, 2)}, batch_size=ROWS)
    with pytest.raises(RuntimeError, match="no such picture"):
        client.put(data=data, partition_id="broken", data_parser=refuse)
    totals = accounting.ledger().totals().counters
    assert totals == {("dataplane_operations_total", ("put", "failed")): 1}
    accounting.flush()
    assert parse_step_line(lines[0])["put_failed"] == "1"
