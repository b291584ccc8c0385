"""Seam R3: who fetches in a cohort of the host's trainer, and how long it takes (L4, RFC §4.5).

One function is wrapped: ``get_data_from_transfer_queue`` of ``relax.utils.data.stream_dataloader``. The batch path of
the trainer imports it by name, both streaming paths look it up in its module at each fetch. It knows per-rank fetch
already; the wrapper decides when, and gives it a client that keeps the ranks in step, which the host's older line does
not, and its newer line only for "rows or none".
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from relax_tq_rdma import accounting, env
from relax_tq_rdma.accounting import FanoutMode
from relax_tq_rdma.fanout.choice import resolve_per_rank_fetch
from relax_tq_rdma.fanout.client import FetchClient
from relax_tq_rdma.fanout.lockstep import Lockstep
from relax_tq_rdma.seams.base import SeamReport
from relax_tq_rdma.seams.host_code import installed_host, lost, own_data_plane, problem
from relax_tq_rdma.seams.relax_args import job_of, settings_of
from relax_tq_rdma.seams.wrapping import Wrappers
from relax_tq_rdma.settings import Settings
from relax_tq_rdma.transport.report import Decision

MODULE = "relax.utils.data.stream_dataloader"
BY_NAME = "relax.backends.megatron.actor"
_FETCH = "get_data_from_transfer_queue"
_TAKES = ("args", "tq_client", "data_fields", "partition_id", "broadcast_pp", "per_rank_fetch")
_PARALLEL = "megatron.core.parallel_state"
_GROUPS = ("get_tensor_and_context_parallel_group", "get_pipeline_model_parallel_group")
_MULTIMODAL = "multimodal_train_inputs"
_ROUTED_EXPERTS = "rollout_routed_experts"


class RelaxConsumer:
    """See :class:`relax_tq_rdma.seams.base.Seam`."""

    name = "R3 (the host's fetch)"
    modules = (MODULE, BY_NAME)
    """Host modules after whose execution, reloads included, :meth:`apply` is due."""

    def __init__(self) -> None:
        self._wrappers = Wrappers()

    def check(self) -> SeamReport:
        aside = found = ""
        try:
            aside = own_data_plane()
            found = "" if aside else problem(MODULE, _FETCH, _TAKES, is_async=False) or lost(_PARALLEL, _GROUPS)
        except Exception as exc:  # a broken host must become a sentence, whatever it raises
            found = f"{type(exc).__name__}: {exc}"
        return SeamReport(
            name=self.name,
            ok=not found,
            installed=installed_host(),
            expected=f"{_FETCH} with parameters {', '.join(_TAKES)}, and {' and '.join(_GROUPS)} of {_PARALLEL}",
            found=found,
            aside=aside,
            way_out="run this version of the host without flags of relax-tq-rdma",
        )

    def apply(self) -> None:
        module = sys.modules.get(MODULE)
        if module is not None and not own_data_plane():
            self._wrappers.put(module, _FETCH, _wrap)
            _follow(module)

    def remove(self) -> None:
        self._wrappers.take_back()
        module = sys.modules.get(MODULE)
        if module is not None:
            _follow(module)


def _follow(module: Any) -> None:
    """Whoever has imported the function by name gets what the module has now."""
    importer = sys.modules.get(BY_NAME)
    theirs, now = getattr(importer, _FETCH, None), getattr(module, _FETCH)
    if theirs is not None and inspect.unwrap(theirs) is inspect.unwrap(now):
        setattr(importer, _FETCH, now)


def _wrap(fetch: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(fetch)
    known = _LastJob()

    @functools.wraps(fetch)
    def get_data_from_transfer_queue(*args: Any, **named: Any) -> Any:
        bound = signature.bind(*args, **named)
        bound.apply_defaults()
        asked = bound.arguments
        settings, decision = known.of(asked["args"])
        if settings is None or _is_fetched_elsewhere(asked):
            return fetch(*args, **named)
        per_rank = resolve_per_rank_fetch(
            settings,
            host_switch=bool(asked["per_rank_fetch"]),
            multimodal=_MULTIMODAL in asked["data_fields"],
            routed_experts=_ROUTED_EXPERTS in asked["data_fields"],
            decision=decision,
        ).on
        mode: FanoutMode = "per_rank" if per_rank else "rank0"
        partition = asked["partition_id"]
        with ExitStack() as until_all_have_rows:
            asked["per_rank_fetch"] = per_rank
            asked["tq_client"] = FetchClient(
                asked["tq_client"],
                _lockstep(asked["broadcast_pp"]) if per_rank else None,
                partition,
                lambda: until_all_have_rows.enter_context(accounting.fanout(mode, partition)),
            )
            return fetch(*bound.args, **bound.kwargs)

    return get_data_from_transfer_queue


class _LastJob:
    """What the last ``args`` say: a rank has one job, and polls many times a second."""

    def __init__(self) -> None:
        self._args: Any = None
        self._config: Any = None
        self._said: tuple[Settings | None, Decision | None] = (None, None)

    def of(self, args: Any) -> tuple[Settings | None, Decision | None]:
        config = getattr(args, "tq_config", None)
        if self._args is not args or self._config is not config:
            job = job_of(args)
            self._said = settings_of(args), job.decision if job is not None else None
            self._args, self._config = args, config
        return self._said


def _is_fetched_elsewhere(asked: dict[str, Any]) -> bool:
    """The host's newest line fetches on each rank ahead of time, in a thread, where nothing may be collective."""
    return not asked.get("synchronize_per_rank_fetch", True) or asked.get("prefetched_rollout_data") is not None


def _lockstep(with_pipeline: bool) -> Lockstep:
    """The ranks that the host keeps together: in a stream, stages of a pipeline go at their own pace."""
    from relax_tq_rdma.fanout.cohort import GroupCohort

    parallel = importlib.import_module(_PARALLEL)
    within_stage, across_stages = (getattr(parallel, name) for name in _GROUPS)
    groups = [within_stage(), across_stages()] if with_pipeline else [within_stage()]
    return Lockstep(GroupCohort(groups), env.seconds(env.COHORT_SPLIT_SECONDS))
