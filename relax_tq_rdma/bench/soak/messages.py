"""What the driver says to the ends of a soak and what they answer: one line of JSON each, over the child's own pipes.

Several commands may be on the way at the same time; an answer carries the number of its command.
"""

from __future__ import annotations

import msgspec

from relax_tq_rdma.bench.path.messages import Server
from relax_tq_rdma.bench.soak.content import Shape
from relax_tq_rdma.bench.soak.schedule import RowId


class Join(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """First: join the store. ``keep``: most batches that are held at one time, of each consumer."""

    id: int
    controller: Server
    master: str
    shape: Shape
    segment_mib: int
    pool_mib: int
    keep: int


class Put(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Store one put of a step."""

    id: int
    step: int
    part: int


class Get(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Read ``rows`` rows of a step, compare them, and take ``seconds`` for it."""

    id: int
    step: int
    rows: int
    seconds: float


class Clear(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Remove a step."""

    id: int
    step: int


class Count(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How is it with you? Answered at once, whatever else is going on."""

    id: int


class Drop(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Compare once more what is held, and let go of it all."""

    id: int


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Of every command but :class:`Count`.

    Attributes:
        rows: that a get has returned.
        nbytes: that were put, or compared.
        rechecked: bytes compared a second time, when they were let go of.
    """

    id: int
    rows: list[RowId] = []
    nbytes: int = 0
    rechecked: int = 0


class Counts(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What an end holds. ``rungs``: values and bytes by direction and rung, as ``get/lend``. Sizes in bytes.

    ``kept``, ``kept_bytes``: batches that a consumer holds on to, and the bytes of their rows.

    ``registrations``: calls of the engine's ``register_buffer`` so far; the others as in
    :class:`~relax_tq_rdma.staging.counts.StagingCounts`, ``retired`` with the regions of single calls.
    """

    id: int
    kept: int = 0
    kept_bytes: int = 0
    capacity: int = 0
    held: int = 0
    peak: int = 0
    retired: int = 0
    misses: int = 0
    registrations: int = 0
    allocations: int = 0
    allocated: int = 0
    spare: int = 0
    rungs: dict[str, tuple[int, int]] = {}


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One sentence; the end stays up."""

    id: int
    reason: str


Command = Join | Put | Get | Clear | Count | Drop
Answer = Done | Counts | Failed
