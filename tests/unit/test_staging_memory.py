"""Memory of the staging: loans, blocks used again, the reserve, the pool, jagged views."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from relax_tq_rdma.staging import recycled as recycling
from relax_tq_rdma.staging.errors import StoreFault
from relax_tq_rdma.staging.jagged import jagged_view
from relax_tq_rdma.staging.loans import Inbox, lend
from relax_tq_rdma.staging.pool import Pool
from relax_tq_rdma.staging.recycled import Recycled
from relax_tq_rdma.staging.reserve import Reserve
from relax_tq_rdma.transport.memory import MIB
from tests.strict_store import POISON, StrictPool, StrictStore

# --- loans ------------------------------------------------------------------------------------------------------------


def loan(nbytes: int = 256) -> tuple[torch.Tensor, list[int]]:
    back: list[int] = []
    return lend(memoryview(bytearray(nbytes)), lambda: back.append(1)), back


VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "slice": lambda t: t[8:16],
    "other dtype": lambda t: t.view(torch.float32),
    "row of a matrix": lambda t: t.view(16, 16)[3],
    "numpy": lambda t: t.numpy(),
    "numpy slice": lambda t: t.numpy()[4:8],
    "memoryview": lambda t: t.numpy().data,
    "frombuffer over a slice": lambda t: torch.frombuffer(t.numpy().data[64:128], dtype=torch.float16),
    "detached": lambda t: t.detach(),
    "storage": lambda t: t.untyped_storage(),
    "dict of views": lambda t: {"a": [t[:4], {"b": t[4:]}]},
    "jagged": lambda t: jagged_view([t[:16], t[16:48]]),
    "batch of a DataLoader": lambda t: next(iter(DataLoader([t], batch_size=None))),
    "autograd": lambda t: t.view(torch.float32).requires_grad_(),
    "parameter": lambda t: torch.nn.Parameter(t.view(torch.float32)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_loan_lasts_as_long_as_any_view_of_it(name: str) -> None:
    tensor, back = loan()
    view = VIEWS[name](tensor)
    del tensor
    gc.collect()
    assert back == []
    del view
    gc.collect()
    assert back == [1]


@pytest.mark.parametrize("copied", [copy.deepcopy, torch.clone, lambda t: pickle.loads(pickle.dumps(t))])  # noqa: S301
def test_a_copy_does_not_keep_the_loan(copied: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor, back = loan()
    tensor.fill_(3)
    other = copied(tensor)
    del tensor
    gc.collect()
    assert back == [1]
    assert other.tolist() == [3] * 256


def test_a_loan_saves_its_own_bytes_only() -> None:
    tensor, _ = loan(4096)
    file = io.BytesIO()
    torch.save(tensor, file)
    assert file.tell() < 4096 + 2048


def test_a_collated_batch_is_a_copy_and_a_held_dataset_keeps_the_loan() -> None:
    tensor, back = loan()
    data = [tensor[i : i + 64] for i in range(0, 256, 64)]
    del tensor
    [batch] = list(DataLoader(data, batch_size=4))
    assert back == []
    data.clear()
    gc.collect()
    assert back == [1]
    assert batch.shape == (4, 64)


def test_something_may_come_back_while_its_own_thread_has_the_lock() -> None:
    """A garbage collection runs a finalizer wherever it likes."""
    lock, taken = threading.Lock(), []
    inbox: Inbox[int] = Inbox(lock, taken.append)
    with lock:
        inbox.drop(1)
        assert taken == []
    inbox.settle()
    assert taken == [1]
    inbox.drop(2)
    assert taken == [1, 2]


# --- blocks used again ------------------------------------------------------------------------------------------------


def test_a_block_is_used_again_when_its_last_view_is_gone() -> None:
    memory = Recycled(keep=10 * MIB)
    first = memory.take(MIB)
    pointer, view = first.data_ptr(), first[100:200]
    del first
    second = memory.take(MIB)
    assert second.data_ptr() != pointer
    del view
    assert memory.take(MIB).data_ptr() == pointer
    assert memory.allocations == 2


@pytest.mark.parametrize("nbytes", [1, 65535, 65536, 65537, 100_000, MIB, MIB + 1, 3 * MIB - 5])
def test_blocks_are_aligned_exact_and_little_more_than_asked_for(nbytes: int) -> None:
    memory = Recycled(keep=0)
    tensor = memory.take(nbytes)
    assert (tensor.numel(), tensor.dtype, tensor.data_ptr() % 64) == (nbytes, torch.uint8, 0)
    assert tensor.untyped_storage().nbytes() == nbytes
    assert memory.used_bytes <= nbytes * 17 / 16 + 64
    assert memory.allocated_bytes == memory.used_bytes


def test_a_somewhat_larger_block_will_do_a_much_larger_one_will_not() -> None:
    memory = Recycled(keep=100 * MIB)
    memory.take(8 * MIB)
    memory.take(int(7.5 * MIB))
    assert memory.allocations == 1
    memory.take(4 * MIB)
    assert memory.allocations == 2


def test_free_blocks_are_bounded_and_the_oldest_goes_first() -> None:
    memory = Recycled(keep=3 * MIB)
    held = [memory.take(MIB) for _ in range(5)]
    pointers = [tensor.data_ptr() for tensor in held]
    while held:
        del held[0]
    assert memory.free_bytes == 3 * MIB
    assert memory.used_bytes == 0
    again = [memory.take(MIB) for _ in range(3)]
    assert {tensor.data_ptr() for tensor in again} == set(pointers[2:])


def test_a_reader_that_keeps_eight_batches_costs_no_fresh_memory_after_warm_up() -> None:
    memory = Recycled(keep=4 * MIB)
    kept: list[list[torch.Tensor]] = []
    for round_ in range(40):
        kept.append([memory.take(100_000 + 1000 * i) for i in range(16)])
        kept = kept[-8:]
        if round_ == 9:
            warm = memory.allocations
    assert memory.allocations == warm
    assert memory.free_bytes <= 4 * MIB


def test_no_fresh_memory_leaves_the_counts_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Recycled(keep=MIB)

    def full(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(recycling, "_fresh", full)
    with pytest.raises(MemoryError):
        memory.take(MIB)
    assert memory.used_bytes == 0


def test_large_blocks_are_private_mappings_of_their_own() -> None:
    """Not the C library's heap, which they would fill with holes; and not shared with a forked child."""
    block = Recycled(keep=MIB).take(MIB)
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, end = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= block.data_ptr() < end:
            assert line.split()[1] == "rw-p"
            assert not line.endswith("[heap]")
            return
    pytest.fail("the block is not mapped")


def test_many_threads_that_take_and_drop() -> None:
    memory = Recycled(keep=8 * MIB)
    wrong: list[int] = []

    def work(mark: int) -> None:
        for _ in range(200):
            tensor = memory.take(70_000).fill_(mark)
            if int(tensor.min()) != mark or int(tensor.max()) != mark:
                wrong.append(mark)
            del tensor

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert memory.used_bytes == 0
    assert memory.allocations <= 8


# --- the reserve ------------------------------------------------------------------------------------------------------


def reserve(slots: int) -> Reserve:
    return Reserve(torch.zeros(slots * 1024, dtype=torch.uint8))


def test_three_takers_for_two_slots_and_one_comes_back_after_a_second() -> None:
    pool, got = reserve(2), []
    both_in, let_go = threading.Barrier(3, timeout=10), threading.Event()

    def holder() -> None:
        with pool.borrow(1024, 5) as piece:
            assert piece is not None
            both_in.wait()
            let_go.wait(10)

    threads = [threading.Thread(target=holder) for _ in range(2)]
    for thread in threads:
        thread.start()
    both_in.wait()
    timer = threading.Timer(1.0, let_go.set)
    timer.start()
    started = time.monotonic()
    with pool.borrow(1024, 5) as piece:
        got.append(piece)
        assert 0.9 < time.monotonic() - started < 4
    assert got[0] is not None
    for thread in threads:
        thread.join(5)
    assert pool.free == pool.size


def test_who_waits_in_vain_is_told_in_time() -> None:
    pool = reserve(2)
    with pool.borrow(1500, 1):
        started = time.monotonic()
        with pool.borrow(1024, 0.3) as piece:
            assert piece is None
        assert 0.25 < time.monotonic() - started < 2
        with pool.borrow(512, 0.3) as piece:
            assert piece is not None


def test_more_than_there_is_is_refused_at_once() -> None:
    started = time.monotonic()
    with reserve(2).borrow(2049, 10) as piece:
        assert piece is None
    assert time.monotonic() - started < 1


def test_a_large_taker_is_not_starved_by_small_ones() -> None:
    pool, stop = reserve(4), threading.Event()

    def small() -> None:
        while not stop.is_set():
            with pool.borrow(1024, 5):
                time.sleep(0.005)

    threads = [threading.Thread(target=small) for _ in range(6)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            with pool.borrow(4096, 5) as piece:
                assert piece is not None
    finally:
        stop.set()
        for thread in threads:
            thread.join(10)


def test_a_retired_piece_is_never_handed_out_again() -> None:
    pool = reserve(2)
    with pool.borrow(1024, 0) as piece:
        assert piece is not None
        first = piece.memory.data_ptr()
        piece.retire()
    for _ in range(3):
        with pool.borrow(1024, 0) as piece:
            assert piece is not None
            assert piece.memory.data_ptr() != first
    with pool.borrow(2048, 0) as piece:
        assert piece is None
    assert (pool.retired, pool.free) == (1024, 1024)


# --- the pool ---------------------------------------------------------------------------------------------------------


def make_pool(capacity: int = 16 * MIB, headroom: int = 4 * MIB) -> tuple[Pool, StrictPool]:
    store = StrictStore()
    store.setup("", "", 0, capacity + headroom, "tcp", "", "")
    native = StrictPool(store, max_bytes=1)
    return Pool(native, capacity), native


def test_the_pool_lends_down_to_its_low_water_mark_and_gets_all_of_it_back() -> None:
    pool, native = make_pool()
    lent = [pool.lend(MIB) for _ in range(14)]
    assert sum(tensor is not None for tensor in lent) == 12
    assert (pool.held, pool.peak, native.leased()) == (12 * MIB, 12 * MIB, 16 * MIB)
    with pool.borrow(4 * MIB, 0) as piece:
        assert piece is not None
    lent.clear()
    assert (pool.held, pool.peak, native.leased()) == (0, 12 * MIB, 4 * MIB)
    again = pool.lend(12 * MIB)
    assert again is not None
    assert again.data_ptr() % 64 == 0
    assert int(again[MIB]) == POISON


def test_free_memory_in_pieces_that_are_too_small_is_a_miss() -> None:
    pool, native = make_pool(headroom=0)
    lent = [pool.lend(MIB) for _ in range(12)]
    lent[::2] = [None] * 6
    assert pool.lend(2 * MIB) is None
    assert pool.held == 6 * MIB
    assert pool.lend(MIB) is not None
    assert native.leased() == 10 * MIB


def test_borrowing_more_than_the_reserve_takes_what_could_be_lent_and_gives_it_back() -> None:
    pool, native = make_pool()
    with pool.borrow(8 * MIB, 0) as piece:
        assert piece is not None
        assert pool.held == 8 * MIB
    del piece
    assert pool.held == 0
    assert native.leased() == 4 * MIB
    with pool.borrow(13 * MIB, 5) as piece:
        assert piece is None


def test_what_is_retired_stays_out_of_use_and_when_it_is_too_much_that_is_an_error() -> None:
    pool, _ = make_pool()
    lent = pool.lend(10 * MIB)
    assert lent is not None
    pool.retire(lent)
    pool.retire(lent)
    pointer = lent.data_ptr()
    del lent
    gc.collect()
    assert (pool.retired, pool.held) == (10 * MIB, 0)
    assert pool.lend(3 * MIB) is None
    other = pool.lend(2 * MIB)
    assert other is not None
    assert not pointer <= other.data_ptr() < pointer + 10 * MIB
    with pool.borrow(MIB, 0):
        pass
    pool.retire(other)
    with pool.borrow(MIB, 0) as piece:
        assert piece is not None
        piece.retire()
    with pytest.raises(StoreFault, match=r"pool is used up: 13 MiB of 16 MiB are out of use.*restart the job"):
        pool.borrow(MIB, 0).__enter__()


def test_a_reserve_that_is_used_up_is_an_error_although_much_could_be_lent() -> None:
    pool, _ = make_pool()
    for _ in range(4):
        with pool.borrow(MIB, 0) as piece:
            assert piece is not None
            piece.retire()
    with pytest.raises(StoreFault, match="used up: 4 MiB of 16 MiB"):
        pool.borrow(1, 0).__enter__()


def test_a_local_buffer_that_is_too_small_is_a_sentence() -> None:
    store = StrictStore()
    store.setup("", "", 0, MIB, "tcp", "", "")
    with pytest.raises(StoreFault, match=r"cannot take 4 MiB from Mooncake's local buffer .*exhausted"):
        Pool(StrictPool(store, max_bytes=1), 16 * MIB)


def test_two_threads_never_lend_more_than_there_is() -> None:
    pool, native = make_pool(headroom=16 * MIB)
    most = 0

    def work() -> None:
        nonlocal most
        for _ in range(200):
            held = [pool.lend(MIB) for _ in range(10)]
            most = max(most, pool.held)
            del held

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most <= 12 * MIB
    assert (pool.held, native.leased()) == (0, 4 * MIB)


def test_nothing_depends_on_assert_statements() -> None:
    """The same cases with ``python -O`` (FC-33)."""
    code = (
        "from tests.unit.test_staging_memory import make_pool, MIB, StoreFault\n"
        "pool, native = make_pool()\n"
        "held = [pool.lend(MIB) for _ in range(14)]\n"
        "count = sum(x is not None for x in held)\n"
        "for _ in range(4):\n"
        "    with pool.borrow(MIB, 0) as piece:\n"
        "        piece.retire()\n"
        "try:\n"
        "    pool.borrow(MIB, 0).__enter__()\n"
        "except StoreFault as fault:\n"
        "    print(count, 'used up' in str(fault), __debug__)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, timeout=60, cwd=root)
    assert done.stdout == "12 True False\n", done.stderr


# --- jagged views -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("lengths", [[3], [2, 1, 0, 3], [0, 2], [5, 5, 5]])
@pytest.mark.parametrize("rest", [(), (2,), (2, 3)])
def test_a_jagged_view_equals_what_upstream_copies(
    dtype: torch.dtype, lengths: list[int], rest: tuple[int, ...]
) -> None:
    width = int(np.prod(rest))
    slab = torch.arange(7 + sum(lengths) * width).to(dtype)
    rows = [part.view(-1, *rest) for part in torch.split(slab[7:], [n * width for n in lengths])]
    view, copied = jagged_view(rows), torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    assert view is not None
    assert (type(view), view.dtype, view.layout, view.dim()) == (type(copied), dtype, torch.jagged, copied.dim())
    assert view.offsets().tolist() == copied.offsets().tolist()
    assert (view._get_min_seqlen(), view._get_max_seqlen()) == (copied._get_min_seqlen(), copied._get_max_seqlen())
    assert [row.shape for row in view.unbind()] == [row.shape for row in rows]
    assert all(map(torch.equal, view.unbind(), rows))
    assert view.values().data_ptr() == slab[7:].data_ptr()
    assert view.values().untyped_storage().nbytes() == sum(row.nbytes for row in rows)
    padded = [torch.nested.to_padded_tensor(nested.float(), 0.0) for nested in (view, copied)]
    assert torch.equal(*padded)


slab = torch.arange(24.0)
NO_VIEW: dict[str, list[torch.Tensor]] = {
    "none": [],
    "a gap": [slab[:4], slab[5:8]],
    "other order": [slab[4:8], slab[:4]],
    "two storages": [slab[:4], torch.arange(4.0)],
    "two dtypes": [slab[:4], slab[4:8].view(torch.int32)],
    "two widths": [slab[:4].view(2, 2), slab[4:10].view(2, 3)],
    "scalars": [slab[0].reshape(()), slab[1].reshape(())],
    "strided": [slab[::2], slab[1::2]],
    "gradient": [slab[:4].clone().requires_grad_()],
    "no bytes at all": [slab[:0], slab[:0]],
    "meta": [torch.empty(3, device="meta")],
}


@pytest.mark.parametrize("name", NO_VIEW)
def test_rows_that_cannot_be_one_view(name: str) -> None:
    assert jagged_view(NO_VIEW[name]) is None
