"""The cohort as process groups: one rank and no groups here, four gloo ranks in ``tests/host/test_fanout_gloo.py``."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from relax_tq_rdma.fanout.cohort import GroupCohort
from relax_tq_rdma.fanout.lockstep import Lockstep


def test_a_rank_alone_needs_no_group() -> None:
    alone = GroupCohort([])
    assert alone.minimum([3, -1, True]) == [3, -1, 1]
    assert alone.gather("so") == ["so"]


class Pairs:
    """Two ranks as threads; every collective of ``torch.distributed`` that the cohort uses."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=10)
        self._sent: dict[int, torch.Tensor] = {}
        self.rank = threading.local()

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._sent[self.rank.number] = tensor.clone()
        self._barrier.wait()
        both = [self._sent[0], self._sent[1]]
        self._barrier.wait()
        return both

    def all_reduce(self, tensor: torch.Tensor, op: object, group: object) -> None:
        assert op == dist.ReduceOp.MIN
        tensor.copy_(torch.stack(self._exchange(tensor)).amin(0))

    def all_gather(self, out: list[torch.Tensor], tensor: torch.Tensor, group: object) -> None:
        for place, sent in zip(out, self._exchange(tensor), strict=True):
            place.copy_(sent)


@pytest.mark.parametrize("text", ["", "Bücher sind weg", "x" * 2000])
def test_least_values_and_texts_of_all(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    pairs = Pairs()
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    monkeypatch.setattr(dist, "all_reduce", pairs.all_reduce)
    monkeypatch.setattr(dist, "all_gather", pairs.all_gather)
    results: dict[int, tuple[list[int], list[str]]] = {}

    def main(rank: int) -> None:
        pairs.rank.number = rank
        cohort = GroupCohort(["row", "column"])
        results[rank] = cohort.minimum([rank, -rank]), cohort.gather(text if rank else "zero")

    threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert results[0] == results[1]
    assert results[0][0] == [0, -1]
    assert sorted(set(results[0][1])) == sorted({"zero", text[:512]})


def _on_a_gpu(rank: int, store: str, results: Any) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    cohort = GroupCohort([dist.group.WORLD])
    told = [rank, 1]

    def ask() -> Any:
        return SimpleNamespace(size=told.pop(0), extra_info={}, global_indexes=[7])

    agreed = Lockstep(cohort, 30.0).ask(ask, "p").global_indexes
    began = time.perf_counter()
    for _ in range(200):
        cohort.minimum([1, 2, 3, 4, 5])
    seconds = (time.perf_counter() - began) / 200
    results.put((rank, cohort.minimum([rank, -rank, 1 << 33]), cohort.gather(f"rank {rank}"), agreed, seconds))
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_nccl_the_ranks_agree_through_their_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    torch.multiprocessing.spawn(_on_a_gpu, (str(tmp_path / "store"), results), nprocs=2)
    both = sorted(results.get() for _ in range(2))
    for _, least, texts, agreed, _ in both:
        assert (least, texts, agreed) == ([0, -1, 1 << 33], ["rank 0", "rank 1"], [7])
    with capsys.disabled():
        print(f"one agreement: {1e6 * max(seconds for *_, seconds in both):.0f} us")
