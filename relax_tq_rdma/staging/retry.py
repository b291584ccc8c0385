"""When to ask the store again, and what to say when giving up. Pure.

Upstream asks three more times whatever the code. Here the code decides: room may come, a dead segment is dropped after
a while, a master that is silent twice is dead, and a wrong request is not repeated (FC-22, FC-27).
"""

from __future__ import annotations

from collections.abc import Collection

from relax_tq_rdma import env
from relax_tq_rdma.staging.errors import (
    GONE,
    MASTER_SILENT,
    NO_SPACE,
    REFUSED,
    RESTART,
    TRANSFER_FAILED,
    meaning,
)
from relax_tq_rdma.transport.memory import shown

TRIES = 3
"""More tries for a code that waiting does not explain."""

SILENT_TRIES = 1
"""More tries when the master does not answer: the engine itself has tried for 4 s by then (measured)."""

READ_SECONDS = 30.0
"""How long after its begin a read may still be tried again. The engine gives a silent peer up after 30 to 60 s (FC-27);
after that it is not asked once more."""

_COMES_BACK = frozenset({NO_SPACE, TRANSFER_FAILED})
"""Waiting helps a put: a consumer clears rows; the master drops a dead process's segment after its ``client_ttl``."""

_UNDER_WAY = frozenset({TRANSFER_FAILED, -1, -500})


def pause_before_put(codes: Collection[int], tries: int, waited: float, limit: float) -> float | None:
    """Seconds to sleep before the values that failed are put again; ``None``: give up.

    Args:
        codes: of the values that failed.
        tries: rounds that failed so far, this one included.
        waited: seconds since the first try began.
        limit: seconds to wait for room, or for a dead segment to be dropped (``RTQ_STORE_WAIT_SECONDS``).
    """
    if REFUSED.intersection(codes):
        return None
    if _COMES_BACK.issuperset(codes):
        return None if waited >= limit else min(1.0, 0.05 * 2**tries)
    return None if tries > _tries(codes) else 1.0


def pause_before_get(codes: Collection[int], tries: int, waited: float) -> float | None:
    """As :func:`pause_before_put`, for a read or a removal. A byte count among the codes is a wrong one."""
    if any(code >= 0 or code in REFUSED or code in GONE for code in codes):
        return None
    return None if tries > _tries(codes) or waited >= READ_SECONDS else 1.0


def _tries(codes: Collection[int]) -> int:
    return SILENT_TRIES if MASTER_SILENT.intersection(codes) else TRIES


def is_settled(codes: Collection[int]) -> bool:
    """Whether the engine has surely let go of the memory of values that failed with these codes (FC-32)."""
    return not _UNDER_WAY.intersection(codes)


def write_problem(code: int, need: int, waited: float, segment: int, master: str) -> tuple[str, str]:
    """Cause and remedy of a put that was given up. ``need`` and ``segment`` in bytes."""
    if code == NO_SPACE and need > segment > 0:
        return (
            f"a value of {shown(need)} can never fit: a segment holds {shown(segment)}",
            f"raise {env.SEGMENT_MB.name} on the nodes that put, or put smaller rows",
        )
    if code == NO_SPACE:
        own = f" (this process's segment has {shown(segment)})" if segment else ""
        return (
            f"no room for {shown(need)}: the store stayed full or fragmented for {waited:.0f} s{own}",
            f"clear partitions sooner, lower the staleness or batch size, or raise {env.SEGMENT_MB.name}",
        )
    if code == TRANSFER_FAILED:
        return f"the process that was to hold the data is dead, frozen or unreachable, {meaning(code)}", RESTART
    return _any_problem(code, master)


def read_problem(code: int, size: int, master: str) -> tuple[str, str]:
    """Cause and remedy of a read that was given up. ``code``: as the store returned it, so it may be a byte count."""
    if code >= 0:
        return (
            f"the store holds {code} bytes where {size} were put",
            "report this with the Mooncake version; the data of this call is not used",
        )
    if code in GONE:
        return (
            f"lost: the store no longer has what was put, {meaning(code)}; the process that held it ended or was "
            "declared dead, or the rows were cleared or overwritten after this reader had asked for them",
            "restart the job from its last checkpoint, unless the rows were cleared on purpose; a process that puts "
            "must stay until its rows are cleared",
        )
    if code == TRANSFER_FAILED:
        return f"lost: the process that holds it is dead, frozen or unreachable, {meaning(code)}", RESTART
    return _any_problem(code, master)


def remove_problem(code: int, master: str) -> tuple[str, str]:
    """Cause and remedy of a removal that was given up."""
    cause, remedy = _any_problem(code, master)
    return f"not removed, so its memory stays taken: {cause}", remedy


def _any_problem(code: int, master: str) -> tuple[str, str]:
    if code in MASTER_SILENT:
        return f"the Mooncake master at {master} is dead or unreachable, {meaning(code)}", RESTART
    return f"the store failed with {meaning(code)}", "look at the log of mooncake_master, then restart the job"
