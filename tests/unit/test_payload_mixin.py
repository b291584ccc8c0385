"""L2 and L3b at a manager: what readers get, what is stored, what is fetched, who shares memory with whom.

The storage is TransferQueue's own unit data behind its own serialiser; only the sockets are missing.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import logging
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict
from transfer_queue.metadata import BatchMeta
from transfer_queue.storage.simple_storage import StorageUnitData
from transfer_queue.utils import serial_utils

from relax_tq_rdma import accounting, coverage
from relax_tq_rdma.accounting import SlowPathError, assert_fast_path
from relax_tq_rdma.coverage.process import whoami
from relax_tq_rdma.errors import TransferError
from relax_tq_rdma.payload import (
    Row,
    StaleReferenceError,
    decode_row,
    encode_rows,
    explain,
    open_pieces,
    plan_column,
)
from relax_tq_rdma.payload.encode import PIECE_BYTES
from relax_tq_rdma.settings import Settings
from relax_tq_rdma.staging.carriers import CARRIER_KEY, SimpleCarrier
from relax_tq_rdma.staging.payload_mixin import FIELD
from tests.payload_cases import EXAMPLES, FITS, STAYS, rows, same, strict

pytestmark = pytest.mark.tq_versions


class Unit:
    """A storage unit that several managers share.

    ``reads``: global indexes asked for, one list a request. ``parts``: of each message, how many buffers it carries
    beside its head.
    """

    def __init__(self) -> None:
        self.data = StorageUnitData()
        self.reads: list[list[int]] = []
        self.parts: list[int] = []
        self.stored_bytes = 0

    def put(self, columns: dict[str, list[Any]], indexes: list[int]) -> None:
        frames = [bytes(frame) for frame in serial_utils.encode(columns)]
        self.stored_bytes += sum(map(len, frames))
        self.parts.append(len(frames) - 1)
        self.data.put_data(serial_utils.decode(frames), indexes)

    def get(self, fields: list[str], indexes: list[int]) -> dict[str, list[Any]]:
        self.reads.append(indexes)
        frames = serial_utils.encode(self.data.get_data(fields, indexes))
        self.parts.append(len(frames) - 1)
        return serial_utils.decode([bytearray(frame) for frame in frames])

    def flip(self, index: int, at: int, bits: int = 1) -> None:
        """Damage one byte of a stored row's first piece."""
        pieces = self.data.field_data[FIELD][index][CARRIER_KEY]
        damaged = bytearray(pieces[0])
        damaged[at] ^= bits
        pieces[0] = bytes(damaged)


class _Upstream:
    """What ``AsyncSimpleStorageManager`` does, with a unit at hand instead of at the end of a socket."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.pause: asyncio.Event | None = None

    async def put_data(self, data: Any, metadata: Any, data_parser: Any = None) -> None:
        columns = {name: list(data[name]) for name in data.keys()}  # noqa: SIM118
        if data_parser is not None:
            data_parser(columns)
        self.unit.put(columns, metadata.global_indexes)

    async def get_data(self, metadata: Any) -> Any:
        if self.pause is not None:
            await self.pause.wait()
        await asyncio.sleep(0)
        columns = self.unit.get(metadata.field_names, metadata.global_indexes)
        return TensorDict({name: NonTensorStack(*rows) for name, rows in columns.items()}, batch_size=metadata.size)

    async def clear_data(self, metadata: Any) -> None:
        self.unit.data.clear(metadata.global_indexes)


class Manager(accounting.AccountingMixin, SimpleCarrier, _Upstream):
    def __init__(self, unit: Unit, **layers: bool) -> None:
        self._settings = Settings(**{"normalize_multimodal": True, **layers})
        super().__init__(unit)


LARGE = PIECE_BYTES // 4
"""Values of a picture that is a piece by itself."""


def meta(indexes: list[int], partition: str = "train_1") -> BatchMeta:
    schema = {FIELD: {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True}}
    return BatchMeta(global_indexes=list(indexes), partition_ids=[partition] * len(indexes), field_schema=schema)


def batch(values: list[Any]) -> TensorDict:
    return TensorDict({FIELD: NonTensorStack(*values)}, batch_size=len(values))


def put(manager: Manager, values: list[Any], indexes: list[int] | None = None, partition: str = "train_1") -> None:
    asyncio.run(manager.put_data(batch(values), meta(indexes or list(range(len(values))), partition)))


def get(manager: Manager, indexes: list[int], partition: str = "train_1") -> list[Any]:
    return asyncio.run(manager.get_data(meta(indexes, partition)))[FIELD].tolist()


def picture(seed: int, size: int = 4096) -> dict[str, Any]:
    made = torch.Generator().manual_seed(seed)
    return {"pixel_values": torch.rand(size, generator=made), "image_grid_thw": torch.tensor([[1, 2, seed]])}


def group(seed: int, copies: int = 8, size: int = 4096) -> list[dict[str, Any]]:
    """One picture and deep copies of it, as a host makes them (FC-46)."""
    first = picture(seed, size)
    return [first, *(copy.deepcopy(first) for _ in range(copies - 1))]


@pytest.fixture
def ledger() -> Iterator[accounting.Ledger]:
    accounting.configure("verbose", job="job1", sink=lambda line: None)
    found = accounting.ledger()
    assert found is not None
    yield found
    accounting.configure("off")


# --- L2 ---------------------------------------------------------------------------------------------------------------


def test_every_kind_of_row_comes_back_as_it_went_in() -> None:
    manager = Manager(Unit())
    values = [make() for make in FITS.values()]
    put(manager, values)
    got = get(manager, list(range(len(values))))
    wrong = [name for name, before, after in zip(FITS, values, got, strict=True) if not strict(before, after)]
    assert wrong == []


def test_rows_are_carried_as_bytes_and_the_column_keeps_name_and_schema() -> None:
    unit = Unit()
    put(Manager(unit), [picture(1, 100), None, {}, picture(1), picture(1, LARGE)])
    assert list(unit.data.field_data) == [FIELD]
    carried = list(unit.data.field_data[FIELD].values())
    assert [list(row) for row in carried] == [[CARRIER_KEY]] * 5
    assert [list(map(type, row[CARRIER_KEY])) for row in carried] == [
        [bytes],
        [bytes],
        [bytes],
        [np.ndarray],  # too much for the head of a message
        [bytes, np.ndarray, bytes],  # a large tensor is a piece by itself
    ]


def test_only_a_large_tensor_is_a_message_part() -> None:
    unit = Unit()
    values = [picture(1, 100), None, *group(2, 8, LARGE), {"a": torch.ones(LARGE), "b": torch.ones(LARGE)}]
    everything = list(range(len(values)))
    put(Manager(unit, normalize_multimodal=False), values)
    put(Manager(unit), values)
    get(Manager(unit), everything)
    put(Manager(unit, dedup_multimodal=True), values)
    assert same(get(Manager(unit), everything), values)
    assert unit.parts == [2 + 8 * 2 + 2, 8 + 2, 8 + 2, 1 + 2, 1 + 2]


def test_a_row_that_came_over_a_socket_is_decoded_where_it_arrived() -> None:
    with zmq.Context() as context, context.socket(zmq.PAIR) as receiver, context.socket(zmq.PAIR) as sender:
        receiver.bind("inproc://rows")
        sender.connect("inproc://rows")
        sender.send_multipart(serial_utils.encode(plan_column([picture(1, LARGE)]).pieces(0)), copy=False)
        pieces = serial_utils.decode(receiver.recv_multipart(copy=False))
        decoded = open_pieces(pieces).decode()
    assert same(decoded, picture(1, LARGE))
    assert memory(decoded) == pieces[1].ctypes.data


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_raw_and_encoded_rows_share_a_batch_in_any_order(order: tuple[int, ...]) -> None:
    stays = {"pixel_values": torch.ones(3), "size": 1j}
    values = [(picture(1), stays, None)[place] for place in order]
    manager = Manager(Unit())
    put(manager, values)
    assert all(map(same, get(manager, [0, 1, 2]), values))


@pytest.mark.parametrize("raw_first", [True, False])
def test_raw_and_encoded_puts_share_a_partition(raw_first: bool) -> None:
    unit = Unit()
    writers = [Manager(unit, normalize_multimodal=False), Manager(unit)]
    for writer, indexes in zip(writers if raw_first else reversed(writers), ([0, 1], [2, 3]), strict=True):
        put(writer, [picture(indexes[0]), None], indexes)
    for reader in writers:
        assert all(map(same, get(reader, [2, 0, 3, 1]), [picture(2), picture(0), None, None]))


def test_the_callers_batch_is_not_changed() -> None:
    values = [picture(1), None]
    before = batch(values)
    asyncio.run(Manager(Unit()).put_data(before, meta([0, 1])))
    assert before[FIELD].tolist()[0] is values[0]


def test_a_data_parser_puts_the_column_on_the_raw_path_and_that_is_told(
    ledger: accounting.Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Any] = []
    unit = Unit()
    manager = Manager(unit)
    for _ in range(2):
        asyncio.run(
            manager.put_data(batch([picture(1)]), meta([0]), data_parser=lambda columns: seen.extend(columns[FIELD]))
        )
    assert same(seen[0], picture(1))
    assert same(get(manager, [0]), [picture(1)])
    assert [record.message for record in caplog.records if "data_parser" in record.message] == [
        f"1 rows of field {FIELD} in partition train_1 take the slow path, because a data_parser reads the rows in the "
        "storage (said once)"
    ]
    summary = ledger.step("train_1")
    assert summary is not None
    assert summary.raw_rows == 2


def test_rows_that_stay_raw_are_counted_and_their_reason_is_told_once(
    ledger: accounting.Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    make, reason = STAYS["complex"]
    manager = Manager(Unit())
    for partition in ("train_1", "train_2"):
        put(manager, [make(), picture(1), make()], partition=partition)
    assert sum(reason in record.message for record in caplog.records) == 1
    assert [summary.raw_rows for summary in ledger.steps()] == [2, 2]


def test_with_the_layer_off_nothing_is_encoded() -> None:
    unit = Unit()
    put(Manager(unit, normalize_multimodal=False), [picture(1)])
    assert list(unit.data.field_data[FIELD][0]) == ["pixel_values", "image_grid_thw"]


def test_a_damaged_row_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = Unit()
    manager = Manager(unit)
    put(manager, [picture(1), picture(2)], [7, 8])
    unit.flip(8, 20)
    with pytest.raises(TransferError, match=r"field multimodal_train_inputs of partition train_1, row 8 .*crc32c"):
        get(manager, [7, 8])


def test_the_payload_checksum_is_an_option_and_finds_a_flipped_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RTQ_PAYLOAD_CHECKSUM", "1")
    unit = Unit()
    manager = Manager(unit)
    put(manager, [picture(1)])
    assert same(get(manager, [0]), [picture(1)])
    unit.flip(0, 8192)
    with pytest.raises(TransferError, match="payload is damaged"):
        get(manager, [0])


@settings(max_examples=EXAMPLES // 4, deadline=None)
@given(st.lists(rows().filter(lambda row: explain(row) is None), min_size=1, max_size=5), st.booleans(), st.randoms())
def test_any_batch_survives_in_any_order(values: list[Any], dedup: bool, random: Any) -> None:
    manager = Manager(Unit(), dedup_multimodal=dedup)
    put(manager, [*values, *copy.deepcopy(values)])
    wanted = list(range(2 * len(values)))
    random.shuffle(wanted)
    for at, row in zip(wanted, get(manager, wanted), strict=True):
        assert strict(values[at % len(values)], row)


# --- the path, asserted -----------------------------------------------------------------------------------------------


def test_the_largest_field_is_seen_to_take_the_fast_path(ledger: accounting.Ledger) -> None:
    manager = Manager(Unit())
    put(manager, [picture(1), None])
    get(manager, [0, 1])
    summary = ledger.step("train_1")
    assert summary is not None
    assert_fast_path(summary)
    nbytes = 4096 * 4 + 24
    assert (summary.put.fast_bytes, summary.put.slow_bytes) == (nbytes, 0)
    assert (summary.get.fast_bytes, summary.get.slow_bytes) == (nbytes, 0)


def test_the_assertion_fails_when_the_field_was_serialised(ledger: accounting.Ledger) -> None:
    put(Manager(Unit(), normalize_multimodal=False), [picture(1)])
    summary = ledger.step("train_1")
    assert summary is not None
    with pytest.raises(SlowPathError, match=f"{FIELD}, took the slow path: 16408 bytes in 1 rows of put"):
        assert_fast_path(summary)


def test_one_large_raw_row_among_encoded_ones_fails_the_assertion(ledger: accounting.Ledger) -> None:
    put(Manager(Unit()), [picture(1), {"pixel_values": torch.ones(10), "size": 1j}])
    summary = ledger.step("train_1")
    assert summary is not None
    with pytest.raises(SlowPathError, match="in 1 rows of put"):
        assert_fast_path(summary)


def test_verbose_warns_of_a_step_whose_largest_field_was_slow(
    ledger: accounting.Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    accounting.expect_fast_path()
    put(Manager(Unit()), [{"pixel_values": torch.ones(1000), "size": 1j}], partition="train_1")
    put(Manager(Unit()), [picture(1)], partition="train_2")
    with caplog.at_level(logging.WARNING):
        accounting.flush()
    assert [record.message for record in caplog.records if "slow path:" in record.message] == [
        f"step train_1: the largest field, {FIELD}, took the slow path: 4016 bytes in 1 rows of put"
    ]


# --- L3b --------------------------------------------------------------------------------------------------------------


def test_eight_copies_cost_one(ledger: accounting.Ledger) -> None:
    unit, plain = Unit(), Unit()
    put(Manager(unit, dedup_multimodal=True), group(1))
    put(Manager(plain), [picture(1)])
    assert unit.stored_bytes < plain.stored_bytes + 8 * 600
    summary = ledger.step("train_1")
    assert summary is not None
    assert summary.put.saved_bytes == 7 * (4096 * 4 + 24)
    assert summary.put.wire_bytes is not None
    assert summary.put.wire_bytes < 2 * (4096 * 4 + 24) + 9 * 512


def test_one_different_byte_keeps_two_pictures_apart() -> None:
    unit = Unit()
    manager = Manager(unit, dedup_multimodal=True)
    one, other = picture(1), picture(1)
    other["pixel_values"].view(torch.uint8)[9999] ^= 1
    put(manager, [one, other])
    assert same(get(manager, [0, 1]), [one, other])
    assert not same(one, other)


def test_members_on_other_ranks_read_the_source_once_each(ledger: accounting.Ledger) -> None:
    unit = Unit()
    put(Manager(unit, dedup_multimodal=True), group(5), list(range(10, 18)))
    ranks = [Manager(unit, dedup_multimodal=True) for _ in range(2)]
    for rank, members in zip(ranks, ([13, 16], [17, 11, 12]), strict=True):
        unit.reads.clear()
        assert same(get(rank, members), [picture(5)] * len(members))
        assert unit.reads == [members, [10]]
        unit.reads.clear()
        assert same(get(rank, [14]), [picture(5)])
        assert unit.reads == [[14]]  # the source is at hand


def test_a_source_read_as_a_row_of_its_own_is_not_read_again_for_its_copies() -> None:
    unit = Unit()
    manager = Manager(unit, dedup_multimodal=True)
    put(manager, group(5))
    get(manager, [0])[0]["pixel_values"].fill_(-1)  # the consumer may write: what is kept is not its memory
    unit.reads.clear()
    assert same(get(manager, [3, 4]), [picture(5)] * 2)
    assert unit.reads == [[3, 4]]


def test_gets_at_the_same_time_read_a_source_once() -> None:
    unit = Unit()
    manager = Manager(unit, dedup_multimodal=True)
    put(manager, group(5))
    unit.reads.clear()

    async def both() -> list[Any]:
        return await asyncio.gather(*(manager.get_data(meta([index])) for index in (1, 2, 3)))

    assert all(same(data[FIELD].tolist(), [picture(5)]) for data in asyncio.run(both()))
    assert unit.reads.count([0]) == 1


def test_a_cancelled_get_leaves_the_others_to_read_for_themselves() -> None:
    unit = Unit()
    manager = Manager(unit, dedup_multimodal=True)
    put(manager, group(5))

    async def race() -> Any:
        first = asyncio.create_task(manager.get_data(meta([1])))
        while not manager._sources._reading:
            await asyncio.sleep(0)
            if first.done():
                pytest.fail("the first get was not caught while it read the source")
        manager.pause = asyncio.Event()
        second = asyncio.create_task(manager.get_data(meta([2])))
        manager.pause.set()
        await asyncio.sleep(0)
        first.cancel()
        return await asyncio.wait_for(second, 10)

    assert same(asyncio.run(race())[FIELD].tolist(), [picture(5)])
    assert manager._sources._reading == {}


def test_a_vanished_source_is_loud_and_not_asked_for_again() -> None:
    unit = Unit()
    manager = Manager(unit, dedup_multimodal=True)
    put(manager, group(5), list(range(20, 28)))
    asyncio.run(manager.clear_data(meta([20])))
    unit.reads.clear()
    with pytest.raises(StaleReferenceError, match="global index 20 nothing encoded is there"):
        get(manager, [25])
    assert unit.reads == [[25], [20]]


@pytest.mark.parametrize("new", [picture(9), picture(5), None, {"pixel_values": 1j}])
def test_a_replaced_source_is_loud_even_when_the_new_row_looks_the_same(new: Any) -> None:
    unit = Unit()
    manager = Manager(unit, dedup_multimodal=True)
    put(manager, group(5), list(range(20, 28)))
    asyncio.run(manager.clear_data(meta([20])))
    put(manager, [new], [20], partition="train_2")
    with pytest.raises(StaleReferenceError, match="reference is stale"):
        get(manager, [25])
    with pytest.raises(StaleReferenceError, match="reference is stale"):
        get(manager, [20, 25])  # inside one batch too


def test_a_cleared_source_is_not_served_from_the_cache() -> None:
    manager = Manager(Unit(), dedup_multimodal=True)
    put(manager, group(5))
    get(manager, [3])
    asyncio.run(manager.clear_data(meta([0])))
    with pytest.raises(StaleReferenceError):
        get(manager, [4])


def test_indexes_used_again_after_a_clear_mean_the_new_rows() -> None:
    manager = Manager(Unit(), dedup_multimodal=True)
    for seed, partition in ((1, "train_1"), (2, "train_2")):
        put(manager, group(seed), partition=partition)
        assert same(get(manager, [6, 0, 7], partition), [picture(seed)] * 3)
        asyncio.run(manager.clear_data(meta(list(range(8)), partition)))


def test_a_second_put_in_the_partition_refers_to_its_own_rows_only() -> None:
    unit = Unit()
    manager = Manager(unit, dedup_multimodal=True)
    put(manager, group(1), list(range(8)))
    put(manager, group(1), list(range(8, 16)))
    asyncio.run(manager.clear_data(meta(list(range(8)))))
    assert same(get(manager, [15, 9]), [picture(1)] * 2)


def test_raw_copies_among_encoded_ones_keep_their_place() -> None:
    manager = Manager(Unit(), dedup_multimodal=True)
    stays = {"pixel_values": torch.ones(600), "size": 1j}
    values = [stays, *group(1, 2), None, stays, *group(1, 2)]
    put(manager, values)
    assert all(map(same, get(manager, [6, 5, 4, 3, 2, 1, 0]), reversed(values)))


# --- memory -----------------------------------------------------------------------------------------------------------


def memory(row: dict[str, Any]) -> int:
    return row["pixel_values"].untyped_storage().data_ptr()


@pytest.mark.parametrize("members", [[0, 1, 2], [1, 2, 3]])
def test_copies_are_independent(members: list[int]) -> None:
    manager = Manager(Unit(), dedup_multimodal=True)
    put(manager, group(5))
    first, second, third = get(manager, members)
    assert len({memory(first), memory(second), memory(third)}) == 3
    first["pixel_values"].fill_(-1)
    second["pixel_values"].fill_(-2)
    assert same(third, picture(5))
    assert same(get(manager, [4, 5]), [picture(5)] * 2)


def test_share_view_shares_one_memory_and_says_so_by_its_address() -> None:
    manager = Manager(Unit(), dedup_multimodal=True, dedup_share_view=True)
    put(manager, group(5))
    inside = get(manager, [0, 1, 2])
    assert len({memory(row) for row in inside}) == 1
    outside = get(manager, [3, 4]) + get(manager, [5])
    assert len({memory(row) for row in outside}) == 1
    assert all(same(row, picture(5)) for row in inside + outside)


def test_the_cache_is_bounded_and_what_does_not_fit_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RTQ_DEDUP_CACHE_MB", "1")
    unit = Unit()
    manager = Manager(unit, dedup_multimodal=True)
    large = {"pixel_values": torch.rand(100_000)}  # 0.4 MB: two fit
    values = [copy.deepcopy({"pixel_values": large["pixel_values"] + seed}) for seed in range(4) for _ in range(2)]
    put(manager, values)
    for _ in range(2):
        for index in (1, 3, 5, 7):
            assert same(get(manager, [index]), [values[index]])
        assert manager._sources.cache.nbytes <= 2**20
    assert sum(read in ([0], [2], [4], [6]) for read in unit.reads) == 8
    huge = [copy.deepcopy({"pixel_values": torch.ones(2**19)}) for _ in range(3)]
    put(manager, huge, [50, 51, 52])
    one, two = get(manager, [51, 52])
    one["pixel_values"].zero_()
    assert same(two, huge[2])


# --- what must be refused or must not spread ----------------------------------------------------------------------


@pytest.mark.parametrize("bit", range(32))
def test_a_flipped_bit_of_the_magic_is_an_error_not_a_raw_row(bit: int) -> None:
    unit = Unit()
    put(Manager(unit), [picture(1)])
    unit.flip(0, bit // 8, 1 << bit % 8)
    with pytest.raises(TransferError, match="partition train_1, row 0 cannot be decoded"):
        get(Manager(unit), [0])


def test_a_row_of_a_later_format_is_refused_with_the_name_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[str] = []
    monkeypatch.setattr(coverage, "note", noted.append)
    unit = Unit()
    put(Manager(unit), [picture(1)])
    unit.flip(0, 3, ord("1") ^ ord("2"))
    with pytest.raises(TransferError) as refused:
        get(Manager(unit), [0])
    assert str(refused.value) == (
        f"field {FIELD} of partition train_1, row 0 cannot be decoded: the row has format RTQ2, this plugin reads RTQ1 "
        f"version 1: install the writer's relax_tq_rdma version here ({whoami()})"
    )
    assert noted == [str(refused.value)], "and relax-tq-rdma status names it"


@pytest.mark.parametrize(
    "pieces", [[], [None], [np.zeros(0, np.uint8)], [b""], ["RTQ1"], [b"RTQ1"], [np.ones(80)], [torch.ones(80)]]
)
def test_a_malformed_carrier_is_a_named_error(pieces: list[Any]) -> None:
    unit = Unit()
    put(Manager(unit), [picture(1)])
    unit.data.field_data[FIELD][0] = {CARRIER_KEY: pieces}
    with pytest.raises(TransferError, match="row 0 cannot be decoded"):
        get(Manager(unit), [0])


def test_a_gets_failure_stays_its_own() -> None:
    """Two gets at once, one of which also wants a source that is gone: the other one is served."""
    unit = Unit()
    manager = Manager(unit, dedup_multimodal=True)
    put(manager, group(1, 4), [0, 1, 2, 3])
    put(manager, group(2, 4), [10, 11, 12, 13])
    unit.data.clear([0])

    async def both() -> list[Any]:
        return await asyncio.gather(
            manager.get_data(meta([1, 11])), manager.get_data(meta([12])), return_exceptions=True
        )

    broken, fine = asyncio.run(both())
    assert isinstance(broken, StaleReferenceError)
    assert "at global index 0 nothing encoded" in str(broken)
    assert str(broken).startswith(f"field {FIELD} of partition train_1: ")
    assert same(fine[FIELD].tolist(), [picture(2)])


def test_of_several_sources_the_one_that_is_gone_is_named() -> None:
    unit = Unit()
    manager = Manager(unit, dedup_multimodal=True)
    put(manager, group(1, 4), [0, 1, 2, 3])
    put(manager, group(2, 4), [10, 11, 12, 13])
    unit.data.clear([10])
    with pytest.raises(StaleReferenceError, match="at global index 10 nothing encoded"):
        get(manager, [1, 11])
    assert same(get(manager, [1]), [picture(1)])


def test_a_failed_get_keeps_no_memory_until_a_garbage_collection() -> None:
    unit = Unit()
    manager = Manager(unit, dedup_multimodal=True)
    put(manager, group(1, 4))
    unit.data.clear([0])

    async def tries() -> None:
        for _ in range(3):
            try:
                await manager.get_data(meta([1]))
            except StaleReferenceError:
                continue
            pytest.fail("the source is gone")
        assert manager._sources._reading == {}
        assert not [row for row in gc.get_objects() if isinstance(row, Row)]

    gc.collect()
    gc.disable()
    try:
        asyncio.run(tries())
    finally:
        gc.enable()


def test_a_source_that_arrives_damaged_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RTQ_PAYLOAD_CHECKSUM", "1")
    unit = Unit()
    manager = Manager(unit, dedup_multimodal=True)
    put(manager, group(1, 4))
    unit.flip(0, -200)
    with pytest.raises(TransferError, match=r"row 0 cannot be decoded.*payload is damaged"):
        get(manager, [2])
    unit.flip(0, -200)
    assert same(get(manager, [2, 3]), [picture(1)] * 2)


def test_a_source_whose_reader_never_ends_is_read_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = Unit()
    manager = Manager(unit, dedup_multimodal=True)
    manager._sources._patience = 0.2
    put(manager, group(1, 4))
    stuck: Future[Row] = Future()
    (source,) = {(row.header.put, 0) for row in manager._open(unit.get([FIELD], [0])[FIELD], meta([0])) if row}
    manager._sources._reading[source] = stuck
    assert same(get(manager, [2]), [picture(1)])


def test_an_index_twice_in_a_put_is_refused_with_dedup() -> None:
    with pytest.raises(TransferError, match="row 3 of partition train_1 is put twice in one batch"):
        put(Manager(Unit(), dedup_multimodal=True), group(1, 2), [3, 3])


@pytest.mark.parametrize("name", ["sparse", "sparse csr", "meta", "quantised"])
def test_what_has_no_plain_bytes_is_refused_by_name(name: str) -> None:
    unit = Unit()
    with pytest.raises(TransferError, match=r"row 1 cannot be stored: 'x': .* tensor.*put it as a dense tensor"):
        put(Manager(unit), [picture(1), STAYS[name][0]()])
    assert unit.stored_bytes == 0


@pytest.mark.parametrize("dimensions", [33, 64, 66])
def test_tensors_of_very_many_dimensions(dimensions: int) -> None:
    manager = Manager(Unit())
    row = {"a": torch.rand([1] * (dimensions - 1) + [3])}
    put(manager, [row])
    assert same(get(manager, [0]), [row])


def test_a_failed_get_and_a_failed_put_count_nothing(
    ledger: accounting.Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RTQ_PAYLOAD_CHECKSUM", "1")
    unit = Unit()
    manager = Manager(unit)
    put(manager, [picture(1)])
    unit.flip(0, -200)
    with pytest.raises(TransferError):
        get(manager, [0])

    def full(*_: Any) -> None:
        raise RuntimeError("full")

    monkeypatch.setattr(unit, "put", full)
    with pytest.raises(RuntimeError):
        put(manager, [STAYS["complex"][0]()])
    summary = ledger.step("train_1")
    assert summary is not None
    assert (summary.get.wire_bytes, summary.get.rows, summary.get.failed) == (None, 0, 1)
    assert (summary.put.rows, summary.put.failed, summary.raw_rows) == (1, 1, 0)


def test_a_few_bytes_that_are_kept_do_not_keep_a_large_row() -> None:
    (encoded,) = encode_rows([{"pixel_values": torch.rand(2**19), "grid": torch.tensor([[1, 2, 3]])}])
    decoded = decode_row(encoded)
    assert decoded is not None
    start, end = encoded.data_ptr(), encoded.data_ptr() + len(encoded)
    assert start <= decoded["pixel_values"].data_ptr() < end
    assert not start <= decoded["grid"].data_ptr() < end
    assert decoded["grid"].tolist() == [[1, 2, 3]]
