"""Rows as a column: what TransferQueue's own manager makes of them, and whose memory it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict
from transfer_queue.storage.managers.base import KVStorageManager

from relax_tq_rdma.staging.columns import as_column, rows_of, with_rows
from tests.payload_cases import same

pytestmark = pytest.mark.tq_versions

slab = torch.arange(60.0)
ROWS: dict[str, list[Any]] = {
    "one shape": [torch.ones(3), torch.zeros(3)],
    "lengths": [torch.arange(2), torch.arange(5), torch.arange(0)],
    "matrices": [torch.ones(2, 3), torch.ones(4, 3)],
    "side by side": [slab[:12].view(3, 4), slab[12:20].view(2, 4)],
    "a gap between": [slab[:12].view(3, 4), slab[16:20].view(1, 4)],
    "other widths": [torch.ones(2, 3), torch.ones(2, 4)],
    "other ranks": [torch.ones(2), torch.ones(2, 2)],
    "dtypes": [torch.ones(2), torch.ones(2, dtype=torch.bfloat16)],
    "scalars": [torch.tensor(True), torch.tensor(False)],
    "scalar dtypes": [torch.tensor(1.5), torch.tensor(2)],
    "scalars and vectors": [torch.tensor(1.5), torch.ones(1)],
    "one": [torch.ones(4)],
    "empty": [torch.ones(0), torch.ones(0)],
    "none between": [torch.ones(2), None, torch.ones(2)],
    "none first": [None, torch.ones(2)],
    "dicts": [{"a": torch.ones(2)}, None, {}],
    "strings": ["a", "a"],
    "numbers": [1, True, 2.5],
    "arrays": [np.ones(2), np.ones(3)],
    "bf16": [torch.ones(2, dtype=torch.bfloat16), torch.ones(5, dtype=torch.bfloat16)],
}


class _Upstream(KVStorageManager):
    def __init__(self) -> None:
        pass

    def _get_executor(self) -> None:
        return None

    def close(self) -> None:
        pass


@pytest.mark.parametrize("name", ROWS)
def test_a_column_is_what_upstream_makes_of_the_rows(name: str) -> None:
    rows = ROWS[name]
    metadata = SimpleNamespace(global_indexes=list(range(len(rows))), field_names=["f"])
    wanted = _Upstream()._merge_tensors_to_tensordict(metadata, list(rows))["f"]
    got = TensorDict({"f": as_column(rows)}, batch_size=len(rows))["f"]
    assert type(got) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert (got.layout, got.dtype, got.is_nested, got.dim()) == (
            wanted.layout,
            wanted.dtype,
            wanted.is_nested,
            wanted.dim(),
        )
        assert all(map(same, got.unbind(), wanted.unbind()))
    else:
        assert all(map(same, got.tolist(), wanted.tolist()))


def test_rows_side_by_side_are_not_copied() -> None:
    rows = ROWS["side by side"]
    column = as_column(rows)
    assert column.values().data_ptr() == rows[0].data_ptr()
    assert column.values().untyped_storage().nbytes() == 20 * 4  # not the whole slab


def test_rows_of_plain_objects() -> None:
    rows = [{"a": 1}, None, {}]
    data = TensorDict({"x": NonTensorStack(*rows), "y": torch.ones(3)}, batch_size=3)
    assert rows_of(data, "x") == rows
    assert rows_of(data, "y") is None
    assert rows_of(data, "z") is None
    changed = with_rows(data, "x", [1, 2, 3])
    assert rows_of(changed, "x") == [1, 2, 3]
    assert rows_of(data, "x") == rows


def test_rows_that_are_one_object_are_rows_all_the_same() -> None:
    row = {"a": torch.ones(1)}
    data = TensorDict({"x": NonTensorStack(row, row)}, batch_size=2)
    found = rows_of(data, "x")
    assert found is not None
    assert all(one is row for one in found)
