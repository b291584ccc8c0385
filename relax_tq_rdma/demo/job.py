"""The driver: Ray, data system, actors, then the fully-async loop. The rollout may be ``max_staleness`` steps ahead.

Rollout ``k`` always answers with the weights after step ``k - max_staleness``, so a run is reproducible bit for bit
although producer and trainer overlap.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

from relax_tq_rdma import compat
from relax_tq_rdma.demo import cluster, data_system, digest, model, signals
from relax_tq_rdma.demo.options import Options
from relax_tq_rdma.demo.output import JobResult, Reporter, StepRecord, step_line
from relax_tq_rdma.demo.pictures import require_vision_extra
from relax_tq_rdma.demo.rollout import Produced
from relax_tq_rdma.demo.trainer import Trained
from relax_tq_rdma.demo.workers import Workers
from relax_tq_rdma.errors import TransferError
from relax_tq_rdma.fanout.choice import resolve_per_rank_fetch
from relax_tq_rdma.settings import Settings
from relax_tq_rdma.words import count


def run_job(options: Options, settings: Settings, report: Reporter) -> JobResult:
    """Run the whole job; everything it started is gone when this returns or raises."""
    require_vision_extra()
    host = _host_facts(options)
    compat.check(settings, host)  # before anything is started; install says what is only a warning
    with ExitStack() as stack:
        report.phase(f"joining Ray at {options.ray_address}" if options.ray_address else "starting a local Ray")
        cpus = 1 + options.num_data_storage_units  # TransferQueue reserves one for its controller and each unit
        stack.enter_context(
            cluster.borrowed(options.ray_address, cpus) if options.ray_address else cluster.embedded(cpus)
        )
        # Registered before it exists: an interrupted start is closed too.
        stack.callback(_undisturbed, lambda: data_system.close(settings))
        report.phase("starting TransferQueue")
        system = data_system.start(settings, host, options.samples_per_prompt)
        choice = resolve_per_rank_fetch(
            settings, host_switch=options.per_rank_fetch, multimodal=True, decision=system.decision
        )
        fetch = f"per-rank fetch {'on' if choice.on else 'off'}, {choice.why}"
        report.phase(f"starting the rollout and {options.mesh.world} trainer ranks ({fetch})")
        # Not earlier: their imports would take the cores from a start that has a deadline.
        workers = Workers(options, settings)
        stack.callback(_undisturbed, workers.stop)
        workers.connect(system.config, per_rank=choice.on)
        report.phase(f"training {count(options.steps, 'step')}")
        losses, steps = _train(options, workers, report)
        total = digest.combined(bytes.fromhex(step.payload_digest) for step in steps)
        report.phase("stopping")
    return JobResult(system.summary_line, system.decision, losses, total, steps)


def _undisturbed(clean_up: Callable[[], None]) -> None:
    with signals.ignored():
        clean_up()


def _host_facts(options: Options) -> compat.HostFacts:
    return compat.HostFacts(
        fully_async=True,
        multimodal=True,
        tensor_parallel=options.mesh.tp,
        num_data_storage_units=options.num_data_storage_units,
        per_rank_fetch=options.per_rank_fetch,
    )


def _train(options: Options, workers: Workers, report: Reporter) -> tuple[list[float], list[StepRecord]]:
    weights = model.initial_weights(options.seed)
    ahead = options.max_staleness
    rollouts = [workers.produce(step, weights) for step in range(min(ahead + 1, options.steps))]
    losses: list[float] = []
    steps: list[StepRecord] = []
    with report.steps(options.steps) as tick:
        for step in range(options.steps):
            started = time.perf_counter()
            trained = workers.train(step, rollouts[step:])
            seconds = time.perf_counter() - started
            weights = _whole_model(options, trained)
            if step + ahead + 1 < options.steps:
                rollouts.append(workers.produce(step + ahead + 1, weights))
            produced = workers.produced(rollouts[step])
            record = _record(options, produced, trained, seconds)
            losses.append(trained[0].loss)
            steps.append(record)
            report.line(step_line(record, options.steps, losses[-1]))
            for line in (*produced.lines, *trained[0].lines):
                report.line(line)
            tick()
    return losses, steps


def _whole_model(options: Options, trained: list[Trained]) -> model.Weights:
    """The model after a step, from the shards of one DP and CP rank: the others hold the same."""
    shards: dict[int, list[model.Weights]] = {}
    for result in trained:
        at = options.mesh.coords(result.rank)
        if at.dp == 0 and at.cp == 0:
            shards.setdefault(at.tp, []).append(result.weights)
    return model.assemble(shards)


def _record(options: Options, produced: Produced, trained: list[Trained], seconds: float) -> StepRecord:
    digests = _agreed_digests(options, produced, trained)
    return StepRecord(
        step=produced.step,
        rows=produced.rows,
        bytes_total=produced.bytes,
        bytes_unique=produced.unique_bytes,
        put_s=produced.put_s,
        get_s=max(result.get_s for result in trained),
        fanout_s=max(result.fanout_s for result in trained if options.mesh.coords(result.rank).is_fetcher),
        step_s=seconds,
        payload_digest=digest.combined(digests[index] for index in sorted(digests)),
        mean_reward=produced.mean_reward,
    )


def _agreed_digests(options: Options, produced: Produced, trained: list[Trained]) -> dict[int, bytes]:
    """Digest of every row by sample index.

    Raises:
        TransferError: ranks of one cohort received different bytes, or rows are missing or doubled.
    """
    by_cohort: dict[int, dict[int, bytes]] = {}
    for result in trained:
        mine = by_cohort.setdefault(options.mesh.coords(result.rank).dp, result.digests)
        if mine != result.digests:
            bad = next(i for i in sorted({*mine, *result.digests}) if mine.get(i) != result.digests.get(i))
            raise TransferError(
                f"step {produced.step}: rank {result.rank} received other bytes for sample {bad} than its cohort"
            )
    received = [index for digests in by_cohort.values() for index in digests]
    first = produced.step * options.rows_per_step
    if sorted(received) != list(range(first, first + produced.rows)):
        raise TransferError(
            f"step {produced.step}: {produced.rows} rows were put, the trainers received samples {sorted(received)}"
        )
    return {index: value for digests in by_cohort.values() for index, value in digests.items()}
