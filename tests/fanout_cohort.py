"""Four trainer ranks of the stand-in host on gloo, in front of a producer that is slower than they are.

A script: it imports the host once, takes seam R3, forks the ranks and plays TransferQueue's controller for them, with a
real sampler. One JSON document goes to standard output, see :func:`main`.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
import traceback
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from tensordict import NonTensorStack, TensorDict
from transfer_queue import GRPOGroupNSampler
from transfer_queue.metadata import BatchMeta

from relax_tq_rdma import accounting
from relax_tq_rdma.demo.digest import combined, row_digest
from relax_tq_rdma.demo.mesh import Mesh
from relax_tq_rdma.seams.base import require
from relax_tq_rdma.seams.on_import import when_imported
from relax_tq_rdma.seams.relax_consumer import RelaxConsumer

WORLD, ROWS, TASK = 4, 4, "actor_train"
LOADED = "train_0"
FIELDS = ["tokens", "loss_masks", "total_lengths", "response_lengths", "multimodal_train_inputs"]
MESHES = {"2x1x2": Mesh(tp=2, cp=2), "2x2x1": Mesh(tp=2, pp=2)}
"""TP x PP x CP."""

LIMIT = timedelta(seconds=60)


# --- the producer, and the controller in front of it ------------------------------------------------------------------


class Controller:
    """Rows appear after a random number of questions; the sampler repeats for a rank what it gave another one."""

    def __init__(self, seed: int, most_questions: int) -> None:
        self._random = random.Random(seed)
        self._most_questions = most_questions
        self._sampler = GRPOGroupNSampler(n_samples_per_prompt=2)
        self._ready: list[int] = []
        self._produced = 0
        self._questions_to_go = self._random.randrange(most_questions)
        self.questions: dict[int, Counter[int]] = defaultdict(Counter)

    def answer(self, rank: int, dp_rank: int, batch_index: int) -> list[int]:
        config = {"dp_rank": dp_rank, "batch_index": batch_index, "partition_id": "p", "task_name": TASK}
        self.questions[batch_index][rank] += 1
        self._questions_to_go -= 1
        if self._questions_to_go < 0:
            self._ready += range(self._produced, self._produced + ROWS)
            self._produced += ROWS
            self._questions_to_go = self._random.randrange(self._most_questions)
        if len(self._ready) < ROWS and not self._sampler.has_cached_result("p", TASK, config):
            return []
        given, consumed = self._sampler(self._ready, ROWS, **config)
        self._ready = [index for index in self._ready if index not in consumed]
        return list(given)

    @property
    def contested(self) -> int:
        """Batches for which some ranks had to ask more often than others."""
        return sum(len(set(asked.values())) > 1 for asked in self.questions.values())


def serve(ranks: list[Connection]) -> dict[str, Any]:
    """Answer until every rank has sent its results or is gone."""
    controllers: dict[str, Controller] = {}
    results: dict[str, Any] = {}
    open_ends = {end: rank for rank, end in enumerate(ranks)}
    while open_ends:
        for end in wait(list(open_ends), timeout=LIMIT.total_seconds()) or sys.exit("the ranks are silent"):
            try:
                kind, *said = end.recv()
            except EOFError:
                del open_ends[end]
                continue
            if kind == "results":
                results[str(open_ends[end])] = said[0]
                continue
            partition, dp_rank, batch_index = said
            if partition not in controllers:
                # TransferQueue's own loader sleeps for a second after each poll in vain.
                controllers[partition] = Controller(len(controllers), 3 if partition == LOADED else 10)
            controller = controllers[partition]
            end.send(controller.answer(open_ends[end], dp_rank, batch_index))
    return {"ranks": results, "contested": {name: one.contested for name, one in controllers.items()}}


# --- one rank ---------------------------------------------------------------------------------------------------------


class Client:
    """TransferQueue's client: metadata from the controller, rows made from their index. It can be told to fail."""

    def __init__(self, controller: Connection, seed: int) -> None:
        self._controller = controller
        self._random = random.Random(seed)
        self.extra: dict[str, Any] = {}
        self.before_ask: Callable[[], None] = lambda: None
        self.before_get: Callable[[], None] = lambda: None

    def get_meta(self, *, partition_id: str, sampling_config: dict[str, Any], **asked: Any) -> BatchMeta:
        self.before_ask()
        if self._random.random() < 0.3:
            time.sleep(self._random.random() / 1000)
        self._controller.send(("ask", partition_id, sampling_config["dp_rank"], sampling_config["batch_index"]))
        indexes = self._controller.recv()
        return BatchMeta(indexes, [partition_id] * len(indexes), extra_info=self.extra)

    def get_data(self, metadata: BatchMeta) -> TensorDict:
        self.before_get()
        rows = [make_row(index) for index in metadata.global_indexes]
        columns = {name: [row[name] for row in rows] for name in FIELDS}
        tensors = {
            name: torch.nested.as_nested_tensor(values, layout=torch.jagged)
            if name in ("tokens", "loss_masks")
            else torch.tensor(values)
            for name, values in columns.items()
            if name != FIELDS[-1]
        }
        return TensorDict({**tensors, FIELDS[-1]: NonTensorStack(*columns[FIELDS[-1]])}, batch_size=len(rows))


def make_row(index: int) -> dict[str, Any]:
    made = torch.Generator().manual_seed(index)
    length = 3 + index % 5
    media = None
    if index % 3:
        media = {
            "pixel_values": torch.rand(4 * length, 6, generator=made).to(torch.bfloat16),
            "image_grid_thw": torch.tensor([[1, length, index]]),
            "none_left": torch.empty(0, 4),
            "frames": [torch.rand(2, generator=made), torch.rand(3, generator=made)],
            "second_per_grid_ts": [0.5, float(index)],
        }
    return {
        "tokens": torch.randint(256, (length,), generator=made),
        "loss_masks": torch.ones(2, dtype=torch.int64),
        "total_lengths": length,
        "response_lengths": 2,
        "multimodal_train_inputs": media,
    }


class Rank:
    """``job``: arguments of a job; without ``tq_`` flags it does not use the plugin."""

    def __init__(self, rank: int, controller: Connection) -> None:
        from megatron.core import mpu
        from relax.backends.megatron import actor
        from relax.utils.data import stream_dataloader

        self.rank, self.client = rank, Client(controller, rank)
        self._mpu, self._actor, self._stream = mpu, actor, stream_dataloader

    def fetch(self, path: str, job: Namespace, partition: str, batch_index: int) -> tuple[Any, Any]:
        """As the host's batch path calls it, under the name it has imported, or as its streams do."""
        if path == "batch":
            return self._actor.get_data_from_transfer_queue(
                job,
                self.client,
                FIELDS,
                ROWS,
                partition,
                TASK,
                {"dp_rank": 0, "task_name": TASK},
                batch_index,
                broadcast_pp=self._mpu.get_pipeline_model_parallel_world_size() > 1,
                per_rank_fetch=job.per_rank_fetch,
            )
        return self._stream.get_data_from_transfer_queue(
            args=job,
            tq_client=self.client,
            data_fields=FIELDS,
            batch_size=ROWS,
            partition_id=partition,
            task_name=TASK,
            sampling_config={"dp_rank": 0, "task_name": TASK},
            batch_index=batch_index,
            broadcast_pp=False,
            token_budget=None,
        )

    def take(self, path: str, job: Namespace, partition: str, batches: int) -> dict[str, Any]:
        """Fetch batches as a trainer does: poll, and go on when there are rows.

        After each poll those that must go on together compare what they have. ``splits``: how often some had rows and
        some had not, where the host would have hung.
        """
        groups = [self._mpu.get_tensor_and_context_parallel_group()]
        if path == "batch":
            groups.append(self._mpu.get_pipeline_model_parallel_group())
        splits, digests = 0, []
        for batch_index in range(batches):
            data = None
            while True:
                if data is None:
                    data, _ = self.fetch(path, job, partition, batch_index)
                tally = torch.tensor([data is not None, data is None], dtype=torch.int64)
                for group in groups:
                    dist.all_reduce(tally, group=group)
                splits += bool(tally.all())
                if not tally[1]:
                    break
            rows = [{name: values[i] for name, values in data.items()} for i in range(ROWS)]
            digests.append(combined(map(row_digest, rows)))
        return {"splits": splits, "digests": digests}

    def load(self, job: Namespace, batches: int) -> list[str]:
        """Digests of batches that come by the host's loader, micro-batch by micro-batch."""
        (loader,), _ = self._stream.create_stream_dataloader(job, 0, TASK, FIELDS, 0)
        loader.dataset._tq_client = self.client
        rows = []
        for data, meta in loader:
            rows += [{name: values[i] for name, values in data.items()} for i in range(meta.size)]
            if len(rows) == batches * ROWS:
                break
        return [combined(map(row_digest, rows[i : i + ROWS])) for i in range(0, len(rows), ROWS)]

    def try_to_take(self, job: Namespace, partition: str) -> str:
        try:
            self.take("batch", job, partition, 1)
        except Exception as exc:
            return f"{type(exc).__name__}: {exc}"
        return "took it"


def job(**flags: Any) -> Namespace:
    return Namespace(**{"fully_async": True, "per_rank_fetch": False, **flags})


PER_RANK = {"tq_per_rank_fetch": "on", "dataplane_accounting": "summary"}
BROADCAST = {"tq_per_rank_fetch": "off", "dataplane_accounting": "summary"}


def rank_main(rank: int, controller: Connection, store: str, interleavings: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=LIMIT)
    accounting.configure("summary", job=f"cohort-{os.getppid()}", sink=lambda line: None)
    me, done = Rank(rank, controller), {}
    for shape, mesh in MESHES.items():
        me._mpu.initialize_model_parallel(mesh, rank, LIMIT)
        for path in ("batch", "stream"):
            done[f"{shape} {path} broadcast"] = me.take(path, job(**BROADCAST), f"{shape} {path} b", 10)
            done[f"{shape} {path} per rank"] = me.take(path, job(**PER_RANK), f"{shape} {path} p", interleavings // 4)
        if shape == "2x1x2":
            done["without the plugin"] = me.take("batch", job(per_rank_fetch=True), "host", 100)
            sizes = {"micro_batch_size": 2, "n_samples_per_prompt": 2, "rollout_batch_size": 2, "global_batch_size": 4}
            done["loader"] = me.load(job(**PER_RANK, **sizes, tq_config=None), 3)
            done["kinds"] = kinds_of_nothing(me)
            done["failures"] = failures(me)
        dist.barrier()
        me._mpu.destroy_model_parallel()
    ledger = accounting.ledger()
    assert ledger is not None
    timed = {labels[0]: h.count for (name, labels), h in ledger.totals().histograms.items() if "fanout" in name}
    done["fanout_seconds"] = timed
    accounting.configure("off")
    me._mpu.initialize_model_parallel(MESHES["2x1x2"], rank, LIMIT)
    if rank == 3:
        me.client.before_get = lambda: os._exit(0)
    done["a rank died"] = me.try_to_take(job(**PER_RANK), "death")
    controller.send(("results", done))


def kinds_of_nothing(me: Rank) -> list[Any]:
    """Rank 1 is told of a dummy round only when it asks for the second time; what all of them act on in the end."""
    asked = 0

    def tell_later() -> None:
        nonlocal asked
        asked += 1
        me.client.extra = {"dummy_round": me.rank != 1 or asked > 1}

    me.client.before_ask = tell_later
    me.client._controller, controller = SimpleNamespace(send=lambda said: None, recv=lambda: []), me.client._controller
    _, meta = me.fetch("stream", job(**PER_RANK), "nothing", 0)
    me.client._controller, me.client.before_ask, me.client.extra = controller, lambda: None, {}
    return [asked, None if meta is None else meta.extra_info]


def failures(me: Rank) -> dict[str, str]:
    def fail() -> None:
        raise OSError(f"storage is gone for rank {me.rank}")

    said = {}
    for name, hook, culprit in (("ask", "before_ask", 1), ("get", "before_get", 2)):
        if me.rank == culprit:
            setattr(me.client, hook, fail)
        said[name] = me.try_to_take(job(**PER_RANK), f"failing {name}")
        setattr(me.client, hook, lambda: None)
    return said


def main() -> None:
    """``{"ranks": {rank: {scenario: ...}}, "contested": {partition: batches}}``; argument: number of interleavings."""
    seam = RelaxConsumer()
    require([seam])
    for name in seam.modules:
        when_imported(name, seam.apply)
    import relax.backends.megatron.actor  # noqa: F401 (once, for all ranks)

    ends = [Pipe() for _ in range(WORLD)]
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(WORLD):
            child = os.fork()
            if child == 0:
                for other, (server, mine) in enumerate(ends):
                    server.close()
                    if other != rank:
                        mine.close()
                code = 1
                try:
                    rank_main(rank, ends[rank][1], f"{folder}/store", int(sys.argv[1]))
                    code = 0
                except Exception:
                    traceback.print_exc()
                finally:
                    os._exit(code)
            children.append(child)
        for _, theirs in ends:
            theirs.close()
        print(json.dumps(serve([server for server, _ in ends])))
        for child in children:
            os.waitpid(child, 0)


if __name__ == "__main__":
    main()
