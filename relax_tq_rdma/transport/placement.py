"""Actors of TransferQueue that Ray has not placed, told with numbers (FC-13).

Free CPUs alone say nothing: where a job just fits, its own actors hold all of them. What counts is an actor without a
process. (Ray's queue of demands would tell more, but leaves out actors bound to a node, as storage units are.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cpus:
    """CPUs of one node."""

    total: float
    free: float


def unplaced(needs: Sequence[float], nodes: Sequence[Cpus]) -> str:
    """In one sentence which actors have no process, and what is free; empty when all have one.

    Args:
        needs: CPUs of each actor that has none.
        nodes: the alive nodes.
    """
    if not needs:
        return ""
    needed = sum(needs)
    free, total = sum(node.free for node in nodes), sum(node.total for node in nodes)
    most = max((node.free for node in nodes), default=0.0)
    who = "an actor of TransferQueue has no process: it needs"
    if len(needs) > 1:
        who = f"{len(needs)} actors of TransferQueue have no process: they need"
    spread = f", at most {most:g} on one node" if most < free else ""
    way_out = " (end other jobs, or add CPUs)" if needed > free or max(needs) > most else ""
    return (
        f"{who} {needed:g} CPU{'s' * (needed != 1)}, and {free:g} of {total:g} CPUs of the cluster are free"
        f"{spread}{way_out}"
    )
