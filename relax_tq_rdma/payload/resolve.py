"""Where the references of a batch lead, and whether they still lead there (RFC §4.4, L3b; FC-47).

Global indexes are reused after a clear, so an index alone proves nothing: a source must have the put, the ordinal and
the size its referrers noted, or it is another row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from relax_tq_rdma.errors import TransferError
from relax_tq_rdma.payload.decode import Row


class StaleReferenceError(TransferError):
    """A reference's source was cleared, overwritten, or its index now holds another row. Never retried."""


@dataclass(frozen=True)
class Resolution:
    """How to serve the references of one batch.

    Attributes:
        inside: position of a reference -> position of its source in the same batch, already checked.
        fetch: global index of a source outside the batch -> positions that need it. One fetch serves them all; check
            the fetched row with ``check_source`` for each of them.
    """

    inside: dict[int, int]
    fetch: dict[int, list[int]]


def plan_resolution(rows: Sequence[Row | None], indexes: Sequence[int]) -> Resolution:
    """Plan one batch.

    Args:
        rows: the batch in asked order; None for a row that is not encoded.
        indexes: the rows' global indexes.

    Raises:
        StaleReferenceError: a source inside the batch is not the row its reference means.
    """
    where = {index: position for position, index in enumerate(indexes)}
    resolution = Resolution({}, {})
    for position, row in enumerate(rows):
        if row is None or row.reference is None:
            continue
        source = where.get(row.reference.index)
        if source is None:
            resolution.fetch.setdefault(row.reference.index, []).append(position)
        else:
            check_source(row, rows[source])
            resolution.inside[position] = source
    return resolution


def check_source(referrer: Row, source: Row | None) -> None:
    """Check that ``source`` (None: the store had nothing, or a raw row) is the row ``referrer`` refers to.

    Raises:
        StaleReferenceError: it is not; the message says what is there instead.
    """
    ref = referrer.reference
    if ref is None:
        raise ValueError("the row is not a reference")
    if source is None:
        found = "nothing encoded is"
    else:
        header = source.header
        same = (header.put, header.ord, source.nbytes) == (ref.put, ref.ord, ref.nbytes)
        if same and header.entries is not None:
            return
        found = f"row {header.ord} of put {header.put.hex()[:8]} ({source.nbytes} bytes) is"
    raise stale(referrer, found)


def stale(referrer: Row, found: str) -> StaleReferenceError:
    """The error for a referrer whose source is not what it refers to; ``found``: what is in its place."""
    ref = referrer.reference
    if ref is None:
        raise ValueError("the row is not a reference")
    return StaleReferenceError(
        f"reference is stale: at global index {ref.index} {found} there, "
        f"expected row {ref.ord} of put {ref.put.hex()[:8]} ({ref.nbytes} bytes); "
        "the source was cleared or overwritten while rows that share its payload were still in use"
    )
