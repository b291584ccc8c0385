"""One column of a batch as rows, and rows as a column, in the shapes that TransferQueue gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from relax_tq_rdma.staging.jagged import jagged_view


def rows_of(data: Any, field: str) -> list[Any] | None:
    """The rows of a column of plain objects; ``None`` when the batch has no such column or holds it as tensors.

    Args:
        data: a ``TensorDict`` whose first batch dimension is the rows.
        field: name of the column.
    """
    column = data.get(field, None) if len(data.batch_size) == 1 else None
    if isinstance(column, NonTensorStack):
        rows = column.tolist()
    elif isinstance(column, NonTensorData) and (column.data is None or type(column.data) is dict):
        rows = [column.data] * data.batch_size[0]  # tensordict folds rows that are one object
    else:
        return None
    return rows if isinstance(rows, list) and len(rows) == data.batch_size[0] else None


def with_rows(data: Any, field: str, rows: Sequence[Any]) -> Any:
    """The batch with one column replaced by plain objects; ``data`` itself is not changed."""
    columns = {name: data.get(name) for name in data.keys()}  # noqa: SIM118  a TensorDict iterates over rows, not keys
    columns[field] = NonTensorStack(*rows)
    return TensorDict(columns, batch_size=data.batch_size)


def as_column(rows: Sequence[Any]) -> Any:
    """Rows of one field as a column: what TransferQueue's ``KVStorageManager`` makes of them, without its copy.

    Returns:
        Dense for 0-dim tensors, else a jagged nested tensor (over the rows' own memory where they lie side by side), a
        strided one where the rows do not fit that, or a ``NonTensorStack`` where they fit neither.
    """
    if not all(isinstance(row, torch.Tensor) for row in rows):
        return NonTensorStack(*rows)
    if all(row.dim() == 0 for row in rows):
        return torch.stack(list(rows))
    view = jagged_view(rows)
    if view is not None:
        return view
    for layout in (torch.jagged, torch.strided):
        try:
            return torch.nested.as_nested_tensor(list(rows), layout=layout)
        except (RuntimeError, TypeError):
            continue
    return NonTensorStack(*rows)
