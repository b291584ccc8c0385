"""What the driver of a job takes, by what the job has on."""

from __future__ import annotations

import os

from relax_tq_rdma import coverage, env
from relax_tq_rdma.compat import HostFacts, per_rank_wanted
from relax_tq_rdma.seams.base import require
from relax_tq_rdma.seams.relax_consumer import RelaxConsumer
from relax_tq_rdma.seams.relax_controller import RelaxController
from relax_tq_rdma.seams.relax_rollout import RelaxRollout
from relax_tq_rdma.seams.taken import TakenSeams
from relax_tq_rdma.seams.tq_init import TqInit
from relax_tq_rdma.seams.tq_registry import TqRegistry
from relax_tq_rdma.seams.worker_hook import WorkerHook
from relax_tq_rdma.settings import Settings
from relax_tq_rdma.transport.hazards import MEMCPY


def take(seams: TakenSeams, settings: Settings, host: HostFacts | None, *, of_host: bool) -> TqInit | None:
    """Check every seam that a layer of this job needs, then take them.

    Args:
        seams: where they are kept; to be given back if this raises.
        settings: what is in force, at least one layer.
        host: facts about the host.
        of_host: this is a job of Relax, and not of a program that uses TransferQueue by itself.

    Returns:
        Seam T1, unless the host has a data plane of its own.

    Raises:
        SeamError: a seam does not fit.
    """
    facts = host or HostFacts()
    init, registry = TqInit(settings, host=host), TqRegistry()
    data_plane = () if facts.own_data_plane else (init, registry)
    require(data_plane)
    if of_host:
        needed = needed_of_host(settings, facts)
        host_seams = (WorkerHook(), RelaxController(), RelaxRollout(), RelaxConsumer())
        require(seam for seam in host_seams if seam.name in needed)
    for seam in reversed(data_plane):  # the registries first: an init of another thread must find them taken
        seams.take(seam)
    if of_host:
        _take_host(seams, settings, facts, init)
    return None if facts.own_data_plane else init


def needed_of_host(settings: Settings, facts: HostFacts) -> set[str]:
    """Names of the seams without which a job of the host does not start; R1 is the launcher's own business."""
    needed = {WorkerHook.name, RelaxController.name}
    if settings.group_share_processor:
        needed.add(RelaxRollout.name)
    if not facts.own_data_plane and per_rank_wanted(settings, facts) != facts.per_rank_fetch:
        needed.add(RelaxConsumer.name)  # who fetches is not what the host's own switch says
    return needed


def _take_host(seams: TakenSeams, settings: Settings, facts: HostFacts, init: TqInit) -> None:
    hook = WorkerHook(_variables(settings))
    seams.take(hook)
    if settings.group_share_processor:
        seams.take_when_imported(RelaxRollout())
    before = coverage.check_at_start(settings.init_timeout_seconds)
    if facts.own_data_plane:
        seams.take_when_imported(RelaxController(before=before, for_actors=hook.for_actors))
        return
    seams.take_when_imported(
        RelaxController(init, before=before, after=coverage.compare_at_start, for_actors=hook.for_actors)
    )
    seams.take_when_imported(RelaxConsumer())


def _variables(settings: Settings) -> dict[str, str]:
    """What the workers need in their environment: the host hands on only what it knows."""
    memcpy = {MEMCPY: "0"} if settings.wants_mooncake and MEMCPY not in os.environ else {}
    return {**env.of_job(os.environ), **memcpy}
