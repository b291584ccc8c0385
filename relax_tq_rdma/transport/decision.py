"""The one decision of a job: a pure function of settings, node reports and the list of nodes (RFC §4.2.3, §4.8).

A ladder of rungs, best first. A job starts at the rung it asks for and steps down to the first one that every node can
do; each step leaves a record. After probing, a rung that fails leads one step down (:func:`next_rung`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from relax_tq_rdma.settings import Settings
from relax_tq_rdma.transport.findings import Finding, describe, find, unique_names
from relax_tq_rdma.transport.hca import parse_request
from relax_tq_rdma.transport.port import Problem
from relax_tq_rdma.transport.report import Decision, Fallback


@dataclass(frozen=True)
class Rung:
    """One way to move bytes. It needs its own ``checks`` on every node, and those of all rungs below it."""

    backend: Literal["SimpleStorage", "MooncakeStore"]
    protocol: Literal["zmq", "tcp", "rdma"]
    gdr: bool
    checks: tuple[str, ...]


LADDER: tuple[Rung, ...] = (
    Rung("MooncakeStore", "rdma", True, ("gdr",)),
    Rung("MooncakeStore", "rdma", False, ("rdma_device", "rdma_port", "rdma_gid", "memlock")),
    Rung(
        "MooncakeStore",
        "tcp",
        False,
        ("report", "plugin", "mooncake", "reachability", "memcpy_hazard", "shm", "memory"),
    ),
    Rung("SimpleStorage", "zmq", False, ()),
)


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """The job must not start. ``message`` is for the user; ``fallbacks`` are the steps taken before that was clear."""

    message: str
    fallbacks: tuple[Fallback, ...] = ()


def decide(settings: Settings, reports: Iterable[object], nodes: Mapping[str, str]) -> Decision | Refusal:
    """Choose the best rung that every node can do.

    Args:
        settings: what was asked for.
        reports: :class:`NodeReport` values or mappings of that shape; anything else counts as an unreadable report.
        nodes: the nodes of the job, node id to short name.

    Returns:
        The decision with one record for each step down; or a refusal, in ``required`` with every failing node and
        check, in ``auto`` and ``off`` with those that ended the ladder.
    """
    ladder = _ladder(settings)
    if not settings.wants_mooncake:
        return _decision(ladder[0], settings)
    found = find(_checks(ladder), _devices(settings), reports, nodes)
    if found and settings.rdma_mode == "required":
        return _refuse_required(ladder[0], describe(found))
    at, fallbacks = 0, list[Fallback]()
    for index, rung in enumerate(ladder):
        against = [finding for finding in found if finding.check in rung.checks]
        if not against:
            continue
        if index + 1 == len(ladder):
            return _refuse_last(ladder[at], describe(against), fallbacks)
        fallbacks.append(_step(ladder[at], ladder[index + 1], against))
        at = index + 1
    return _decision(ladder[at], settings, fallbacks)


def next_rung(decision: Decision, settings: Settings, problem: Problem) -> Decision | Refusal:
    """Where to go when ``decision`` failed after probing: one rung down, or nowhere.

    Without a master (check ``master``) no Mooncake rung can work, so the next one is the fallback backend.
    """
    ladder = _ladder(settings)
    at = _index(ladder, decision)
    finding = Finding(problem.node, problem.check, problem.reason)
    if ladder[at].backend == "SimpleStorage":
        message = (
            f"TransferQueue with SimpleStorage could not be started: {describe([finding])}; mend this, or raise "
            "--tq-init-timeout-seconds if the machine is only slow"
        )
        return Refusal(message=message, fallbacks=decision.fallbacks)
    if settings.rdma_mode == "required":
        return _refuse_required(ladder[at], describe([finding]))
    lower = [rung for rung in ladder[at + 1 :] if problem.check != "master" or rung.backend == "SimpleStorage"]
    if not lower:
        return _refuse_last(ladder[at], describe([finding]), decision.fallbacks)
    return _decision(lower[0], settings, [*decision.fallbacks, _step(ladder[at], lower[0], [finding])])


def nodes_ok(
    decision: Decision, settings: Settings, reports: Iterable[object], nodes: Mapping[str, str]
) -> tuple[int, int]:
    """Nodes that passed every check ``decision`` relies on, and all nodes. SimpleStorage counts as Mooncake/TCP here:
    the number then says how many nodes stood in the way."""
    lowest_probed = len(LADDER) - 2
    rungs = LADDER[min(_index(LADDER, decision), lowest_probed) :]
    bad = {finding.node for finding in find(_checks(rungs), _devices(settings), reports, nodes)}
    return sum(name not in bad for name in unique_names(nodes).values()), len(nodes)


def _ladder(settings: Settings) -> tuple[Rung, ...]:
    """The rungs this job may use, from the one it asks for."""
    if not settings.wants_mooncake:
        return LADDER[3:]
    first = 2 if not settings.wants_rdma else 0 if settings.use_gdr else 1
    return LADDER[first:] if settings.fallback_backend == "simple" else LADDER[first:3]


def _devices(settings: Settings) -> list[str]:
    """Names as the engine wants them: a port (``mlx5_0:1``) is the probe's business."""
    return [request.name for request in parse_request(settings.rdma_device)]


def _checks(rungs: Sequence[Rung]) -> list[str]:
    return [check for rung in rungs for check in rung.checks]


def _index(ladder: Sequence[Rung], decision: Decision) -> int:
    return [(rung.protocol, rung.gdr) for rung in ladder].index((decision.protocol, decision.gdr))


def _name(rung: Rung) -> str:
    return Decision(backend=rung.backend, protocol=rung.protocol, gdr=rung.gdr).rung


def _decision(rung: Rung, settings: Settings, fallbacks: Sequence[Fallback] = ()) -> Decision:
    return Decision(
        backend=rung.backend,
        protocol=rung.protocol,
        device=",".join(_devices(settings)) if rung.protocol == "rdma" else "",
        gdr=rung.gdr,
        fallbacks=tuple(fallbacks),
    )


def _step(upper: Rung, lower: Rung, found: Sequence[Finding]) -> Fallback:
    """The record names the first node and its first check, counts the nodes that share it, and lists what else is
    wrong on other nodes."""
    first = found[0]
    reason = first.why
    sharing = {finding.node for finding in found if finding.check == first.check}
    if len(sharing) > 1:
        reason += f" (and {len(sharing) - 1} more node{'s' * (len(sharing) > 2)})"
    others = {finding.check: finding.node for finding in reversed(found) if finding.node not in sharing}
    if others:
        reason += "; also " + ", ".join(f"{check} on {node}" for check, node in sorted(others.items()))
    return Fallback(from_=_name(upper), to=_name(lower), reason=reason, node=first.node, check=first.check)


def _refuse_required(rung: Rung, reason: str) -> Refusal:
    return Refusal(
        message=f"{_name(rung)} cannot be used, and --tq-rdma-mode required rules out anything less: {reason}; "
        "mend this, or use --tq-rdma-mode auto to run on what every node can do"
    )


def _refuse_last(rung: Rung, reason: str, fallbacks: Sequence[Fallback]) -> Refusal:
    return Refusal(
        message=f"{_name(rung)} cannot be used, and --tq-fallback-backend none rules out SimpleStorage: {reason}; "
        "mend this, or use --tq-fallback-backend simple",
        fallbacks=tuple(fallbacks),
    )
