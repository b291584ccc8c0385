"""Whether a case really took its way. A case whose setting had no effect is not measured; it is an error. Pure."""

from __future__ import annotations

from relax_tq_rdma.bench.path.cases import Case
from relax_tq_rdma.bench.path.messages import Moved, Watched
from relax_tq_rdma.bench.path.payload import Shape

DEDUP_OVERHEAD = 0.01
"""Of the stored bytes: headers and references beside the unique payload."""

ROW_OVERHEAD = 512
"""Bytes of a small row that are not payload: header and padding."""


def problem(case: Case, shape: Shape, seen: Watched) -> str:
    """Why the watched get of a case does not prove its layers; empty when it does."""
    if case.asks("normalize_multimodal") and seen.encoded_rows != shape.rows:
        return f"normalize_multimodal had no effect: {seen.encoded_rows} of {shape.rows} rows are in the row format"
    if not case.asks("normalize_multimodal") and seen.encoded_rows:
        return f"{seen.encoded_rows} rows are in the row format although nothing asked for it"
    if case.asks("dedup_multimodal"):
        allowed = shape.nbytes / shape.copies * (1 + DEDUP_OVERHEAD) + shape.rows * ROW_OVERHEAD
        if seen.stored_bytes > allowed:
            return f"dedup_multimodal had no effect: {seen.stored_bytes} bytes stored, {allowed:.0f} allowed"
    return ""


def staging_problem(case: Case, moves: list[Moved]) -> str:
    """Why measured puts and gets do not prove the staging pool; empty when they do or none was asked for."""
    if not case.asks("host_staging"):
        return ""
    registered = sum(move.counters.registrations for move in moves)
    if registered:
        return f"host_staging had no effect: {registered} registrations in {len(moves)} steps"
    unstaged = sum(not move.rungs.get("lend", 0) + move.rungs.get("copy", 0) for move in moves)
    return (
        f"host_staging had no effect: nothing passed the pool in {unstaged} of {len(moves)} steps" if unstaged else ""
    )
