"""One column of a batch, as TransferQueue carries it, as a list of rows and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import NonTensorData, NonTensorStack, TensorDict


def rows_of(data: Any, field: str) -> list[Any] | None:
    """The rows of a column of plain objects; ``None`` when the batch has no such column or holds it as tensors.

    Args:
        data: a ``TensorDict`` whose first batch dimension is the rows.
        field: name of the column.
    """
    column = data.get(field, None)
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
