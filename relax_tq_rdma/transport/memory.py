"""The memory plan: what the Mooncake clients of one node take, before anything is allocated (design §8). Pure.

Upstream mounts a 4 GiB segment and a 1 GiB buffer in *every* client process, so eight ranks take 40 GiB of a node. Here
a client sets up without a segment and mounts one at its first large put: only producers do. Wheels that cannot mount
later (no ``allocate_and_mount_segment``) mount at set-up, in every client.
"""

from __future__ import annotations

import msgspec

from relax_tq_rdma import env
from relax_tq_rdma.settings import Settings

MIB = 1024 * 1024
SMALLEST_STAGING = 16 * MIB
"""A pool that had to shrink below this serves too little to be worth its memory."""


class ClientSizes(msgspec.Struct, frozen=True, kw_only=True):
    """What one client process allocates, in bytes; ``gpu_staging`` is GPU memory, everything else host memory.

    The last three fill up as batches pass, and are never pinned: ``results`` and ``copies`` are memory of earlier
    batches that is used again (of the staging, and of deduplicated rows), ``sources`` the rows that others refer to.
    """

    segment: int
    buffer: int
    staging: int
    gpu_staging: int
    results: int = 0
    copies: int = 0
    sources: int = 0


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What one node needs. ``mounting`` of its ``processes`` hold a segment. Bytes of host memory."""

    sizes: ClientSizes
    processes: int
    mounting: int
    lazy: bool

    @property
    def pinned_bytes(self) -> int:
        """What a process that mounts a segment pins under RDMA."""
        return self.sizes.segment + self.sizes.buffer + self.sizes.staging

    @property
    def process_bytes(self) -> int:
        """Most of a process that mounts a segment."""
        return self.pinned_bytes + self._kept

    @property
    def reserved_bytes(self) -> int:
        """What all client processes of the node take before they keep anything."""
        return self.mounting * self.sizes.segment + self.processes * (self.sizes.buffer + self.sizes.staging)

    @property
    def node_bytes(self) -> int:
        """Most of all client processes of the node."""
        return self.reserved_bytes + self.processes * self._kept

    @property
    def _kept(self) -> int:
        return self.sizes.results + self.sizes.copies + self.sizes.sources

    @property
    def largest_region(self) -> int:
        """The largest single memory registration: the staging pool is a part of the local buffer."""
        return max(self.sizes.segment, self.sizes.buffer + self.sizes.staging)


class PlanRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the plan as ``doctor`` shows it. ``where`` is ``host`` or ``gpu``."""

    what: str
    where: str
    process_bytes: int
    processes: int
    node_bytes: int
    knob: str


def client_sizes(settings: Settings) -> ClientSizes:
    """Sizes of each client of a Mooncake job.

    Raises:
        UsageError: an ``RTQ_*`` variable that holds a size is not one.
    """
    staging = settings.host_staging_mb * MIB if settings.host_staging else 0
    return ClientSizes(
        segment=env.mebibytes(env.SEGMENT_MB),
        buffer=env.mebibytes(env.LOCAL_BUFFER_MB),
        staging=staging,
        gpu_staging=settings.gdr_staging_mb * MIB if settings.use_gdr else 0,
        results=staging,  # a reader may be given as much again as the pool lends
        copies=env.mebibytes(env.RECYCLED_MB) if settings.dedup_multimodal else 0,
        sources=env.mebibytes(env.DEDUP_CACHE_MB) if settings.dedup_multimodal else 0,
    )


def staging_that_fits(sizes: ClientSizes, pinnable: int | None) -> int:
    """Bytes of the staging pool where a process may pin ``pinnable`` bytes (``None``: any number); 0: not worth it."""
    if pinnable is None:
        return sizes.staging
    fits = min(sizes.staging, pinnable - sizes.segment - sizes.buffer) // MIB * MIB
    return fits if fits >= min(sizes.staging, SMALLEST_STAGING) else 0


def plan(settings: Settings, *, processes: int, producers: int, lazy: bool) -> MemoryPlan:
    """Plan one node.

    Args:
        settings: the job's settings; meant for a job with the Mooncake backend.
        processes: client processes of the node (rollout, trainer ranks, controller, ...).
        producers: those of them that put payload.
        lazy: the installed wheel can mount a segment after set-up.
    """
    mounting = min(producers, processes) if lazy else processes
    return MemoryPlan(sizes=client_sizes(settings), processes=processes, mounting=mounting, lazy=lazy)


def rows(plan: MemoryPlan) -> list[PlanRow]:
    """The plan as lines; a part that this job does not use is left out."""
    parts = (
        ("segment", "host", plan.sizes.segment, plan.mounting, env.SEGMENT_MB.name),
        ("local buffer", "host", plan.sizes.buffer, plan.processes, env.LOCAL_BUFFER_MB.name),
        ("host staging", "host", plan.sizes.staging, plan.processes, "--tq-host-staging-mb"),
        ("results, reused", "host", plan.sizes.results, plan.processes, "--tq-host-staging-mb"),
        ("copies, reused", "host", plan.sizes.copies, plan.processes, env.RECYCLED_MB.name),
        ("dedup cache", "host", plan.sizes.sources, plan.processes, env.DEDUP_CACHE_MB.name),
        ("GDR staging", "gpu", plan.sizes.gpu_staging, plan.processes, "--tq-gdr-staging-mb"),
    )
    return [
        PlanRow(what=what, where=where, process_bytes=size, processes=count, node_bytes=size * count, knob=knob)
        for what, where, size, count, knob in parts
        if size
    ]


def shown(size: float) -> str:
    """Bytes for people: ``64 KiB``, ``4.0 GiB``."""
    for unit, step in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= step:
            number = size / step
            return f"{number:.0f} {unit}" if number >= 100 or number == int(number) else f"{number:.1f} {unit}"
    return f"{size:.0f} B"
