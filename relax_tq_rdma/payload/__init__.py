"""L2 and the pure part of L3b: rows of a column as self-describing bytes, written once, read without a copy.

``encode_rows`` and ``decode_row`` are the whole story of a row; ``explain`` says why one stays as it is. The format:
``docs/reference/row-format.md``.
"""

from relax_tq_rdma.payload.decode import Row, decode_row, is_encoded, open_pieces, open_row
from relax_tq_rdma.payload.encode import (
    Allocator,
    ColumnPlan,
    EncodedColumn,
    PlannedRow,
    encode_column,
    encode_rows,
    plan_column,
)
from relax_tq_rdma.payload.format import NewerRowError, RowFormatError
from relax_tq_rdma.payload.plan import explain
from relax_tq_rdma.payload.resolve import Resolution, StaleReferenceError, check_source, plan_resolution, stale

__all__ = [
    "Allocator",
    "ColumnPlan",
    "EncodedColumn",
    "NewerRowError",
    "PlannedRow",
    "Resolution",
    "Row",
    "RowFormatError",
    "StaleReferenceError",
    "check_source",
    "decode_row",
    "encode_column",
    "encode_rows",
    "explain",
    "is_encoded",
    "open_pieces",
    "open_row",
    "plan_column",
    "plan_resolution",
    "stale",
]
