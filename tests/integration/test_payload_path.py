"""L2 and L3b in a real job: both backends, groups that samplers split over ranks, raw rows beside encoded ones."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
from transfer_queue import GRPOGroupNSampler, SequentialSampler
from transfer_queue.sampler.seqlen_balanced_sampler import SeqlenBalancedSampler

import relax_tq_rdma
from relax_tq_rdma import Settings
from relax_tq_rdma.payload import StaleReferenceError
from tests.payload_cases import same

pytestmark = [pytest.mark.integration, pytest.mark.timeout(170)]

FIELD = "multimodal_train_inputs"
SIMPLE: dict[str, Any] = {}
MOONCAKE: dict[str, Any] = {
    "storage_backend": "mooncake",
    "mooncake_auto_init": "job-owned",
    "fallback_backend": "none",
}
BACKENDS = {"simple": SIMPLE, "mooncake": MOONCAKE}
GROUP, PROMPTS = 4, 4
PIXELS = 50_000  # 200 kB a picture: far above what headers cost


@pytest.fixture(scope="module")
def cluster(ray_cluster: Any) -> Any:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this file
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RTQ_SEGMENT_MB", "256")
        made = ray_cluster([{"RTQ_SEGMENT_MB": "256"}], cpus=4)
        patch.setattr(sys.modules[__name__], "RANKS", [Rank.remote() for _ in range(2)])
        yield made


@dataclass(frozen=True)
class Job:
    """What a job runs with. ``rows``: of one batch of one rank; ``ranks``: their sampling configs."""

    backend: str
    sampler: Callable[[], Any]
    rows: int
    ranks: tuple[dict[str, int], ...]
    layers: tuple[str, ...] = ("dedup_multimodal",)


SEQUENTIAL = [pytest.param(Job(backend, SequentialSampler, 2, ({}, {})), id=backend) for backend in BACKENDS]
GROUPED = [
    pytest.param(Job(backend, lambda: GRPOGroupNSampler(n_samples_per_prompt=GROUP), 4, ({}, {})), id=f"{backend}-grpo")
    for backend in BACKENDS
]
BALANCED = [
    pytest.param(
        Job(
            backend,
            lambda: SeqlenBalancedSampler(n_samples_per_prompt=GROUP, dp_size=2),
            4,
            ({"dp_rank": 0}, {"dp_rank": 1}),
            ("dedup_multimodal", "dedup_share_view"),
        ),
        id=f"{backend}-seqlen-share",
    )
    for backend in BACKENDS
]


@pytest.fixture(scope="module")
def job(request: pytest.FixtureRequest, cluster: Any) -> Iterator[Job]:
    """A running job: driver, controller, store, and the ranks attached. Tests share it, each with its partitions."""
    found: Job = request.param
    layers = dict.fromkeys((*found.layers, "normalize_multimodal"), True)
    settings = {**BACKENDS[found.backend], "accounting": "summary", "init_timeout_seconds": 90, **layers}
    relax_tq_rdma.install(Settings(**settings))
    conf = OmegaConf.create(
        {
            "controller": {"polling_mode": True, "sampler": found.sampler()},
            "backend": {"SimpleStorage": {"num_data_storage_units": 2}},
        },
        flags={"allow_objects": True},
    )
    stored = tq.init(conf=conf)
    ray.get([rank.attach.remote(stored) for rank in RANKS])
    yield found
    ray.get([rank.close.remote() for rank in RANKS])
    tq.close()
    relax_tq_rdma.uninstall()


@ray.remote(num_cpus=0)
class Rank:
    """One data-parallel rank; it lives longer than a job."""

    def attach(self, conf: Any) -> None:
        import relax_tq_rdma

        relax_tq_rdma.install()
        tq.init(conf)

    def read(self, partition: str, rows: int, **sampling: Any) -> list[tuple[int, int, Any]]:
        """(prompt, member, payload) of each row of the next batch; empty when there is none."""
        client = tq.get_client()
        meta = client.get_meta(
            data_fields=[FIELD, "who"],
            batch_size=rows,
            partition_id=partition,
            task_name="train",
            sampling_config=sampling,
        )
        if not meta.size:
            return []
        data = client.get_data(meta)
        return [(*who.tolist(), row) for who, row in zip(data["who"].unbind(), data[FIELD].tolist(), strict=True)]

    def read_rows(self, partition: str, wanted: list[tuple[int, int]]) -> list[Any]:
        """Payloads of the rows that ``who`` names so, in the asked order."""
        client = tq.get_client()
        meta = client.get_meta(["who"], batch_size=10_000, partition_id=partition, task_name="x", mode="force_fetch")
        who = [tuple(row.tolist()) for row in client.get_data(meta)["who"].unbind()]
        meta = client.get_meta([FIELD], batch_size=10_000, partition_id=partition, task_name="x", mode="force_fetch")
        return client.get_data(meta.select_samples([who.index(one) for one in wanted]))[FIELD].tolist()

    def moved(self, partition: str) -> tuple[int, int]:
        """Bytes read from the store for the field, and bytes saved."""
        from relax_tq_rdma import accounting

        summary = accounting.ledger().step(partition)
        return summary.get.wire_bytes, summary.get.saved_bytes

    def close(self) -> None:
        tq.close()


RANKS: list[Any] = []


def picture(seed: int) -> dict[str, Any]:
    made = torch.Generator().manual_seed(seed)
    return {"pixel_values": torch.rand(PIXELS, generator=made), "image_grid_thw": torch.tensor([[1, 4, seed]])}


def put_groups(partition: str, base: int = 0) -> None:
    """PROMPTS groups of GROUP deep copies each, in one put."""
    who = [(prompt, member) for prompt in range(PROMPTS) for member in range(GROUP)]
    originals = [picture(base + prompt) for prompt in range(PROMPTS)]
    data = TensorDict(
        {
            "who": torch.tensor(who),
            FIELD: NonTensorStack(*[copy.deepcopy(originals[prompt]) for prompt, _ in who]),
        },
        batch_size=len(who),
    )
    client = tq.get_client()
    meta = client.put(data, partition_id=partition)
    meta.update_custom_meta([{"total_lengths": 10 + prompt * 7 + member} for prompt, member in who])
    client.set_custom_meta(meta)


def stored_size() -> int:
    return PIXELS * 4 + 24


@pytest.mark.parametrize("job", [*SEQUENTIAL, GROUPED[1], BALANCED[0]], indirect=True)
def test_groups_that_samplers_hand_out_come_out_whole(job: Job) -> None:
    put_groups("train_0")
    seen: list[tuple[int, int]] = []
    batches: list[set[int]] = []
    for batch_index in range(10):
        asked = [
            rank.read.remote("train_0", job.rows, batch_index=batch_index, **config)
            for rank, config in zip(RANKS, job.ranks, strict=True)
        ]
        found = ray.get(asked)
        for got in found:
            assert all(same(row, picture(prompt)) for prompt, _, row in got)
            seen += [(prompt, member) for prompt, member, _ in got]
            batches.append({prompt for prompt, _, _ in got})
        if not any(found):
            break
    assert sorted(seen) == sorted((p, m) for p in range(PROMPTS) for m in range(GROUP))
    if job.sampler is SequentialSampler:
        assert any(sum(p in batch for batch in batches) > 1 for p in range(PROMPTS)), "no group was split"
    for rank in RANKS:
        wire, saved = ray.get(rank.moved.remote("train_0"))
        # Each source at most once in a process, as itself or by reference; the rest is headers.
        assert wire < PROMPTS * stored_size() + PROMPTS * GROUP * 1024
        assert saved > 0


@pytest.mark.parametrize("job", SEQUENTIAL, indirect=True)
def test_each_source_crosses_once_for_a_rank_and_a_new_step_means_new_rows(job: Job) -> None:
    rank = RANKS[0]
    put_groups("once")
    for members in ([(0, 1), (1, 2)], [(0, 2), (1, 3)], [(3, 1), (0, 3), (1, 1)]):  # never a first member
        got = ray.get(rank.read_rows.remote("once", members))
        assert all(same(row, picture(prompt)) for row, (prompt, _) in zip(got, members, strict=True))
    wire, saved = ray.get(rank.moved.remote("once"))
    assert 3 * stored_size() < wire < 3 * stored_size() + 7 * 1024
    assert saved == 7 * stored_size() - 3 * stored_size()
    tq.get_client().clear_partition("once")  # the next step gets the same indexes for other pictures
    put_groups("after", base=100)
    got = ray.get(rank.read_rows.remote("after", [(0, 1), (0, 0), (3, 3)]))
    assert all(same(row, picture(seed)) for row, seed in zip(got, (100, 100, 103), strict=True))


@pytest.mark.parametrize("job", SEQUENTIAL, indirect=True)
def test_a_source_that_was_cleared_is_a_loud_error(job: Job) -> None:
    put_groups("stale", base=200)
    client = tq.get_client()
    meta = client.get_meta([FIELD, "who"], batch_size=10_000, partition_id="stale", mode="force_fetch")
    first = [row.tolist() for row in client.get_data(meta)["who"].unbind()].index([2, 0])
    client.clear_samples(meta.select_samples([first]))
    with pytest.raises(StaleReferenceError, match=r"reference is stale: at global index \d+ nothing encoded is there"):
        ray.get(RANKS[1].read_rows.remote("stale", [(2, 3)]))
    assert same(ray.get(RANKS[1].read_rows.remote("stale", [(3, 3)])), [picture(203)])


@pytest.mark.parametrize("job", SEQUENTIAL, indirect=True)
def test_raw_and_encoded_rows_mix_in_a_batch_a_partition_and_over_partitions(job: Job) -> None:
    stays = {"pixel_values": torch.ones(7), "why": 1j}
    puts = [[stays, picture(1)], [picture(2), stays], [stays, stays], [None, picture(3)], [picture(4), {}], [stays]]
    for number, values in enumerate(puts):
        who = torch.tensor([(number, place) for place in range(len(values))])
        data = TensorDict({"who": who, FIELD: NonTensorStack(*values)}, batch_size=len(values))
        tq.get_client().put(data, partition_id="mix")
    order = [(5, 0), (1, 1), (4, 1), (0, 0), (4, 0), (0, 1), (3, 1), (1, 0), (3, 0), (2, 0), (2, 1)]
    got = ray.get(RANKS[0].read_rows.remote("mix", order))
    assert [same(row, puts[number][place]) for row, (number, place) in zip(got, order, strict=True)] == [True] * 11


@pytest.mark.parametrize("job", SEQUENTIAL, indirect=True)
def test_puts_at_the_same_time_keep_their_own_sources(job: Job) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: put_groups(f"many_{n}", 10 * n), range(4)))
    for n in range(4):
        members = [(1, 3), (1, 1), (0, 0), (3, 2)]
        got = ray.get(RANKS[0].read_rows.remote(f"many_{n}", members))
        assert all(same(row, picture(10 * n + prompt)) for row, (prompt, _) in zip(got, members, strict=True))
