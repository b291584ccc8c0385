"""L0: counts the bytes of the data plane and times its stages (design §8, RFC §4.1).

Off by default; ``configure("summary", job=...)`` switches it on for this process. Then :class:`AccountingMixin` counts
puts and gets, :func:`stage` and :func:`fanout` time blocks, and the ``record_*`` functions take what other layers know.
With accounting off every function returns at once. Nothing here raises into the data path.

Importing this package is light: torch is imported with the first batch that is measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relax_tq_rdma.accounting.ledger import Ledger
from relax_tq_rdma.accounting.mixin import AccountingMixin
from relax_tq_rdma.accounting.names import Direction, FanoutMode, Path, ProcessorCall, StageName, StagingRung
from relax_tq_rdma.accounting.paths import SlowPathError, assert_fast_path, took_fast_path
from relax_tq_rdma.accounting.process import configure, current, expect_fast_path, flush
from relax_tq_rdma.accounting.records import Batch, FieldStats, Flow, PoolState, StepSummary
from relax_tq_rdma.accounting.stages import fanout, stage
from relax_tq_rdma.transport.report import Decision, Fallback

__all__ = [
    "AccountingMixin",
    "Batch",
    "Direction",
    "FanoutMode",
    "FieldStats",
    "Flow",
    "Ledger",
    "Path",
    "PoolState",
    "ProcessorCall",
    "SlowPathError",
    "StageName",
    "StagingRung",
    "StepSummary",
    "assert_fast_path",
    "configure",
    "expect_fast_path",
    "fanout",
    "flush",
    "ledger",
    "measure",
    "record_alloc",
    "record_fallback",
    "record_pool",
    "record_processor_call",
    "record_raw_rows",
    "record_register",
    "record_retry",
    "record_staged",
    "record_wire",
    "set_backend",
    "stage",
    "took_fast_path",
]


def ledger() -> Ledger | None:
    """The ledger of this process; ``None`` when accounting is off."""
    accounting = current()
    return accounting.ledger if accounting is not None else None


def measure(data: Mapping[str, Any] | Any, *, content: bool = False) -> Batch:
    """Measure a batch: a ``TensorDict``, or a mapping of field name to column.

    Args:
        data: the batch; columns may be dense or nested tensors, ``NonTensorStack``, lists of rows, numpy arrays.
        content: tell copies from originals by a digest of their bytes instead of by memory identity.

    Returns:
        Rows, bytes, unique bytes and path per field; what counts as a byte is in ``docs/reference/metrics.md``.
    """
    from relax_tq_rdma.accounting.meter import measure_batch

    return measure_batch(data, content=content)


def record_wire(
    field: str, direction: Direction, *, wire_bytes: int, saved_bytes: int = 0, step: str | None = None
) -> None:
    """What one field of a completed put or get cost below: ``wire_bytes`` went to (or came from) the storage, headers
    included; ``saved_bytes`` of payload did not, thanks to deduplication. ``step`` defaults to the newest."""
    accounting = current()
    if accounting is not None:
        accounting.ledger.wire(field, direction, wire_bytes, saved_bytes, step)
        accounting.tick()


def record_raw_rows(field: str, rows: int, step: str | None = None) -> None:
    """``rows`` of a put were left as they are although the job normalises the field."""
    accounting = current()
    if accounting is not None:
        accounting.ledger.left_raw(field, rows, step)
        accounting.tick()


def record_processor_call(result: ProcessorCall) -> None:
    """A sample asked for the host's image processor (RFC §4.4)."""
    accounting = current()
    if accounting is not None:
        accounting.ledger.processor_called(result)
        accounting.tick()


def record_staged(direction: Direction, rung: StagingRung, values: int, nbytes: int) -> None:
    """``values`` of ``nbytes`` in sum were moved with host staging, by one kind of memory (RFC §4.6)."""
    accounting = current()
    if accounting is not None:
        accounting.ledger.staged(direction, rung, values, nbytes)
        accounting.tick()


def record_pool(state: PoolState) -> None:
    """How the staging pool of this process is after a put or get."""
    accounting = current()
    if accounting is not None:
        accounting.ledger.pool(state)
        accounting.tick()


def record_retry(direction: Direction, step: str | None = None) -> None:
    """One attempt failed and is being repeated. It delivers nothing."""
    accounting = current()
    if accounting is not None:
        accounting.ledger.retried(direction, step)
        accounting.tick()


def record_register(direction: Direction, path: Path, seconds: float, regions: int = 1) -> None:
    """``regions`` memory regions were registered with the transport in ``seconds`` (RFC §4.6)."""
    accounting = current()
    if accounting is not None:
        accounting.ledger.registered(direction, path, regions, int(seconds * 1e9))
        accounting.tick()


def record_alloc(seconds: float) -> None:
    """The destination memory of a get was allocated in ``seconds`` (RFC §4.6)."""
    accounting = current()
    if accounting is not None:
        accounting.ledger.allocated(int(seconds * 1e9))
        accounting.tick()


def record_fallback(step: Fallback) -> None:
    """The job took one step down the ladder (RFC §4.8, rule 3). The label ``reason`` is the name of the check."""
    accounting = current()
    if accounting is not None:
        accounting.ledger.fallback(step.from_, step.to, step.check)
        accounting.tick()


def set_backend(decision: Decision) -> None:
    """Say what the job runs on, as the start line does."""
    accounting = current()
    if accounting is not None:
        device = decision.device or ("auto" if decision.protocol == "rdma" else "-")
        accounting.set_backend((decision.backend, decision.protocol, device, "on" if decision.gdr else "off"))
