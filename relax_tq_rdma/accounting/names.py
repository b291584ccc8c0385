"""The closed vocabulary of accounting: stages, label values and every exported metric (RFC §3.4, §4.1, §4.6).

Labels come from fixed small sets (FC-48). ``field`` is the only open one and is bounded by :data:`FIELD_LIMIT`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from relax_tq_rdma.transport.report import CHECKS, DERIVED_CHECKS, STEP_CHECKS

Direction = Literal["put", "get"]
Path = Literal["fast", "slow"]
"""``fast``: the row crosses as bytes, because it is a ``torch.Tensor`` (TransferQueue's tensor path, RFC F2) or was
normalised; ``slow``: it is serialised."""

Result = Literal["ok", "failed", "cancelled", "retried"]
StageName = Literal[
    "image_processor",
    "contiguous",
    "encode",
    "put",
    "get_meta",
    "get",
    "resolve_refs",
    "decode",
    "fanout",
    "rebuild",
    "register",
    "alloc",
]
FanoutMode = Literal["rank0", "per_rank"]
ProcessorCall = Literal["run", "served", "own"]
"""Of a sample: ``run``: ran the image processor for its group; ``served``: took the output of that run; ``own``: ran it
for itself."""

StagingRung = Literal["lend", "copy", "call"]
"""Memory that values pass: ``lend``: the pool's, which the caller then holds; ``copy``: the pool's for the transfer
only; ``call``: registered for one call."""

DIRECTIONS: tuple[str, ...] = get_args(Direction)
STAGES: tuple[str, ...] = get_args(StageName)
FANOUT_MODES: tuple[str, ...] = get_args(FanoutMode)
STAGING_RUNGS: tuple[str, ...] = get_args(StagingRung)

VERIFY_PREFIX = "rtq_verify_"
"""Partitions whose id begins so are the start's own round trips: no payload of the job, not counted."""

FIELD_LIMIT = 64
OTHER = "other"
"""Label of every field beyond the first :data:`FIELD_LIMIT`, and of any value outside its set."""


def printable(name: str) -> str:
    """A caller's field or partition name with lone surrogates escaped: no outlet could encode them."""
    return name if name.isascii() else name.encode("utf-8", "backslashreplace").decode()


RUNGS = (
    "MooncakeStore/rdma+gdr",
    "MooncakeStore/rdma",
    "MooncakeStore/tcp",
    "SimpleStorage/zmq",
    "SimpleStorage",
    "none",
)
REASONS = (*CHECKS, *DERIVED_CHECKS, *STEP_CHECKS)

BUCKETS_S = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the histogram buckets in seconds; one more bucket holds everything above."""


@dataclass(frozen=True)
class Metric:
    """One exported metric: exact name, Prometheus type, label names, help text."""

    name: str
    kind: Literal["counter", "histogram", "gauge"]
    labels: tuple[str, ...]
    help: str


BYTES = Metric(
    "dataplane_bytes_total", "counter", ("field", "path", "direction"), "Logical payload bytes delivered, by field."
)
BYTES_UNIQUE = Metric(
    "dataplane_bytes_unique_total",
    "counter",
    ("field",),
    "Bytes put that are no copy of others of the same put.",
)
ROWS = Metric("dataplane_rows_total", "counter", ("field", "path", "direction"), "Rows delivered, by field.")
ROWS_RAW = Metric(
    "dataplane_rows_raw_total", "counter", ("field",), "Rows put as objects although the job normalises the field."
)
BYTES_WIRE = Metric(
    "dataplane_bytes_wire_total", "counter", ("field", "direction"), "Bytes handed to the storage, headers included."
)
BYTES_SAVED = Metric(
    "dataplane_bytes_saved_total", "counter", ("field", "direction"), "Payload bytes that deduplication did not move."
)
OPERATIONS = Metric(
    "dataplane_operations_total", "counter", ("direction", "result"), "Puts and gets by result; only ok delivers bytes."
)
FALLBACK = Metric("dataplane_fallback_total", "counter", ("from", "to", "reason"), "Steps down the transport ladder.")
PROCESSOR = Metric(
    "dataplane_image_processor_calls_total", "counter", ("result",), "Calls of the host's image processor, by sharing."
)
MR_REGISTER = Metric(
    "dataplane_mr_register_total", "counter", ("direction", "path"), "Memory regions registered with the transport."
)
STAGING_VALUES = Metric(
    "dataplane_staging_values_total", "counter", ("direction", "rung"), "Values moved with host staging, by memory."
)
STAGING_BYTES = Metric(
    "dataplane_staging_bytes_total", "counter", ("direction", "rung"), "Bytes moved with host staging, by memory."
)
STAGING_CAPACITY = Metric("dataplane_staging_capacity_bytes", "gauge", (), "Size of the staging pools.")
STAGING_HELD = Metric("dataplane_staging_held_bytes", "gauge", (), "Bytes of the pools that consumers hold.")
STAGING_PEAK = Metric(
    "dataplane_staging_peak_bytes", "gauge", (), "Most bytes that consumers held of each pool, summed."
)
STAGING_RETIRED = Metric(
    "dataplane_staging_retired_bytes", "gauge", (), "Bytes out of use for good: a failed transfer may still run there."
)
STAGE = Metric("dataplane_stage_seconds", "histogram", ("stage",), "Time of one completed stage.")
FANOUT = Metric("dataplane_fanout_seconds", "histogram", ("mode",), "Time to bring one batch to all ranks of a cohort.")
MR_REGISTER_SECONDS = Metric(
    "dataplane_mr_register_seconds", "histogram", (), "Time of one call that registers memory with the transport."
)
GET_ALLOC_SECONDS = Metric(
    "dataplane_get_alloc_seconds", "histogram", (), "Time of one allocation of destination memory for a get."
)
BACKEND_INFO = Metric(
    "dataplane_backend_info", "gauge", ("backend", "protocol", "device", "gdr"), "1 for the path that the job runs on."
)

METRICS: dict[str, Metric] = {
    m.name: m
    for m in (
        BYTES,
        BYTES_UNIQUE,
        ROWS,
        ROWS_RAW,
        BYTES_WIRE,
        BYTES_SAVED,
        OPERATIONS,
        FALLBACK,
        PROCESSOR,
        MR_REGISTER,
        STAGING_VALUES,
        STAGING_BYTES,
        STAGE,
        FANOUT,
        MR_REGISTER_SECONDS,
        GET_ALLOC_SECONDS,
        STAGING_CAPACITY,
        STAGING_HELD,
        STAGING_PEAK,
        STAGING_RETIRED,
        BACKEND_INFO,
    )
}


def one_of(value: str, known: tuple[str, ...]) -> str:
    """The value if its label set knows it, else :data:`OTHER`."""
    return value if value in known else OTHER
