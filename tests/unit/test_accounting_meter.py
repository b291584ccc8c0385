"""Byte accounting is exact on known payloads (RFC §5.2.1, FC-42, FC-44)."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from relax_tq_rdma.accounting import measure


def one(column, *, content=False):
    """Stats of a batch with one column that takes one path."""
    (stats,) = measure({"x": column}, content=content).fields
    return stats


def sizes(column, *, content=False):
    stats = one(column, content=content)
    return stats.path, stats.rows, stats.bytes, stats.unique_bytes


# --- tensor columns: the fast path ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64, torch.bool])
def test_dense_column(dtype):
    expected = 6 * torch.empty(0, dtype=dtype).element_size()
    assert sizes(torch.zeros(3, 2, dtype=dtype)) == ("fast", 3, expected, expected)


def test_dense_column_names_its_dtype():
    assert one(torch.zeros(3, dtype=torch.bfloat16)).dtypes == ("bfloat16",)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_column_counts_its_rows(layout):
    rows = [torch.zeros(2, 5), torch.zeros(3, 5), torch.zeros(1, 5)]
    assert sizes(torch.nested.as_nested_tensor(rows, layout=layout)) == ("fast", 3, 120, 120)


def test_nested_column_with_holes_counts_rows_not_values():
    parent = torch.arange(12).reshape(3, 4)
    holes = torch.nested.narrow(parent, 1, torch.tensor([0, 1, 2]), torch.tensor([1, 2, 2]), layout=torch.jagged)
    assert holes.values().numel() == 12
    assert sizes(holes) == ("fast", 3, 5 * 8, 5 * 8)


def test_jagged_column_ragged_in_a_later_dimension():
    rows = [torch.zeros(4, n) for n in (2, 3)]
    ragged_later = torch.nested.as_nested_tensor([row.t() for row in rows], layout=torch.jagged).transpose(1, 2)
    assert sizes(ragged_later) == ("fast", 2, 80, 80)


def test_jagged_column_of_one_repeated_row_by_content():
    jagged = torch.nested.as_nested_tensor([torch.ones(3)] * 4, layout=torch.jagged)
    assert sizes(jagged, content=True) == ("fast", 4, 48, 12)


def test_jagged_column_with_empty_rows():
    rows = [torch.zeros(0, 3), torch.zeros(2, 3), torch.zeros(0, 3)]
    assert sizes(torch.nested.as_nested_tensor(rows, layout=torch.jagged)) == ("fast", 3, 24, 24)


@pytest.mark.parametrize(
    ("tensor", "logical", "unique"),
    [
        (torch.arange(6.0).reshape(2, 3).t(), 24, 24),
        (torch.arange(10.0)[::3], 16, 16),
        (torch.zeros(2048, 512)[:1], 2048, 2048),
        (torch.zeros(1, 8).expand(64, 8), 2048, 32),
        (torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last), 384, 384),
        (torch.ones(3, requires_grad=True) * 2, 12, 12),
        (torch.nn.Parameter(torch.ones(3)), 12, 12),
        (torch.zeros(4, dtype=torch.complex64).conj(), 32, 32),
        (torch.arange(8.0).unfold(0, 4, 1), 80, 32),
        (torch.zeros(3, 0), 0, 0),
        (torch.zeros(5, device="meta"), 20, 20),
    ],
)
def test_logical_bytes_of_views(tensor, logical, unique):
    """FC-42: counters equal the sum of numel x element_size, never the size of the storage."""
    stats = one(tensor)
    assert (stats.bytes, stats.unique_bytes) == (logical, unique)
    assert stats.bytes == tensor.numel() * tensor.element_size()


def test_sparse_tensor_counts_its_parts():
    sparse = torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (3,))
    assert one([sparse.coalesce()]).bytes == 2 * 8 + 2 * 4
    csr = torch.eye(3).to_sparse_csr()
    assert one([csr]).bytes == 4 * 8 + 3 * 8 + 3 * 4


# --- object columns: the slow path ------------------------------------------------------------------------------------


def image(patches=4):
    return {"pixel_values": torch.zeros(patches, 6), "image_grid_thw": torch.ones(1, 3, dtype=torch.int64)}


def test_dict_rows_and_none_rows_in_a_tensordict():
    batch = measure(TensorDict({"mm": [image(4), None, image(2)]}, batch_size=3))
    (stats,) = batch.fields
    assert (stats.path, stats.rows, stats.bytes) == ("slow", 3, 4 * 24 + 24 + 2 * 24 + 24)
    assert stats.unique_bytes == stats.bytes
    assert stats.dtypes == ("float32", "int64")
    assert batch.rows == 3


def test_a_group_that_shares_its_payload_counts_it_once():
    shared = image()
    stats = one(NonTensorStack(*[shared] * 8))
    assert (stats.bytes, stats.unique_bytes) == (8 * 120, 120)


def test_a_group_that_shares_tensors_in_own_dicts_counts_them_once():
    shared = image()
    stats = one([dict(shared) for _ in range(8)])
    assert (stats.bytes, stats.unique_bytes) == (8 * 120, 120)


def test_equal_but_separate_payloads_are_unique_by_identity_and_copies_by_content():
    rows = [image() for _ in range(8)]
    assert sizes(rows)[2:] == (960, 960)
    # The grids of all rows are equal, the pixels too: 96 + 24 bytes are original.
    assert sizes(rows, content=True)[2:] == (960, 120)


def test_content_tells_dtype_and_shape_apart():
    same_bytes = [torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32)]
    assert sizes([[t] for t in same_bytes], content=True)[2:] == (48, 48)


def test_content_sees_one_different_byte():
    a, b = torch.zeros(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    b[99] = 1
    assert sizes([{"p": a}, {"p": b}], content=True)[3] == 200


def test_content_works_row_by_row_on_a_dense_column():
    assert sizes(torch.zeros(8, 4), content=True) == ("fast", 8, 128, 16)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.5),
        torch.zeros(3, dtype=torch.bool),
        torch.ones(2, dtype=torch.bfloat16),
        torch.arange(6.0)[::2],
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(3, requires_grad=True),
    ],
)
def test_content_digests_every_kind_of_tensor(tensor):
    size = tensor.numel() * tensor.element_size()
    assert sizes([{"p": tensor}, {"p": tensor.clone()}], content=True)[2:] == (2 * size, size)


def test_overlapping_views_count_their_union():
    parent = torch.zeros(100, dtype=torch.uint8)
    rows = [{"a": parent[0:60]}, {"a": parent[40:100]}, {"a": parent[10:20]}]
    assert sizes(rows)[2:] == (130, 100)


def test_interleaved_strided_views_count_their_union():
    parent = torch.zeros(12, dtype=torch.uint8)
    assert sizes([{"a": parent[0::2]}, {"a": parent[0::3]}])[2:] == (6 + 4, 8)


def test_numpy_view_and_tensor_of_the_same_memory_count_once():
    array = np.zeros(16, dtype=np.float32)
    assert sizes([{"n": array, "t": torch.from_numpy(array)}])[2:] == (128, 64)


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (None, 0),
        (True, 1),
        (7, 8),
        (1 << 200, 8),
        (1.5, 8),
        (1j, 16),
        ("", 0),
        ("é", 2),
        ("\ud800", 3),
        (b"a\0b", 3),
        (bytearray(5), 5),
        pytest.param(memoryview(np.zeros(4, dtype=np.int32)), 16, id="memoryview"),
        (np.float32(1), 4),
        (np.zeros((2, 3), dtype=">i4"), 24),
        (np.arange(6)[::-1], 48),
        (np.zeros((4, 4), dtype=np.uint8).T, 16),
        (np.array(3.0), 8),
        (np.array(["x", "yy"]), 16),
        (np.array([None, 1, b"abc"], dtype=object), 11),
        (np.zeros(2, dtype=[("a", "i4"), ("b", "f8")]), 24),
        ([1, [2, (3, {"k": 4})]], 32),
        ({1: b"xx", "@/.": b"y"}, 3),
        ({1, 2}, 16),
        ([], 0),
        ({}, 0),
        ([[torch.zeros(2)], [torch.zeros(1), torch.zeros(1)], []], 16),
    ],
    ids=str,
)
def test_every_leaf_has_a_documented_size(value, size):
    stats = one([value, None])
    assert (stats.path, stats.rows, stats.bytes, stats.unmeasured) == ("slow", 2, size, 0)


def test_unknown_objects_add_no_bytes_and_are_said():
    stats = one([SimpleNamespace(secret=torch.zeros(4)), {"a": 1}])
    assert (stats.bytes, stats.unmeasured) == (8, 1)


def test_a_container_that_holds_itself_is_not_followed():
    row = {"t": torch.zeros(4)}
    row["me"] = row
    stats = one([row])
    assert (stats.bytes, stats.unmeasured) == (16, 1)


def test_containers_that_branch_on_themselves_end():
    row = [torch.zeros(4)]
    row += [row, row, row]
    assert one([row]).bytes == 16


def test_the_same_tensor_at_two_places_of_a_sample_counts_twice_and_is_unique_once():
    t = torch.zeros(4)
    assert sizes([{"a": t, "b": [t]}])[2:] == (32, 16)


def test_shared_strings_and_bytes_are_unique_once():
    picture = bytes(1000)
    assert sizes([{"p": picture} for _ in range(4)])[2:] == (4000, 1000)


def test_tensor_rows_of_an_object_column_are_fast():
    """TransferQueue's ``_generate_values`` hands each such row to its tensor path."""
    assert sizes(NonTensorStack(torch.zeros(2), torch.zeros(3))) == ("fast", 2, 20, 20)


def test_a_mixed_column_is_split_by_path_and_adds_up():
    shared = torch.zeros(10)
    stats = {s.path: s for s in measure({"x": [shared, {"p": shared}, None, torch.zeros(1)]}).fields}
    assert (stats["fast"].rows, stats["fast"].bytes, stats["fast"].unique_bytes) == (2, 44, 44)
    assert (stats["slow"].rows, stats["slow"].bytes, stats["slow"].unique_bytes) == (2, 40, 0)


def test_path_is_the_one_transferqueue_takes():
    """The same rule as upstream, asked of upstream: is the generated value a tensor?"""
    base = pytest.importorskip("transfer_queue.storage.managers.base")
    td = TensorDict(
        {
            "dense": torch.zeros(3, 2),
            "jagged": torch.nested.as_nested_tensor([torch.zeros(n) for n in (1, 2, 3)], layout=torch.jagged),
            "dicts": [image(), None, image()],
            "mixed": NonTensorStack(torch.zeros(2), {"a": 1}, torch.zeros(3)),
            "text": ["a", "b", "c"],
            "lists": [[torch.zeros(2)], [torch.zeros(1), torch.zeros(1)], [torch.zeros(3)]],
            "inner": TensorDict({"q": torch.zeros(3, 2)}, batch_size=3),
        },
        batch_size=3,
    )
    for stats in measure(td).fields:
        values = base.KVStorageManager._generate_values(td.select(stats.name))
        fast = sum(isinstance(value, torch.Tensor) for value in values)
        assert stats.rows == (fast if stats.path == "fast" else len(values) - fast), stats.name


def test_container_columns():
    assert sizes(TensorDict({"q": torch.zeros(3, 2)}, batch_size=3)) == ("slow", 3, 24, 24)
    assert sizes(np.zeros((3, 2), dtype=np.int16)) == ("slow", 3, 12, 12)


def test_empty_batches():
    assert measure(TensorDict({}, batch_size=0)).rows == 0
    assert measure({}).fields == ()
    assert sizes([]) == ("slow", 0, 0, 0)
    assert sizes(torch.zeros(0, 4)) == ("fast", 0, 0, 0)


def test_says_how_copies_were_told():
    assert measure({}).unique_by == "identity"
    assert measure({}, content=True).unique_by == "content"


# --- any payload ------------------------------------------------------------------------------------------------------

leaves = st.one_of(
    st.none().map(lambda v: (v, 0)),
    st.booleans().map(lambda v: (v, 1)),
    st.integers().map(lambda v: (v, 8)),
    st.floats().map(lambda v: (v, 8)),
    st.text(max_size=8).map(lambda v: (v, len(v.encode("utf-8", "surrogatepass")))),
    st.binary(max_size=8).map(lambda v: (v, len(v))),
    st.tuples(
        st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]), st.lists(st.integers(0, 4), max_size=3)
    ).map(lambda d: (torch.zeros(d[1], dtype=d[0]), int(np.prod(d[1])) * torch.empty(0, dtype=d[0]).element_size())),
    st.lists(st.integers(0, 4), max_size=3).map(lambda s: (np.zeros(s, dtype=np.int16), int(np.prod(s)) * 2)),
)


def total(parts):
    return sum(size for _, size in parts)


values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map(lambda parts: ([v for v, _ in parts], total(parts))),
        st.lists(inner, max_size=4).map(lambda parts: (tuple(v for v, _ in parts), total(parts))),
        st.dictionaries(st.text(max_size=3), inner, max_size=4).map(
            lambda d: ({k: v for k, (v, _) in d.items()}, total(d.values()))
        ),
    ),
    max_leaves=12,
)


@given(st.lists(values, min_size=1, max_size=6), st.booleans())
@settings(deadline=None, max_examples=150)
def test_a_batch_is_the_sum_of_its_leaves(rows, content):
    batch = measure({"x": [value for value, _ in rows]}, content=content)
    assert sum(stats.bytes for stats in batch.fields) == total(rows)
    assert sum(stats.rows for stats in batch.fields) == len(rows)
    assert all(0 <= stats.unique_bytes <= stats.bytes for stats in batch.fields)
    assert all(stats.unmeasured == 0 for stats in batch.fields)


@given(st.integers(1, 8), st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=6))
@settings(deadline=None, max_examples=100)
def test_unique_bytes_of_slices_of_one_storage(copies, bounds):
    parent = torch.zeros(40, dtype=torch.uint8)
    slices = [slice(min(pair), max(pair)) for pair in bounds]
    rows = [{"p": parent[s]} for s in slices] * copies
    covered = set().union(*(range(40)[s] for s in slices))
    assert sizes(rows)[3] == len(covered)
