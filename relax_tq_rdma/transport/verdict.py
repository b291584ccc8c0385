"""From what the peers of a ring say to one verification. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from relax_tq_rdma.transport.native import PeerResult
from relax_tq_rdma.transport.port import Problem, Verification

_CHECK = "verify"


def edges(size: int) -> list[tuple[int, int]]:
    """Pairs of neighbours, each once: one pair in a ring of two, else as many as there are peers."""
    return list(dict.fromkeys((min(i, j), max(i, j)) for i, j in ((i, (i + 1) % size) for i in range(size))))


def judge_ring(names: Sequence[str], results: Sequence[PeerResult], protocol: str, one_host: bool) -> Verification:
    """Count the round trips that passed: a pair of neighbours that read from and wrote to one another, both ways.

    Args:
        names: node of each peer.
        results: what each peer says, in ring order.
        protocol: the decided one, ``tcp`` or ``rdma``.
        one_host: all nodes are on one host, so no bytes can have crossed a network.

    RDMA is only claimed when the HCA counters of *every* reader account for its bytes. On one host their silence is no
    failure (some HCAs turn such traffic around without counting it): the wire is then ``local``.
    """
    pairs = edges(len(results))
    failed = {pair: problem for pair in pairs if (problem := _edge_problem(pair, names, results))}
    # A peer that failed as a whole is the cause; that its neighbours miss it is not.
    problems = [
        Problem(reason=result.reason, node=name, check=result.check or _CHECK)
        for name, result in zip(names, results, strict=True)
        if result.reason
    ]
    problems += [problem for (a, b), problem in failed.items() if not (results[a].reason or results[b].reason)]
    problems += _shared_segments(names, results)
    wire = "local" if one_host else "tcp"
    if protocol == "rdma" and not problems:
        unproven = [(name, result.wire) for name, result in zip(names, results, strict=True) if not _proven(result)]
        if not unproven:
            wire = "rdma"
        elif not one_host:
            name, proof = unproven[0]
            reason = f"RDMA is not proven: {proof.evidence if proof else 'nothing was measured'}"
            problems.append(Problem(reason=reason, node=name, check=_CHECK))
    return Verification(passed=len(pairs) - len(failed), total=len(pairs), wire=wire, problems=tuple(problems))


def _edge_problem(pair: tuple[int, int], names: Sequence[str], results: Sequence[PeerResult]) -> Problem | None:
    for here, there in (pair, pair[::-1]):
        result, other = results[here], names[there]
        if result.reason:
            return Problem(reason=result.reason, node=names[here], check=result.check)
        if there in result.unread:
            return Problem(reason=f"reading from {other}: {result.unread[there]}", node=names[here], check=_CHECK)
    for here, there in (pair, pair[::-1]):
        if there in results[here].unacknowledged:
            why = results[here].unacknowledged[there]
            return Problem(reason=f"written to by {names[there]}: {why}", node=names[here], check=_CHECK)
    return None


def _shared_segments(names: Sequence[str], results: Sequence[PeerResult]) -> list[Problem]:
    owners: defaultdict[str, list[str]] = defaultdict(list)
    for name, result in zip(names, results, strict=True):
        if result.endpoint:
            owners[result.endpoint].append(name)
    return [
        Problem(
            reason=f"patterns of {', '.join(held)} lay in one segment, so nothing crossed", node=held[0], check=_CHECK
        )
        for held in owners.values()
        if len(held) > 1
    ]


def _proven(result: PeerResult) -> bool:
    return result.wire is not None and result.wire.proven
