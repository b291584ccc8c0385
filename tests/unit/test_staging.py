"""Puts and gets through the staging pool, on a store as strict as an RDMA engine (RFC §4.6; FC-31 to FC-33)."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transfer_queue.storage.clients import mooncake_client as upstream

from relax_tq_rdma import accounting
from relax_tq_rdma.payload import decode_row, plan_column
from relax_tq_rdma.payload.format import aligned
from relax_tq_rdma.settings import Settings
from relax_tq_rdma.staging import connect, staging
from relax_tq_rdma.staging import turns as turning
from relax_tq_rdma.staging.batches import cut
from relax_tq_rdma.staging.counts import Moved
from relax_tq_rdma.staging.errors import StoreFault
from relax_tq_rdma.staging.jagged import jagged_view
from relax_tq_rdma.staging.recycled import Recycled
from relax_tq_rdma.staging.reserve import Reserve
from relax_tq_rdma.staging.rows import EncodedRow
from relax_tq_rdma.staging.turns import Turns
from relax_tq_rdma.transport.memory import MIB
from tests.strict_store import POISON, StrictStore
from tests.unit.conftest import MakeClient
from tests.unit.test_client import TENSORS, bits, fail

STAGED = {"host_staging": True, "host_staging_mb": 16}
"""A pool of 16 MiB: 12 can be lent, 4 are the reserve, batches of 1 MiB."""

KINDS: dict[str, dict[str, Any]] = {
    "off": {},
    "staged": {"settings": STAGED},
    "old wheel": {"settings": STAGED, "pool": False},
}


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that comes back is overwritten at once: whoever still looks at it sees that."""
    borrow, returned = Reserve.borrow, Recycled._returned

    @contextmanager
    def poisoned(self: Reserve, nbytes: int, wait: float) -> Iterator[Any]:
        with borrow(self, nbytes, wait) as piece:
            try:
                yield piece
            finally:
                if piece is not None and not piece.retired:
                    piece.memory.fill_(POISON)

    monkeypatch.setattr(Reserve, "borrow", poisoned)
    monkeypatch.setattr(Recycled, "_returned", lambda self, block: returned(self, block.fill_(POISON)))


@pytest.fixture
def mounted() -> StrictStore:
    store = StrictStore()
    store.mounts = [256 * MIB]  # some producer's
    return store


def keys_of(number: int, field: str = "mm") -> list[str]:
    return [f"{i}@{field}" for i in range(number)]


def pictures(number: int, floats: int, start: int = 0) -> list[dict[str, torch.Tensor]]:
    return [{"pixels": torch.full((floats,), float(start + i)), "grid": torch.tensor([i])} for i in range(number)]


def put_rows(client: Any, rows: list[Any], keys: list[str] | None = None) -> list[Any]:
    metas: list[Any] = client.put(keys or keys_of(len(rows)), plan_column(rows).planned())
    return metas


def check(got: list[Any], rows: list[Any]) -> None:
    for back, row in zip(got, rows, strict=True):
        assert isinstance(back, EncodedRow)
        value = decode_row(back.memory)
        assert value is not None
        assert list(value) == list(row)
        assert all(torch.equal(value[key], row[key]) for key in row)


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("floats", [0, 5, 50_000, 400_000])
def test_planned_rows_come_back_as_their_bytes(
    make_client: MakeClient, mounted: StrictStore, kind: str, floats: int
) -> None:
    client = make_client(mounted, **KINDS[kind])
    rows = pictures(6, floats)
    plan = plan_column(rows)
    metas = client.put(keys_of(6), plan.planned())
    assert [meta["encoded_size"] for meta in metas] == [plan.nbytes(i) for i in range(6)]
    assert len({meta["generation"] for meta in metas}) == 1
    got = client.get(keys_of(6), custom_backend_meta=metas)
    for i, back in enumerate(got):
        memory = back.memory
        assert (memory.dtype, memory.dim(), memory.numel()) == (torch.uint8, 1, plan.nbytes(i))
        assert memory.is_contiguous()
        assert memory.data_ptr() % 64 == 0
        assert memory.untyped_storage().nbytes() == plan.nbytes(i)
    check(got, rows)
    assert mounted.refused == []
    assert mounted.regions == {}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_comes_back_through_the_pool_with_its_dtype_shape_and_bytes(
    make_client: MakeClient, mounted: StrictStore, name: str
) -> None:
    client = make_client(mounted, settings=STAGED)
    value = TENSORS[name]
    [got] = client.get(["0@x"], custom_backend_meta=client.put(["0@x"], [value]))
    assert (got.dtype, got.shape) == (value.dtype, value.shape)
    assert bits(got) == bits(value)
    assert not got.requires_grad
    assert mounted.registered == 0


@pytest.mark.parametrize("kind", KINDS)
def test_one_put_of_every_kind_of_value(make_client: MakeClient, mounted: StrictStore, kind: str) -> None:
    client = make_client(mounted, **KINDS[kind])
    rows = pictures(2, 300_000)
    planned = plan_column([rows[0], {"a": object()}, rows[1], None]).planned()
    values = [torch.arange(5), *planned[:1], None, torch.randn(400, 800), planned[2], {"x": torch.ones(3)}, planned[3]]
    keys = [f"{i}@{field}" for i, field in enumerate("ababbab")]
    metas = client.put(keys, values)
    assert [set(meta) - {"generation"} for meta in metas] == [
        {"dtype", "shape"},
        {"encoded_size"},
        {"packed_size"},
        {"dtype", "shape"},
        {"encoded_size"},
        {"packed_size"},
        {"encoded_size"},
    ]
    got = client.get(keys, custom_backend_meta=metas)
    assert torch.equal(got[0], values[0])
    assert torch.equal(got[3], values[3])
    check([got[1], got[4]], rows)
    assert got[2] is None
    assert torch.equal(got[5]["x"], torch.ones(3))
    assert decode_row(got[6].memory) is None
    client.clear(keys, custom_backend_meta=metas)
    assert mounted.stored() == []
    assert mounted.refused == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [3, 30_000])
def test_the_tensors_of_a_column_lie_side_by_side(
    make_client: MakeClient, mounted: StrictStore, monkeypatch: pytest.MonkeyPatch, kind: str, width: int
) -> None:
    monkeypatch.setattr(upstream, "BATCH_SIZE_LIMIT", 4)
    client = make_client(mounted, **KINDS[kind])
    ids = [torch.arange(1 + i * width) for i in range(10)]
    masks = [torch.ones(1 + i * width, dtype=torch.bool) for i in range(10)]
    keys = keys_of(10, "ids") + keys_of(10, "mask")
    got = client.get(keys, custom_backend_meta=client.put(keys, ids + masks))
    assert all(map(torch.equal, got, ids + masks))
    for column, rows in ((got[:10], ids), (got[10:], masks)):
        view = jagged_view(column)
        assert view is not None
        assert all(map(torch.equal, view.unbind(), rows))


def test_what_packed_values_look_at_lives_as_long_as_they(make_client: MakeClient, mounted: StrictStore) -> None:
    """The serialiser gives views of what was read, not copies."""
    client = make_client(mounted, settings=STAGED)
    values = [
        {"small": torch.full((10,), 1.0), "array": np.full(7, 2)},
        {"middle": torch.full((50_000,), 3.0)},
        {"large": torch.full((600_000,), 4.0), "array": np.full(300_000, 5)},
    ]
    metas = client.put(keys_of(3), values)
    kept = [client.get(keys_of(3), custom_backend_meta=metas) for _ in range(12)]
    assert client.staging_counts().held > 0
    part = kept[0][2]["array"][10:20]
    del kept[0]
    for got in kept:
        assert torch.equal(got[0]["small"], values[0]["small"])
        assert np.array_equal(got[0]["array"], values[0]["array"])
        assert torch.equal(got[1]["middle"], values[1]["middle"])
        assert torch.equal(got[2]["large"], values[2]["large"])
    assert part.tolist() == [5] * 10
    kept.clear()
    assert part.tolist() == [5] * 10
    del part, got
    gc.collect()
    assert client.staging_counts().held == 0


# --- rungs ------------------------------------------------------------------------------------------------------------


def test_large_rows_are_lent_to_the_low_water_mark_and_the_rest_is_copied(
    make_client: MakeClient, mounted: StrictStore
) -> None:
    client = make_client(mounted, settings=STAGED)
    rows = pictures(14, 400_000)  # of 1.5 MiB
    size = plan_column(rows[:1]).nbytes(0)
    metas = put_rows(client, rows)
    got = client.get(keys_of(14), custom_backend_meta=metas)
    check(got, rows)
    counts = client.staging_counts()
    lent = 12 * MIB // size
    assert counts.moved("put", "copy") == Moved(14, 14 * size)
    assert counts.moved("get", "lend") == Moved(lent, lent * size)
    assert counts.moved("get", "copy") == Moved(14 - lent, (14 - lent) * size)
    assert set(counts.rungs) == {("put", "copy"), ("get", "lend"), ("get", "copy")}
    assert (counts.capacity, counts.held, counts.peak) == (16 * MIB, lent * size, lent * size)
    assert (counts.misses, counts.retired, counts.registrations) == (0, 0, 0)
    assert counts.allocations == 14 - lent
    assert counts.advised_mb * MIB * 3 / 4 >= 14 * size
    del got
    counts = client.staging_counts()
    assert (counts.held, counts.peak) == (0, lent * size)
    assert counts.spare == counts.allocated


def test_small_values_never_hold_a_piece_of_the_pool(make_client: MakeClient, mounted: StrictStore) -> None:
    client = make_client(mounted, settings=STAGED)
    rows = pictures(100, 2000)
    metas = put_rows(client, rows)
    kept = client.get(keys_of(100), custom_backend_meta=metas)
    counts = client.staging_counts()
    assert counts.held == 0
    assert counts.moved("get", "copy").values == 100
    assert counts.advised_mb == 0
    assert len(mounted.calls_of("get")) == 1
    check(kept, rows)


def test_a_row_larger_than_the_pool_can_serve_takes_memory_of_its_own(
    make_client: MakeClient, mounted: StrictStore
) -> None:
    client = make_client(mounted, settings=STAGED)
    rows = pictures(1, 4_000_000)  # of 15.3 MiB, of which 12 can be lent
    started = time.monotonic()
    got = client.get(keys_of(1), custom_backend_meta=put_rows(client, rows))
    assert time.monotonic() - started < 4, "nobody waited for what cannot be"
    check(got, rows)
    counts = client.staging_counts()
    assert counts.moved("put", "call").values == counts.moved("get", "call").values == 1
    assert (counts.misses, counts.registrations, counts.held) == (2, 2, 0)
    assert mounted.regions == {}


def test_a_row_between_the_reserve_and_the_pool_is_put_from_what_could_be_lent(
    make_client: MakeClient, mounted: StrictStore
) -> None:
    client = make_client(mounted, settings=STAGED)
    rows = pictures(1, 2_000_000)  # of 7.6 MiB
    metas = put_rows(client, rows)
    assert client.staging_counts().held == 0
    got = client.get(keys_of(1), custom_backend_meta=metas)
    more = client.get(keys_of(1), custom_backend_meta=metas)
    check(got + more, rows * 2)
    counts = client.staging_counts()
    assert counts.moved("put", "copy").values == 1
    assert (counts.moved("get", "lend").values, counts.moved("get", "call").values) == (1, 1)


def test_two_gets_never_share_memory(make_client: MakeClient, mounted: StrictStore) -> None:
    client = make_client(mounted, settings=STAGED)
    rows = [*pictures(2, 400_000), *pictures(2, 40_000), *pictures(2, 10)]
    metas = put_rows(client, rows)
    first, second = (client.get(keys_of(6), custom_backend_meta=metas) for _ in range(2))
    for back in first:
        back.memory.fill_(0)
    check(second, rows)


def test_nothing_a_consumer_holds_ever_changes(make_client: MakeClient, mounted: StrictStore) -> None:
    """Every size, many gets, some dropped in between; whatever comes back is poisoned."""
    client = make_client(mounted, settings=STAGED)
    rows = [*pictures(3, 400_000), *pictures(3, 40_000, 10), *pictures(3, 100, 20)]
    tensors = [torch.full((n,), float(n)) for n in (3, 30_000, 500_000)]
    keys = keys_of(9) + keys_of(3, "t")
    metas = client.put(keys, [*plan_column(rows).planned(), *tensors])
    kept: list[list[Any]] = []
    for round_ in range(30):
        kept.append(client.get(keys, custom_backend_meta=metas))
        if round_ % 3 == 2:
            del kept[round_ % len(kept)]
        kept = kept[-6:]
        for got in kept:
            check(got[:9], rows)
            assert all(map(torch.equal, got[9:], tensors))
    assert mounted.registered == 0


def test_a_thousand_rounds_register_nothing(make_client: MakeClient, mounted: StrictStore) -> None:
    """FC-31. The reader keeps its last eight batches, as the host does."""
    client = make_client(mounted, settings=STAGED)
    values = [torch.arange(100), {"a": torch.ones(30_000)}, *plan_column(pictures(2, 30_000)).planned()]
    keys, kept, warm = keys_of(4), [], 0
    for round_ in range(1000):
        metas = client.put(keys, values)
        kept.append(client.get(keys, custom_backend_meta=metas))
        client.clear(keys, custom_backend_meta=metas)
        kept = kept[-8:]
        if round_ == 10:
            warm = client.staging_counts().allocations
    counts = client.staging_counts()
    assert mounted.registered == counts.registrations == 0
    assert counts.allocations == warm
    assert counts.moved("get", "copy").values == 4000
    assert mounted.stored() == []


def test_without_staging_each_batch_registers_its_memory_once(make_client: MakeClient, mounted: StrictStore) -> None:
    client = make_client(mounted)
    rows = pictures(8, 1000)
    got = client.get(keys_of(8), custom_backend_meta=put_rows(client, rows))
    check(got, rows)
    counts = client.staging_counts()
    assert counts.registrations == mounted.registered == 2
    assert (counts.moved("put", "call").values, counts.moved("get", "call").values) == (8, 8)
    assert (counts.misses, counts.capacity) == (0, 0)
    assert mounted.pools == []


def test_a_wheel_without_a_pool_takes_memory_of_each_call_and_that_is_counted(
    make_client: MakeClient, mounted: StrictStore, caplog: pytest.LogCaptureFixture
) -> None:
    client = make_client(mounted, settings=STAGED, pool=False)
    assert "this Mooncake wheel has no BufferPool" in caplog.text
    assert mounted.setup_arguments[3] == 16 * MIB, "its local buffer has no room for one"
    rows = pictures(3, 1000)
    check(client.get(keys_of(3), custom_backend_meta=put_rows(client, rows)), rows)
    counts = client.staging_counts()
    assert (counts.misses, counts.capacity, counts.registrations) == (6, 0, 2)


def test_the_pool_is_made_at_the_first_use(make_client: MakeClient, mounted: StrictStore) -> None:
    client = make_client(mounted, settings=STAGED)
    assert mounted.setup_arguments[3] == 32 * MIB, "the pool and its headroom"
    assert mounted.pools == []
    client.put(["0@x"], [1])
    client.put(["1@x"], [1])
    assert len(mounted.pools) == 1


# --- batches ----------------------------------------------------------------------------------------------------------


def test_batches_follow_the_byte_budget(make_client: MakeClient, mounted: StrictStore) -> None:
    client = make_client(mounted, settings={"batch_bytes_budget": 10_000})
    rows = pictures(10, 1000)  # of 4416 bytes
    metas = put_rows(client, rows)
    check(client.get(keys_of(10), custom_backend_meta=metas), rows)
    assert sorted(map(len, mounted.calls_of("put"))) == [2] * 5
    assert sorted(map(len, mounted.calls_of("get"))) == [2] * 5


def test_a_budget_above_what_transfers_share_is_cut_to_that(make_client: MakeClient, mounted: StrictStore) -> None:
    client = make_client(mounted, settings={**STAGED, "batch_bytes_budget": 100 * MIB})
    rows = pictures(1000, 500)  # 2.4 MB together
    metas = put_rows(client, rows)
    check(client.get(keys_of(1000), custom_backend_meta=metas), rows)
    assert [len(mounted.calls_of(name)) for name in ("put", "get")] == [3, 3]
    assert max(map(len, mounted.calls_of("put"))) > upstream.BATCH_SIZE_LIMIT


@given(sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=200), room=st.integers(64, 20_000))
def test_batches_that_share_room_fit_and_are_about_equal(sizes: list[int], room: int) -> None:
    items = [SimpleNamespace(nbytes=size) for size in sizes]
    batches = cut(items, room=room)
    assert [one for batch in batches for one in batch] == items
    used = [sum(aligned(one.nbytes) for one in batch) for batch in batches]
    assert all(total <= room or len(batch) == 1 for total, batch in zip(used, batches, strict=True))
    fewest = -(-sum(used) // room)
    assert all(total <= sum(used) / max(fewest, 1) + aligned(max(sizes)) for total in used)


def test_a_rest_does_not_become_a_batch_of_its_own() -> None:
    batches = cut([SimpleNamespace(nbytes=64)] * 33, room=64 * 16)
    assert [len(batch) for batch in batches] == [12, 12, 9]


@pytest.mark.parametrize(("protocol", "most"), [("tcp", 1), ("rdma", 3)])
def test_over_tcp_one_transfer_at_a_time_and_over_rdma_any(protocol: str, most: int) -> None:
    turns, together, running = Turns(protocol), threading.Barrier(3), 0
    seen: list[int] = []

    def transfer() -> None:
        nonlocal running
        together.wait(10)
        with turns.take():
            running += 1
            pause(0.05)
            seen.append(running)
            pause(0.05)
            running -= 1

    threads = [threading.Thread(target=transfer) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(seen) == 3
    assert max(seen) == most


def test_a_transfer_that_is_stuck_does_not_keep_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turning, "PATIENCE_SECONDS", 0.05)
    turns = Turns("tcp")
    with turns.take():
        with turns.take():
            pass
        assert turns._lock is not None
        assert turns._lock.locked()  # the one that went ahead gave back nothing that was not its own
    with turns.take():
        assert turns._lock.locked()


def test_a_batch_waits_for_memory_and_then_takes_its_own(
    make_client: MakeClient, mounted: StrictStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(staging, "WAIT_SECONDS", 0.3)
    caplog.set_level("INFO")
    client = make_client(mounted, settings=STAGED)
    client.put(["9@x"], [1])
    pool = client._staging._pool
    hoard = [pool.lend(MIB) for _ in range(12)]
    with pool.reserve.borrow(4 * MIB, 0):
        started = time.monotonic()
        [got] = client.get(["0@x"], custom_backend_meta=client.put(["0@x"], [torch.arange(1000)]))
        assert 0.5 < time.monotonic() - started < 5
    assert torch.equal(got, torch.arange(1000))
    assert client.staging_counts().misses == 2
    assert "no staging memory of 7.8 KiB within 0.3 s (0 B of 4 MiB free)" in caplog.text
    assert len(hoard) == 12


# --- failures ---------------------------------------------------------------------------------------------------------


def pause(seconds: float) -> None:
    """The fixture shortens ``time.sleep``."""
    threading.Event().wait(seconds)


def settle(client: Any) -> None:
    """Everything has come back but the reserve itself."""
    gc.collect()
    pool = client._staging._pool
    assert pool.held == 0
    assert pool.reserve.free == pool.reserve.size - pool.reserve.retired


@pytest.mark.parametrize("floats", [10, 400_000])
def test_a_failed_put_leaves_nothing_behind(make_client: MakeClient, mounted: StrictStore, floats: int) -> None:
    client = make_client(mounted, settings=STAGED)
    mounted.plan = [lambda codes: codes, fail(-600, 0)]
    before = put_rows(client, pictures(1, 10), ["9@mm"])
    with pytest.raises(StoreFault, match=r"field mm \(row .*invalid parameters \(-600\)"):
        put_rows(client, pictures(4, floats))
    check(client.get(["9@mm"], custom_backend_meta=before), pictures(1, 10))
    assert len(mounted.stored()) == 1
    assert client.staging_counts().retired == 0
    settle(client)


@pytest.mark.parametrize("floats", [10, 40_000, 400_000])
@pytest.mark.parametrize("plan", [[lambda codes: codes[:-1]], [lambda codes: [code - 64 for code in codes]]])
def test_a_get_that_brought_too_little_is_no_success(
    make_client: MakeClient, mounted: StrictStore, floats: int, plan: list[Any]
) -> None:
    client = make_client(mounted, settings=STAGED)
    rows = pictures(2, floats)
    metas = put_rows(client, rows)
    mounted.plan = list(plan)
    with pytest.raises(StoreFault, match=r"field mm \(rows? .*(answered for 1 of 2 values|bytes where)"):
        client.get(keys_of(2), custom_backend_meta=metas)
    settle(client)
    check(client.get(keys_of(2), custom_backend_meta=metas), rows)


def test_memory_of_a_failed_get_comes_back_without_a_garbage_collection(
    make_client: MakeClient, mounted: StrictStore
) -> None:
    client = make_client(mounted, settings=STAGED)
    metas = put_rows(client, pictures(4, 400_000))
    mounted.plan = [fail(-600, 0)]
    gc.disable()
    try:
        with pytest.raises(StoreFault) as caught:
            client.get(keys_of(4), custom_backend_meta=metas)
        assert caught.value.code == -600
        del caught
        assert client.staging_counts().held == 0
    finally:
        gc.enable()


def test_only_what_failed_is_read_again(make_client: MakeClient, mounted: StrictStore) -> None:
    client = make_client(mounted, settings=STAGED)
    rows = pictures(3, 400_000)
    metas = put_rows(client, rows)
    mounted.plan = [fail(-703, 1)]
    check(client.get(keys_of(3), custom_backend_meta=metas), rows)
    assert [len(call) for call in mounted.calls_of("get")] == [3, 1]


@pytest.mark.parametrize("floats", [40_000, 400_000])
def test_memory_a_late_read_may_still_write_to_is_never_handed_out(
    make_client: MakeClient, mounted: StrictStore, monkeypatch: pytest.MonkeyPatch, floats: int
) -> None:
    """FC-32: the caller stops waiting, the bytes land later."""
    monkeypatch.setenv("RTQ_STORE_CALL_SECONDS", "0.1")
    client = make_client(mounted, settings=STAGED)
    old, new = pictures(1, floats, 7), pictures(1, floats, 9)
    late, fresh = put_rows(client, old, ["0@mm"]), put_rows(client, new, ["1@mm"])
    inner, landed = mounted.batch_get_into, threading.Event()

    def slow(keys: list[str], pointers: list[int], sizes: list[int]) -> list[int]:
        if keys[0].endswith("/0@mm"):
            pause(0.8)
            result = inner(keys, pointers, sizes)
            landed.set()
            return result
        return inner(keys, pointers, sizes)

    mounted.batch_get_into = slow  # type: ignore[method-assign]
    with pytest.raises(StoreFault, match=r"row 0\): batch_get_into did not return within"):
        client.get(["0@mm"], custom_backend_meta=late)
    counts = client.staging_counts()
    size = plan_column(old).nbytes(0)
    assert counts.retired == size
    assert counts.held == 0
    gc.collect()
    kept = [client.get(["1@mm"], custom_backend_meta=fresh) for _ in range(20)]
    assert landed.wait(5)
    time.sleep(0.05)
    for got in kept:
        check(got, new)
    kept += [client.get(["1@mm"], custom_backend_meta=fresh) for _ in range(20)]
    for got in kept:
        check(got, new)


def test_a_put_that_never_returned_keeps_its_memory_as_it_was(
    make_client: MakeClient, mounted: StrictStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine may still be reading it."""
    monkeypatch.setenv("RTQ_STORE_CALL_SECONDS", "0.1")
    client = make_client(mounted, settings=STAGED)
    client.put(["9@x"], [1])
    inner, seen = mounted.batch_upsert_from, []

    def slow(keys: list[str], pointers: list[int], sizes: list[int], config: Any = None) -> list[int]:
        if not keys[0].endswith("/0@mm"):
            return inner(keys, pointers, sizes, config)
        pause(0.8)
        result = inner(keys, pointers, sizes, config)
        seen.append(mounted.data[keys[0]])
        return result

    mounted.batch_upsert_from = slow  # type: ignore[method-assign]
    row = pictures(1, 1000, 5)
    with pytest.raises(StoreFault, match=r"row 0\): batch_upsert_from did not return"):
        put_rows(client, row)
    for i in range(10):
        put_rows(client, pictures(1, 1000, 50 + i), [f"{i + 1}@mm"])
    deadline = time.monotonic() + 5
    while not seen and time.monotonic() < deadline:
        pause(0.05)
    value = decode_row(torch.frombuffer(bytearray(seen[0]), dtype=torch.uint8))
    assert value is not None
    assert torch.equal(value["pixels"], row[0]["pixels"])
    assert client.staging_counts().retired > 0


def test_a_pool_that_failed_transfers_have_used_up_is_a_clear_error(
    make_client: MakeClient, mounted: StrictStore
) -> None:
    client = make_client(mounted, settings=STAGED)
    metas = client.put(["0@x"], [torch.zeros(250_000)])
    for _ in range(4):
        mounted.plan = [fail(-800, 0)] * 10
        with pytest.raises(StoreFault, match=r"lost: the process that holds it is dead"):
            client.get(["0@x"], custom_backend_meta=metas)
        mounted.plan = []
    with pytest.raises(StoreFault, match=r"row 0\): the staging pool is used up: .* of 16 MiB .*restart the job"):
        client.get(["0@x"], custom_backend_meta=metas)
    with pytest.raises(StoreFault, match="the staging pool is used up"):
        client.put(["1@x"], [1])


@pytest.mark.parametrize("how", [lambda pointer, size: -600, lambda pointer, size: 1 / 0])
def test_a_registration_that_fails_on_the_way_out_of_the_pool(
    make_client: MakeClient, mounted: StrictStore, how: Callable[[int, int], Any]
) -> None:
    """FC-33: the second registration fails, or raises; its memory is never used again, the first stays good."""
    client = make_client(mounted, settings=STAGED)
    rows = pictures(1, 4_000_000)
    metas = put_rows(client, rows)
    register, mounted.register_buffer = mounted.register_buffer, how  # type: ignore[method-assign]
    with pytest.raises((StoreFault, ZeroDivisionError)):
        client.get(keys_of(1), custom_backend_meta=metas)
    mounted.register_buffer = register  # type: ignore[method-assign]
    assert client.staging_counts().retired_regions >= plan_column(rows).nbytes(0)
    check(client.get(keys_of(1), custom_backend_meta=metas), rows)
    assert mounted.refused == []


def test_many_threads_put_and_get_at_once(make_client: MakeClient, mounted: StrictStore) -> None:
    client = make_client(mounted, settings=STAGED)
    wrong: list[BaseException] = []

    def work(mark: int) -> None:
        try:
            for round_ in range(15):
                rows = [*pictures(2, 300_000, mark), *pictures(4, 30_000, mark + round_), *pictures(10, 50, mark)]
                keys = [f"{mark * 1000 + i}@mm" for i in range(16)]
                metas = put_rows(client, rows, keys)
                check(client.get(keys, custom_backend_meta=metas), rows)
                client.clear(keys, custom_backend_meta=metas)
        except BaseException as exc:
            wrong.append(exc)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert wrong == []
    assert mounted.stored() == []
    settle(client)


# --- life -------------------------------------------------------------------------------------------------------------


def test_what_was_lent_outlives_the_client(make_client: MakeClient, mounted: StrictStore) -> None:
    client = make_client(mounted, settings=STAGED)
    rows = pictures(3, 400_000)
    metas = put_rows(client, rows)
    got = client.get(keys_of(3), custom_backend_meta=metas)
    assert client.staging_counts().held > 0
    client.close()
    check(got, rows)
    with pytest.raises(StoreFault, match="connection to the Mooncake store is closed"):
        client.get(keys_of(3), custom_backend_meta=metas)
    assert mounted.closed == 1


@pytest.mark.parametrize(
    ("limit", "megabytes"), [(None, 64), (400, 64), (336, 64), (320, 48), (288, 16), (280, 0), (1, 0)]
)
def test_the_pool_fits_the_locked_memory_limit_of_its_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, limit: int | None, megabytes: int
) -> None:
    """FC-05. Segment 256, buffer 16, pool 64 MiB."""
    monkeypatch.setenv("RTQ_SEGMENT_MB", "256")
    monkeypatch.setenv("RTQ_LOCAL_BUFFER_MB", "16")
    monkeypatch.setattr(connect, "pinnable_bytes", lambda tree: None if limit is None else limit * MIB)
    settings = Settings(storage_backend="mooncake", host_staging=True, host_staging_mb=64)
    assert connect.staging_bytes(settings, "rdma") == megabytes * MIB
    assert ("locked-memory limit" in caplog.text) == (megabytes < 64)
    assert connect.staging_bytes(settings, "tcp") == 64 * MIB
    assert connect.staging_bytes(Settings(storage_backend="mooncake"), "rdma") == 0


# --- accounting -------------------------------------------------------------------------------------------------------


def test_the_step_says_by_which_memory_its_bytes_went(make_client: MakeClient, mounted: StrictStore) -> None:
    accounting.configure("summary", job="staging", sink=lambda line: None)
    try:
        ledger = accounting.ledger()
        assert ledger is not None
        client = make_client(mounted, settings=STAGED)
        rows = pictures(14, 400_000)
        operation = ledger.begin("put", "train_0")
        metas = put_rows(client, rows)
        got = client.get(keys_of(14), custom_backend_meta=metas)
        ledger.end(operation, "ok")
        step = ledger.step("train_0")
        counts = client.staging_counts()
        assert step is not None
        assert {(one.direction, one.rung): one.bytes for one in step.staged} == {
            rung: moved.nbytes for rung, moved in counts.rungs.items()
        }
        assert step.pool == accounting.PoolState(
            capacity=16 * MIB, held=counts.held, peak=counts.peak, advised_mb=counts.advised_mb
        )
        assert counts.advised_mb > 0
        assert len(got) == 14
    finally:
        accounting.configure("off")


# --- GDR: TransferQueue's own path; here what the plugin adds ---------------------------------------------------------


def test_rows_go_through_the_gpu_buffer_as_byte_tensors(
    make_client: MakeClient, mounted: StrictStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make_client(mounted, settings=STAGED)
    monkeypatch.setattr(client, "_gdr_staging", SimpleNamespace(size=MIB, device=-1, close=lambda store: None))
    client.use_gdr = True
    given: dict[str, torch.Tensor] = {}

    def put_gdr(self: Any, keys: list[str], tensors: list[torch.Tensor]) -> list[Any]:
        given.update(zip(keys, tensors, strict=True))
        return [None] * len(tensors)

    def get_gdr(self: Any, keys: Any, shapes: Any, dtypes: Any, indexes: Any, metas: Any) -> Any:
        assert set(dtypes) <= {torch.uint8, torch.float32}
        return [given[key].view(shape) for key, shape in zip(keys, shapes, strict=True)], indexes

    monkeypatch.setattr(upstream.MooncakeStoreClient, "_put_tensors_gdr", put_gdr)
    monkeypatch.setattr(upstream.MooncakeStoreClient, "_get_tensors_gdr", get_gdr)
    rows = [*pictures(2, 1000), *pictures(1, 300_000)]
    keys = [*keys_of(3), "0@t", "0@o"]
    metas = client.put(keys, [*plan_column(rows).planned(), torch.ones(3), {"a": 1}])
    assert len(given) == 3, "a row that is larger than the buffer goes by the host"
    assert {tensor.dtype for tensor in given.values()} == {torch.uint8, torch.float32}
    got = client.get(keys, custom_backend_meta=metas)
    check(got[:3], rows)
    assert torch.equal(got[3], torch.ones(3))
    assert got[4] == {"a": 1}
