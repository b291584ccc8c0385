"""Fetching in a cohort: agreement and the broadcast hops, on ranks that are threads and a client that is a script."""

import threading

import pytest
import torch

from relax_tq_rdma.demo import fetch
from relax_tq_rdma.demo.fetch import Fetcher, describe_tensors, restore
from relax_tq_rdma.demo.mesh import Mesh
from relax_tq_rdma.demo.rows import MULTIMODAL, to_tensordict
from relax_tq_rdma.errors import TransferError
from tests.unit.test_demo_rows import batch

DEADLINE = 20.0


class World:
    """Group collectives for ranks in threads; ``calls`` lists what each rank entered, to see that none was alone."""

    def __init__(self, mesh):
        self.mesh = mesh
        self.calls = {rank: [] for rank in range(mesh.world)}
        self._rooms = {}
        self._lock = threading.Lock()

    def exchange(self, rank, group, what, value):
        axes = ("tp", "cp", "pp") if group == "cohort" else (group,)
        members = next(g for g in self.mesh.groups(*axes) if rank in g)
        self.calls[rank].append((what, group))
        with self._lock:
            room = self._rooms.setdefault((group, tuple(members)), (threading.Barrier(len(members)), {}))
        barrier, values = room
        values[rank] = value
        barrier.wait(DEADLINE)
        result = [values[member] for member in members]
        barrier.wait(DEADLINE)
        return result


class FakeComm:
    def __init__(self, world, rank):
        self.mesh, self.coords, self._world, self._rank = world.mesh, world.mesh.coords(rank), world, rank

    def minimum(self, values, group):
        return [int(min(v)) for v in zip(*self._world.exchange(self._rank, group, "minimum", values), strict=True)]

    def gather(self, value, group):
        return self._world.exchange(self._rank, group, "gather", value)

    def broadcast_object(self, value, group):
        return self._world.exchange(self._rank, group, "object", value)[0]

    def broadcast_bytes(self, tensor, group):
        source = self._world.exchange(self._rank, group, "bytes", tensor)[0]
        if source is not tensor:
            tensor.copy_(source)


class Meta:
    def __init__(self, size):
        self.size, self.global_indexes = size, list(range(size))


class FakeClient:
    """``ready_after``: polls that find nothing before the first that does."""

    def __init__(self, ready_after=0, get=None):
        self.polls, self.gets, self._ready_after = 0, 0, ready_after
        self._get = get or (lambda: to_tensordict(batch()))

    def get_meta(self, **asked):
        assert asked["sampling_config"]["batch_index"] == 0
        assert asked["partition_id"] == asked["sampling_config"]["partition_id"] == "train_3"
        self.polls += 1
        return Meta(4 if self.polls > self._ready_after else 0)

    def get_data(self, meta):
        assert meta.size == 4
        self.gets += 1
        return self._get()


def run(mesh, clients, per_rank, limit_s=DEADLINE):
    """Every rank fetches; returns what each got or raised, and the world."""
    world, results = World(mesh), {}

    def rank_main(rank):
        fetcher = Fetcher(clients[rank], FakeComm(world, rank), 4, per_rank, limit_s)
        try:
            results[rank] = fetcher.fetch(3)
        except Exception as exc:
            results[rank] = exc

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(mesh.world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE + 5)
    assert not any(thread.is_alive() for thread in threads), "a rank is alone in a collective"
    return results, world


def clients(mesh, **odd):
    return {rank: odd.get(f"rank{rank}", FakeClient()) for rank in range(mesh.world)}


def test_one_rank_fetches_and_all_of_the_mesh_hold_its_rows():
    mesh = Mesh(tp=2, cp=2, pp=2)
    asked = clients(mesh)
    results, _ = run(mesh, asked, per_rank=False)
    assert [asked[rank].gets for rank in range(8)] == [1, 0, 0, 0, 0, 0, 0, 0]
    first = results[0].rows
    for rank in range(8):
        rows = results[rank].rows
        assert [row["sample_indices"] for row in rows] == [0, 1, 14, 15]
        for mine, theirs in zip(rows, first, strict=True):
            assert torch.equal(mine["tokens"], theirs["tokens"])
            if theirs[MULTIMODAL] is None:
                assert mine[MULTIMODAL] is None
                continue
            assert list(mine[MULTIMODAL]) == list(theirs[MULTIMODAL])
            assert all(torch.equal(mine[MULTIMODAL][key], theirs[MULTIMODAL][key]) for key in theirs[MULTIMODAL])
    assert results[0].get_s > 0
    assert results[1].get_s == 0


def test_the_payload_goes_cp_then_tp_then_pp():
    mesh = Mesh(tp=2, cp=2, pp=2)
    _, world = run(mesh, clients(mesh), per_rank=False)
    hops = {
        rank: list(dict.fromkeys(group for what, group in world.calls[rank] if what == "bytes"))
        for rank in (0, 1, 2, 7)
    }
    assert hops == {0: ["cp", "tp", "pp"], 1: ["tp", "pp"], 2: ["cp", "tp", "pp"], 7: ["pp"]}


def test_per_rank_every_rank_fetches_and_nothing_is_broadcast():
    mesh = Mesh(tp=2)
    asked = clients(mesh)
    results, world = run(mesh, asked, per_rank=True)
    assert [asked[rank].gets for rank in (0, 1)] == [1, 1]
    assert not any(what in ("bytes", "object") for calls in world.calls.values() for what, _ in calls)
    assert [len(results[rank].rows) for rank in (0, 1)] == [4, 4]


def test_a_rank_that_sees_rows_later_holds_the_others_back():
    mesh = Mesh(tp=2)
    asked = clients(mesh, rank1=FakeClient(ready_after=3))
    results, world = run(mesh, asked, per_rank=True)
    assert (asked[0].polls, asked[1].polls) == (1, 4)
    assert world.calls[0] == world.calls[1]
    assert all(len(results[rank].rows) == 4 for rank in (0, 1))


def broken():
    raise ConnectionError("storage unit is gone")


@pytest.mark.parametrize("per_rank", [True, False])
def test_one_failed_get_fails_all_ranks_with_its_cause(per_rank):
    mesh = Mesh(tp=2, pp=2)
    asked = clients(mesh, rank0=FakeClient(get=broken))
    results, world = run(mesh, asked, per_rank)
    cause = "ConnectionError: storage unit is gone"
    other = f"another rank of this cohort failed to get rows of partition train_3: {cause}" if per_rank else cause
    for rank in range(4):
        assert isinstance(results[rank], TransferError)
        assert str(results[rank]) == f"fetch of partition train_3 failed: {other if rank else cause}"
        assert not any(what == "bytes" for what, _ in world.calls[rank])


def test_a_failed_poll_fails_all_ranks():
    mesh = Mesh(tp=2)
    client = FakeClient()
    client.get_meta = lambda **asked: broken()
    results, _ = run(mesh, clients(mesh, rank1=client), per_rank=True)
    cause = "ConnectionError: storage unit is gone"
    assert str(results[1]) == f"fetch of partition train_3 failed: {cause}"
    assert str(results[0]) == (
        f"fetch of partition train_3 failed: another rank of this cohort failed to ask for partition train_3: {cause}"
    )


@pytest.mark.parametrize("per_rank", [True, False])
def test_rows_that_never_come_end_in_a_sentence_on_all_ranks(monkeypatch, per_rank):
    monkeypatch.setattr(fetch, "POLL_SECONDS", 0.001)
    mesh = Mesh(tp=2)
    never = {f"rank{rank}": FakeClient(ready_after=10**9) for rank in range(2)}
    results, _ = run(mesh, clients(mesh, **never), per_rank, limit_s=0.05)
    for rank in (0, 1):
        assert isinstance(results[rank], TransferError)
        assert "partition train_3 was not complete within 0.05 s" in str(results[rank])


def test_describe_and_restore_are_inverse():
    entries = [{"b": torch.ones(2, 3), "a": torch.empty(0, 4)}, None, {}, {"c": torch.tensor(1)}]
    spec, tensors = describe_tensors(entries)
    assert [None if entry is None else [key for key, _, _ in entry] for entry in spec] == [["b", "a"], None, [], ["c"]]
    again = restore(spec, tensors)
    assert [None if e is None else list(e) for e in again] == [["b", "a"], None, [], ["c"]]
    assert again[0]["b"] is entries[0]["b"]
