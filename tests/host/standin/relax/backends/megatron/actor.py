"""One rank: fetches its rows as the mode of the job demands, and takes one optimiser step a rollout.

The host takes ``rollout_batch_size * n_samples_per_prompt / global_batch_size`` steps a rollout. Which rows would go
into which of them depends on what is ready first; one step over all rows does not, and can be compared bit by bit.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import transfer_queue as tq
from megatron.core import mpu
from tensordict import TensorDict

from relax.backends.megatron.data import DataIterator, get_batch, rows_of
from relax.distributed.ray.train_actor import TrainRayActor
from relax.standin import checkpoint, record
from relax.standin.line import NEW
from relax.utils.async_utils import run
from relax.utils.data.stream_dataloader import (
    StreamingTQIterator,
    create_stream_dataloader,
    get_data_from_transfer_queue,
)
from relax.utils.misc import load_function
from relax.utils.timer import Timer, timer, with_defer
from relax.utils.training.data_fields import build_data_fields
from relax.utils.training.train_metric_utils import log_perf_data_raw
from relax.utils.utils import dict_to_tensordict, merge_dict_list, process_args
from relax_tq_rdma.demo import model
from relax_tq_rdma.demo.comm import Comm
from relax_tq_rdma.demo.digest import row_digest
from relax_tq_rdma.demo.learner import Learner

MULTIMODAL = "multimodal_train_inputs"
EMPTY_POLL_SECONDS = 0.05


class MegatronTrainRayActor(TrainRayActor):
    def init(
        self,
        args: Namespace,
        role: str,
        with_ref: bool = False,
        with_opd_teacher: bool = False,
        *,
        port: int = 0,
    ) -> int | None:
        with timer("init_actor"):
            return self._init(args, role, with_ref, with_opd_teacher, port=port)

    @with_defer(lambda: Timer().start("train_wait"))
    def _init(
        self, args: Namespace, role: str, with_ref: bool = False, with_opd_teacher: bool = False, *, port: int = 0
    ) -> int | None:
        process_args(args, role)
        super().init(args, role, with_ref, with_opd_teacher, port=port)
        tq.init(args.tq_config)
        self.data_system_client = tq.get_client()
        record.write(args, "process", role=role, rank=self._rank)
        self.learner = Learner(Comm(self.mesh, self._rank, timedelta(seconds=args.standin_wait_seconds)), args.seed)
        if args.load:
            checkpoint.load(args, self._rank, self.learner)
        elif args.save:
            checkpoint.save(args, self._rank, 0, self.learner)
        self.before_train_step = load_function(args.custom_megatron_before_train_step_hook_path)
        return args.start_rollout_id

    # --- training: one method a mode ----------------------------------------------------------------------------------

    def train(self, rollout_id: int) -> dict[str, Any]:
        """Colocate: the whole rollout, once it is complete."""
        rows = self.args.rollout_batch_size * self.args.n_samples_per_prompt // self.mesh.dp
        batches = self._fetch_all("train", rollout_id, build_data_fields(self.args), rows, 1)
        return self._train(rollout_id, [batch for batch, _ in batches])

    def train_hybrid(self, rollout_id: int) -> dict[str, Any]:
        """Hybrid: the rollout in parts, as they become ready."""
        parts = self._parts()
        rows = self.args.rollout_batch_size * self.args.n_samples_per_prompt // self.mesh.dp // parts
        batches = self._fetch_all("train", rollout_id, build_data_fields(self.args), rows, parts)
        merged = merge_dict_list([batch for batch, _ in batches])
        return self._train(rollout_id, [merged])

    def train_async(self, rollout_id: int, **_: Any) -> dict[str, Any]:
        """Fully async: micro-batches as they come."""
        fields = [*build_data_fields(self.args), "advantages", "returns"]
        if not self.args.true_on_policy_mode:
            fields.append("log_probs")
        received = _Digests()
        rows: list[dict[str, Any]] = []
        if self.args.use_dynamic_batch_size:
            with timer("train_get_data"):
                for batch in _packed(received.over(self._stream(rollout_id, fields)), fields):
                    rows.extend(rows_of(batch))
        else:
            loaders, counts = create_stream_dataloader(
                self.args, rollout_id, "actor_train", fields, mpu.get_data_parallel_rank()
            )
            with timer("train_get_data"):
                source = received.over(iter(loaders[0]))
                for _i in range(sum(counts)):
                    rows.extend(rows_of(get_batch(source, fields)))
        for row in rows:
            row["rewards"] = float(row["advantages"][0])
            if "log_probs" in row:
                row["rollout_log_probs"] = row["log_probs"]
        return self._step(rollout_id, rows, received)

    def compute_actor_log_prob(self, rollout_id: int) -> None:
        """Role ``actor_fwd``: a column of its own for every row of the rollout."""
        fields = ["tokens", "total_lengths", "response_lengths", "loss_masks", "sample_indices"]
        if self.args.multimodal_keys is not None:
            fields.append(MULTIMODAL)
        rows = self.args.rollout_batch_size * self.args.n_samples_per_prompt
        each = rows // self._parts()
        for batch, meta in self._fetch_all("actor_log_probs", rollout_id, fields, each, rows // each):
            log_probs = [self._log_probs(row) for row in rows_of(get_batch(DataIterator(batch), fields))]
            self._put_data_to_transfer_queue({"log_probs": log_probs}, meta)

    # --- data system --------------------------------------------------------------------------------------------------

    if NEW:

        def _get_data_from_transfer_queue(
            self,
            task_name: str,
            rollout_id: int,
            data_fields: list[str],
            batch_size: int,
            batch_index: int,
            partition_id: str | None = None,
            prefetched_fetch: Any = None,
        ) -> tuple[dict[str, Any] | None, Any]:
            return self._get_data(task_name, rollout_id, data_fields, batch_size, batch_index, partition_id)

    else:

        def _get_data_from_transfer_queue(
            self,
            task_name: str,
            rollout_id: int,
            data_fields: list[str],
            batch_size: int,
            batch_index: int,
            partition_id: str | None = None,
        ) -> tuple[dict[str, Any] | None, Any]:
            return self._get_data(task_name, rollout_id, data_fields, batch_size, batch_index, partition_id)

    def _get_data(
        self, task_name: str, rollout_id: int, data_fields: list[str], batch_size: int, batch_index: int, partition: Any
    ) -> tuple[dict[str, Any] | None, Any]:
        return get_data_from_transfer_queue(
            self.args,
            self.data_system_client,
            data_fields,
            batch_size,
            partition or f"train_{rollout_id}",
            task_name,
            {
                "dp_rank": mpu.get_data_parallel_rank(with_context_parallel=False),
                "dp_size": self.mesh.dp,
                "task_name": task_name,
            },
            batch_index,
            broadcast_pp=mpu.get_pipeline_model_parallel_world_size() > 1,
            per_rank_fetch=self.args.per_rank_fetch and "rollout_routed_experts" not in data_fields,
        )

    def _put_data_to_transfer_queue(
        self, output_dict: dict[str, Any] | None = None, batch_meta: Any = None, rollout_data: Any = None
    ) -> None:
        """Write columns back to the rows they were computed from."""
        first = mpu.get_tensor_model_parallel_rank() == 0 and mpu.get_context_parallel_rank() == 0
        if first and mpu.is_pipeline_last_stage():
            data: TensorDict = dict_to_tensordict(output_dict, batch_size=batch_meta.size)
            run(self.data_system_client.async_put(data=data, metadata=batch_meta))

    def all_consumed(self, task_name: str, rollout_id: int, **_: Any) -> bool:
        """Asked by the first rank of the cohort alone, so that all agree."""
        status = torch.zeros(1)
        if not (
            mpu.get_tensor_model_parallel_rank()
            or mpu.get_pipeline_model_parallel_rank()
            or mpu.get_context_parallel_rank()
        ):
            partition = f"train_{rollout_id}"
            status += run(self.data_system_client.async_check_consumption_status(task_name, partition))
        for group in (
            mpu.get_context_parallel_group(),
            mpu.get_tensor_model_parallel_group(),
            mpu.get_pipeline_model_parallel_group(),
        ):
            dist.broadcast(status, src=dist.get_process_group_ranks(group)[0], group=group)
        return bool(status.item())

    def all_consumed_streaming(self, task_name: str, rollout_id: int) -> bool:
        return self.all_consumed(task_name, rollout_id)

    def _fetch_all(
        self, task: str, rollout_id: int, fields: list[str], batch_size: int, batches: int
    ) -> list[tuple[dict[str, Any], Any]]:
        fetched: list[tuple[dict[str, Any], Any]] = []
        ends = time.monotonic() + self.args.standin_wait_seconds
        while len(fetched) < batches:
            with timer("train_get_data"):
                data, meta = self._get_data_from_transfer_queue(task, rollout_id, fields, batch_size, len(fetched))
            if data is not None:
                fetched.append((data, meta))
                continue
            if time.monotonic() > ends:
                raise RuntimeError(f"{task}: partition train_{rollout_id} was not complete in time")
            time.sleep(EMPTY_POLL_SECONDS)
        return fetched

    def _stream(self, rollout_id: int, fields: list[str]) -> StreamingTQIterator:
        rows = self.args.rollout_batch_size * self.args.n_samples_per_prompt // self.mesh.dp
        quota = {"window_quota": rows} if NEW else {"max_samples": rows}
        return StreamingTQIterator(
            self.args,
            self.data_system_client,
            fields,
            rollout_id,
            self.args.max_tokens_per_gpu,
            None,
            self.all_consumed_streaming,
            mpu.get_data_parallel_rank(),
            self.mesh.dp,
            **quota,
        )

    def _parts(self) -> int:
        rows = self.args.rollout_batch_size * self.args.n_samples_per_prompt
        return rows // self.args.global_batch_size * self.args.num_iters_per_train_update

    # --- model --------------------------------------------------------------------------------------------------------

    def _train(self, rollout_id: int, batches: list[dict[str, Any]]) -> dict[str, Any]:
        received = _Digests()
        rows: list[dict[str, Any]] = []
        for batch in batches:
            received.add(batch)
            keys = list(batch)
            for packed in _packed(DataIterator(batch, self.args.micro_batch_size), keys):
                rows.extend(rows_of(packed))
        return self._step(rollout_id, rows, received)

    def _step(self, rollout_id: int, rows: list[dict[str, Any]], received: _Digests) -> dict[str, Any]:
        if self.before_train_step is not None:
            self.before_train_step(self.args, rollout_id, self._rank)
        rows.sort(key=lambda row: int(row["sample_indices"]))
        with timer("actor_train"):
            loss = self.learner.step(rows)
        if self.args.save:
            checkpoint.save(self.args, self._rank, rollout_id + 1, self.learner)
        log_perf_data_raw(rollout_id, self.args, is_primary_rank=self._rank == 0)
        return {
            "loss": loss,
            "grad_norm": self.learner.gradient_norm,
            "reward": sum(float(row["raw_reward"]) for row in rows),
            "digests": received.rows,
            "weights": self.weights(),
        }

    def weights(self, step: int | None = None) -> model.Weights:
        """Of this rank, as they are or as they were before ``step``."""
        if step is not None and step != self.args.start_rollout_id:
            return checkpoint.weights(self.args, self._rank, step)
        return {name: weight.detach().clone() for name, weight in self.learner.weights.items()}

    def set_weights(self, weights: model.Weights) -> None:
        """The whole model, for roles that run on one rank."""
        with torch.no_grad():
            for name, weight in self.learner.weights.items():
                weight.copy_(weights[name])

    def _log_probs(self, row: dict[str, Any]) -> torch.Tensor:
        prompt, response = row["tokens"][: -row["response_lengths"]], row["tokens"][-row["response_lengths"] :]
        with torch.no_grad():
            inputs = model.make_inputs(prompt, row[MULTIMODAL])
            logits = model.forward(self.learner.weights, range(model.LAYERS), inputs, None, _alone, _alone)
        log_probs = torch.log_softmax(logits[: len(response)], dim=-1)
        return log_probs.gather(1, (response - ord("0"))[:, None])[:, 0]


class _Digests:
    """Of every row as this rank received it: sample index to digests of its text columns and of its pixels."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[bytes, bytes]] = {}

    def add(self, batch: dict[str, Any]) -> None:
        for i, index in enumerate(batch["sample_indices"]):
            text = {name: values[i] for name, values in batch.items() if name != MULTIMODAL}
            media = batch[MULTIMODAL][i] if batch.get(MULTIMODAL) is not None else None
            self.rows[int(index)] = row_digest(text), row_digest({MULTIMODAL: media})

    def over(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for batch, meta in iterator:
            self.add(batch)
            yield batch, meta


def _packed(source: Any, keys: list[str]) -> Iterator[dict[str, Any]]:
    while True:
        try:
            yield get_batch(source, keys)
        except StopIteration:
            return


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
