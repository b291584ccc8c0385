"""The manager mixin: exact around any manager, invisible when off."""

from __future__ import annotations

import asyncio
import logging

import pytest
import torch
from tensordict import TensorDict

from relax_tq_rdma import accounting
from relax_tq_rdma.accounting import meter, notes
from relax_tq_rdma.accounting.lines import parse_step_line
from tests.accounting_process import Counted, Meta


@pytest.fixture
def lines(tmp_path, monkeypatch):
    monkeypatch.setenv("RTQ_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("RTQ_ACCOUNTING_DIR", str(tmp_path / "journal"))
    monkeypatch.setattr(notes, "_SAID", set())
    found: list[str] = []
    yield found
    accounting.configure("off")


@pytest.fixture
def on(lines):
    accounting.configure("summary", job="mixin", node="n", sink=lines.append)
    return lines


def group(n=8):
    shared = {"pixel_values": torch.zeros(10, 6), "image_grid_thw": torch.ones(1, 3, dtype=torch.int64)}
    return TensorDict({"mm": [shared] * n, "tokens": torch.zeros(n, 4, dtype=torch.int64)}, batch_size=n)


def test_a_step_from_put_to_clear(on):
    manager = Counted()

    async def step():
        await manager.put_data(group(), Meta("train_3"))
        got = await manager.get_data(Meta("train_3"))
        await manager.clear_data(Meta("train_3"))
        return got

    got = asyncio.run(step())
    assert got is manager.data
    pairs = parse_step_line(on[0])
    assert len(on) == 1
    assert pairs["step"] == "train_3"
    assert (pairs["put_rows"], pairs["put_bytes"], pairs["unique_bytes"]) == ("8", str(8 * 264 + 256), str(264 + 256))
    assert (pairs["put_fast_bytes"], pairs["put_slow_bytes"]) == ("256", str(8 * 264))
    assert (pairs["get_rows"], pairs["get_bytes"]) == ("8", pairs["put_bytes"])
    assert pairs["redundancy"] == "4.6x"
    assert float(pairs["effective_s"]) > 0


def test_verbose_tells_copies_by_content(lines):
    accounting.configure("verbose", job="mixin", node="n", sink=lines.append)
    rows = [{"p": torch.zeros(100)} for _ in range(8)]
    asyncio.run(Counted().put_data({"mm": rows}, Meta()))
    accounting.flush()
    pairs = parse_step_line(lines[0])
    assert (pairs["put_bytes"], pairs["unique_bytes"], pairs["unique_by"]) == ("3200", "400", "content")


@pytest.mark.parametrize(("error", "result"), [(RuntimeError("x"), "failed"), (asyncio.CancelledError(), "cancelled")])
@pytest.mark.parametrize("direction", ["put", "get"])
def test_a_failure_passes_through_and_delivers_nothing(on, error, result, direction):
    manager = Counted(fail=error)
    call = manager.put_data(group(), Meta()) if direction == "put" else manager.get_data(Meta())
    with pytest.raises(type(error)):
        asyncio.run(call)
    assert accounting.ledger().totals().counters == {("dataplane_operations_total", (direction, result)): 1}


def test_a_failed_clear_passes_through_and_ends_no_step(on):
    manager = Counted()
    asyncio.run(manager.put_data(group(), Meta()))
    manager.fail = RuntimeError("storage unit gone")
    with pytest.raises(RuntimeError, match="storage unit gone"):
        asyncio.run(manager.clear_data(Meta()))
    assert on == []


def test_puts_in_flight_together_are_all_counted(on):
    manager = Counted()

    async def many():
        await asyncio.gather(*(manager.put_data(group(), Meta("train_0")) for _ in range(10)))

    asyncio.run(many())
    assert accounting.ledger().step("train_0").put.rows == 80


def test_the_data_parser_is_passed_on(on):
    manager, parser = Counted(), object()
    asyncio.run(manager.put_data(group(), Meta(), data_parser=parser))
    assert manager.calls[0][3] is parser


def test_a_batch_that_cannot_be_measured_still_moves(on, monkeypatch, caplog):
    def broken(data, content):
        raise ValueError("no such kind")

    monkeypatch.setattr(meter, "measure_batch", broken)
    with caplog.at_level(logging.WARNING):
        asyncio.run(Counted().put_data(group(), Meta()))
    assert "not measured" in caplog.records[0].getMessage()
    assert accounting.ledger().totals().counters == {("dataplane_operations_total", ("put", "ok")): 1}


def test_a_printer_that_fails_does_not_reach_the_job(lines, caplog):
    def broken(line):
        raise BrokenPipeError

    accounting.configure("summary", job="mixin", node="n", sink=broken)
    manager = Counted()
    asyncio.run(manager.put_data(group(), Meta()))
    asyncio.run(manager.clear_data(Meta()))
    assert "step lines are not printed" in caplog.text


def test_a_run_folder_that_cannot_be_made_does_not_reach_the_job(lines, monkeypatch, caplog):
    monkeypatch.setenv("RTQ_RUN_DIR", "/proc/nowhere")
    accounting.configure("summary", job="mixin", node="n", sink=lines.append)
    asyncio.run(Counted().put_data(group(), Meta()))
    accounting.flush()
    assert len(lines) == 1
    assert "RTQ_RUN_DIR" in caplog.text


def test_the_round_trips_of_the_start_are_no_payload_of_the_job(on):
    manager = Counted()

    async def verify():
        await manager.put_data(group(), Meta("rtq_verify_a1b2"))
        await manager.get_data(Meta("rtq_verify_a1b2"))
        await manager.clear_data(Meta("rtq_verify_a1b2"))

    asyncio.run(verify())
    assert accounting.ledger().totals().counters == {}
    assert on == []


def test_off_is_a_plain_call(monkeypatch):
    accounting.configure("off")

    def never(*args, **kwargs):
        raise AssertionError("measured although off")

    monkeypatch.setattr(meter, "measure_batch", never)
    manager, data, meta = Counted(), group(), Meta()

    async def step():
        await manager.put_data(data, meta)
        assert await manager.get_data(meta) is data
        await manager.clear_data(meta)

    asyncio.run(step())
    assert manager.calls == [("put", data, meta, None), ("get", meta), ("clear", meta)]


def test_names_that_no_outlet_can_encode_do_not_reach_the_job(lines, caplog):
    accounting.configure("verbose", job="mixin", node="n", sink=lines.append)
    manager, meta = Counted(), Meta("train_\ud801")
    asyncio.run(manager.put_data(TensorDict({"a\ud800": torch.zeros(2, 4)}, batch_size=2), meta))
    asyncio.run(manager.clear_data(meta))
    accounting.flush()
    assert parse_step_line(lines[0])["step"] == r"train_\ud801"
    assert not caplog.records
