"""What the driver says to its children and what they answer: one line of JSON each, over the child's own pipes."""

from __future__ import annotations

import msgspec

from relax_tq_rdma.bench.path.cases import Case
from relax_tq_rdma.bench.path.payload import Shape


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """Where a controller or a storage unit listens; ``ports`` by TransferQueue's names."""

    id: str
    ip: str
    ports: dict[str, int]


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To a server: where are you?"""


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To a producer or consumer, first: what it needs of the run."""

    controller: Server
    units: list[Server]
    segment_mib: int
    pool_mib: int
    keep: int


class Open(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Join the store that a case uses; ``master`` is empty for SimpleStorage."""

    case: Case
    master: str = ""


class Fill(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Make this payload (producer), or expect it (consumer)."""

    shape: Shape


class Put(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Stamp the payload with ``stamp``, then store it under ``partition``. ``watch``: count copies; spoils the time."""

    case: str
    partition: str
    stamp: int
    watch: bool = False


class Get(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Read back what was put and compare it; ``indexes`` and ``digests`` are the put's. ``watch`` as in :class:`Put`,
    and the way that was taken is proven."""

    case: str
    partition: str
    indexes: list[int]
    digests: list[int]
    watch: bool = False


class Clear(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Remove what is stored under ``partition``."""

    case: str
    partition: str


class Forget(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Let go of the payload and of every batch that is still held."""


class Limits(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Measure once what this machine allows for such a payload."""


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """What one put or get cost its process.

    Attributes:
        registrations: calls of the engine's ``register_buffer``.
        registered_bytes: bytes of those calls.
        moved_bytes: bytes that the engine was asked to move.
        fresh_bytes: memory that the kernel had to supply: page faults without input, times the page size, or the growth
            up to the peak, whichever is more.
        rss_before: resident bytes when it began.
        rss_peak: highest resident bytes until it ended.
        cpu_s: processor seconds of all threads, user and system.
    """

    registrations: int
    registered_bytes: int
    moved_bytes: int
    fresh_bytes: int
    rss_before: int
    rss_peak: int
    cpu_s: float


class Watched(msgspec.Struct, frozen=True, kw_only=True):
    """What only a watched put or get tells.

    Attributes:
        copied_bytes: that this process copied, see :mod:`.copies`.
        message_bytes: of ZMQ messages that it exchanged.
        stored_bytes: what the store holds of the batch (get only).
        encoded_rows: rows that were stored in the row format (get only).
    """

    copied_bytes: int
    message_bytes: int
    stored_bytes: int = 0
    encoded_rows: int = 0


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Done; from a server with where it listens."""

    server: Server | None = None


class Moved(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A put or a get; the put tells each row's index and digest.

    ``rungs``: bytes that the plugin's client moved by each rung of its staging (``lend``, ``copy``, ``call``).
    """

    seconds: float
    rungs: dict[str, int] = {}
    counters: Counters
    indexes: list[int] = []
    digests: list[int] = []
    watched: Watched | None = None


class Measured(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Seconds of each limit."""

    seconds: dict[str, float]


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One sentence; the child stays up."""

    reason: str


Command = Hello | Setup | Open | Fill | Put | Get | Clear | Forget | Limits
Answer = Ready | Moved | Measured | Failed
