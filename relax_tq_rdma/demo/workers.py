"""The job's Ray actors, one rollout and the trainer ranks, and how the driver waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relax_tq_rdma.demo import model
from relax_tq_rdma.demo.options import Options
from relax_tq_rdma.demo.rollout import Produced, Rollout
from relax_tq_rdma.demo.trainer import Trained, Trainer
from relax_tq_rdma.errors import DataplaneError, TransferError
from relax_tq_rdma.settings import Settings
from relax_tq_rdma.transport import gcs

START_SECONDS = 180.0
"""Importing torch and transformers in every process of a busy two-core machine takes its time."""

LEAVE_SECONDS = 5.0
ROWS_SECONDS = 300.0
STEP_SECONDS = ROWS_SECONDS + 120.0


class Workers:
    """Unnamed actors without a CPU reservation: they die with the driver, whatever ends it."""

    def __init__(self, options: Options, settings: Settings) -> None:
        import ray

        self._options = options
        self._with_plugin = not settings.touches_nothing
        self._connected = False
        self._rollout = (
            ray.remote(Rollout)
            .options(num_cpus=0, max_concurrency=1)  # it works ahead, but on one step at a time
            .remote(
                options.seed,
                options.prompts,
                options.samples_per_prompt,
                options.image_max_tokens,
                settings.group_share_processor,
            )
        )
        self._prepared = self._rollout.prepare.remote()  # seconds of imports, while the ranks start
        trainer = ray.remote(Trainer).options(num_cpus=0)
        self._trainers = [
            trainer.remote(rank, options.mesh, options.seed, ROWS_SECONDS) for rank in range(options.mesh.world)
        ]

    def connect(self, tq_config: Any, per_rank: bool) -> None:
        """Attach every actor to the data system and form the cohort's process groups."""
        batch_size = self._options.rows_per_step // self._options.mesh.dp
        address, port = self._get([self._trainers[0].open_store.remote()], "the rendezvous of the trainer ranks")[0]
        joins = [
            trainer.join.remote(address, port, tq_config, self._with_plugin, batch_size, per_rank)
            for trainer in self._trainers
        ]
        self._connected = True
        connect = self._rollout.connect.remote(tq_config, self._with_plugin)
        self._get([self._prepared, connect, *joins], "the start of the actors")

    def produce(self, step: int, weights: model.Weights) -> Any:
        """Start a rollout; returns its future."""
        return self._rollout.produce.remote(step, weights)

    def train(self, step: int, rollouts: Sequence[Any]) -> list[Trained]:
        """Train one step on all ranks.

        ``rollouts`` are the futures of rollouts under way: when one fails, so does this, at once, instead of waiting
        for rows that never come.
        """
        ranks = [trainer.train.remote(step) for trainer in self._trainers]
        self._wait(ranks, list(rollouts), f"training step {step}")
        return self._get(ranks, f"training step {step}")

    def produced(self, rollout: Any) -> Produced:
        """Result of a rollout whose rows have been trained on."""
        result: Produced = self._get([rollout], "a rollout")[0]
        return result

    def stop(self) -> None:
        """End all actors. With the plugin each closes its client first, so that its storage segment is given back at
        once; one that is stuck (in a collective, say) is ended without."""
        import ray

        if gcs.why_silent():
            return  # actors end with their Ray
        actors = (self._rollout, *self._trainers)
        if self._with_plugin and self._connected:
            ray.wait([actor.leave.remote() for actor in actors], num_returns=len(actors), timeout=LEAVE_SECONDS)
        for actor in actors:
            ray.kill(actor)

    def _wait(self, needed: list[Any], watched: list[Any], what: str) -> None:
        import ray

        pending = [*needed, *watched]
        while any(future in pending for future in needed):
            done, pending = ray.wait(pending, num_returns=1, timeout=STEP_SECONDS)
            if not done:
                raise TransferError(f"{what} did not end within {STEP_SECONDS:g} s")
            self._get(done, what if done[0] in needed else "a rollout")

    @staticmethod
    def _get(futures: Sequence[Any], what: str) -> list[Any]:
        """Results in order; failures become one sentence, the remote stack stays in Ray's logs."""
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

        try:
            results: list[Any] = ray.get(list(futures), timeout=START_SECONDS)
        except GetTimeoutError:
            raise TransferError(f"{what} took longer than {START_SECONDS:g} s") from None
        except RayTaskError as exc:
            cause = exc.cause
            if isinstance(cause, DataplaneError):
                raise type(cause)(str(cause)) from None
            raise TransferError(f"{what} failed: {type(cause).__name__}: {cause}") from None
        except RayActorError as exc:
            raise TransferError(
                f"{what} failed: a process of the job died ({str(exc).strip().splitlines()[0]})"
            ) from None
        return results
