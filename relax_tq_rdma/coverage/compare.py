"""Which processes of a job are not as its driver is. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from relax_tq_rdma.coverage.records import JobRecord, ProcessRecord
from relax_tq_rdma.words import count

SILENT_SECONDS = 20.0
"""A living process writes every 5 s (:mod:`relax_tq_rdma.coverage.reporter`)."""


def differences(job: JobRecord, processes: Sequence[ProcessRecord], *, now: float | None = None) -> list[str]:
    """One sentence for each thing that is not alike.

    Args:
        job: what its driver has decided.
        processes: those that have written.
        now: Unix time in seconds, to name those that are silent; ``None`` where everybody has just begun.
    """
    return [sentence for process in processes for sentence in _of(job, process, processes, now)]


def _of(job: JobRecord, process: ProcessRecord, processes: Sequence[ProcessRecord], now: float | None) -> Iterator[str]:
    name, decision = process.name, job.decision
    if process.plugin != job.plugin:
        yield f"{name} runs relax-tq-rdma {process.plugin}, the driver {job.plugin}: install the same version"
    for package in ("transfer_queue", "mooncake"):
        own, usual = getattr(process, package), _usual([getattr(p, package) for p in processes])
        if own != usual:
            title = {"transfer_queue": "TransferQueue", "mooncake": "Mooncake"}[package]
            yield f"{name} has {title} {own or 'of unknown version'}, the others {usual}: install the same version"
    if (process.backend, process.protocol) != (decision.backend, decision.protocol):
        yield f"{name} uses {process.backend}/{process.protocol}, the job {decision.backend}/{decision.protocol}"
    failed = [seam for seam, state in process.seams.items() if state == "failed"]
    if failed:
        yield f"{name} runs without seam {', '.join(failed)}: its log says why"
    for note in process.notes:
        yield f"{name}: {note}"
    if now is not None and now - process.written > SILENT_SECONDS:
        yield f"{name} has said nothing for {now - process.written:.0f} s: it was killed, or is stuck in native code"


def _usual(versions: Sequence[str]) -> str:
    return max(sorted(set(versions)), key=list(versions).count)


def alike(processes: Sequence[ProcessRecord]) -> str:
    """One clause on processes that do not differ."""
    nodes = len({process.node_id for process in processes})
    seams = sorted({seam for process in processes for seam, state in process.seams.items() if state == "taken"})
    return (
        f"{count(len(processes), 'process', 'processes')} on {count(nodes, 'node')}, seams {' '.join(seams) or 'none'}"
    )
