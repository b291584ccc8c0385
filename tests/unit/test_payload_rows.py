"""Encode and decode: every value comes back exactly or stays the object it was; one copy in, none out."""

from __future__ import annotations

import copy
import io
import pickle
import tracemalloc
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ray import cloudpickle

from relax_tq_rdma.payload import RowFormatError, decode_row, encode_column, encode_rows, explain
from relax_tq_rdma.payload.dtypes import TORCH_KINDS
from relax_tq_rdma.payload.format import ALIGN
from tests.payload_cases import EXAMPLES, FITS, STAYS, bits, rows, strict

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


@pytest.mark.parametrize("name", FITS)
@pytest.mark.parametrize("checksum", [False, True])
def test_every_kind_comes_back_exactly(name: str, checksum: bool) -> None:
    row = FITS[name]()
    assert explain(row) is None
    (encoded,) = encode_rows([row], checksum=checksum)
    assert encoded.dtype is torch.uint8
    assert encoded.dim() == 1
    for decoded in (decode_row(encoded), decode_row(memoryview(encoded.numpy())), decode_row(encoded, copy=True)):
        assert strict(row, decoded)
        for tensor in tensors_in(decoded):
            assert type(tensor) is torch.Tensor
            assert tensor.is_contiguous()
            assert not tensor.requires_grad
            assert not tensor.is_conj()
            assert not tensor.is_neg()


@pytest.mark.parametrize("name", STAYS)
def test_what_does_not_fit_stays_the_same_object_with_its_reason(name: str) -> None:
    build, reason = STAYS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: sparse csr and quantised tensors are deprecated or in beta
        row = build()
    assert reason in (explain(row) or "")
    column = encode_column([{}, row, None])
    assert column.rows[1] is row
    assert column.reasons == {1: explain(row)}
    assert decode_row(column.rows[0]) == {}
    assert decode_row(column.rows[2]) is None


def test_mixed_rows_keep_their_places() -> None:
    """Text-only and image samples, None, and rows that stay, in every rotation (FC-35, FC-39)."""
    picture = {"pixel_values": bits(torch.bfloat16, (8, 8)), "image_grid_thw": torch.tensor([[1, 2, 4]])}
    raw = {"x": {1}}
    column: list[Any] = [picture, {}, None, {"pixel_values": None}, raw, {"video": [[torch.ones(1)]]}, picture]
    for turn in range(len(column)):
        rotated = column[turn:] + column[:turn]
        for row, encoded in zip(rotated, encode_rows(rotated), strict=True):
            assert encoded is row if row is raw else strict(row, decode_row(encoded))
    assert [decode_row(row) for row in encode_rows([{}, {}])] == [{}, {}]
    assert [decode_row(row) for row in encode_rows([None, None])] == [None, None]
    assert encode_rows([]) == []


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(rows(), max_size=3), st.booleans())
def test_any_row_comes_back_exactly_or_stays(batch: list[Any], checksum: bool) -> None:
    for row, encoded in zip(batch, encode_rows(batch, checksum=checksum), strict=True):
        if explain(row) is None:
            assert strict(row, decode_row(encoded))
        else:
            assert encoded is row


def test_every_torch_dtype_is_named_or_left_out_on_purpose() -> None:
    left_out = ("bits", "qint", "quint", "float4_e2m1fn_x2", *(f"{s}int{n}" for s in ("", "u") for n in range(1, 8)))
    known = {str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
    unknown = {name for name in known - TORCH_KINDS.keys() if not name.startswith(("bits", "qint", "quint"))}
    assert unknown - set(left_out) == set()


def test_encoding_reads_and_changes_nothing_of_the_source() -> None:
    leaf = torch.ones(3, requires_grad=True)
    node = leaf * 2
    before = (node._version, leaf._version)
    encode_rows([{"leaf": leaf, "node": node}])
    node.sum().backward()
    assert (node._version, leaf._version) == before
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [2, 2, 2]


def test_default_device_and_dtype_do_not_matter() -> None:
    row = {"x": torch.arange(3.0), "e": torch.empty(0, 2)}
    torch.set_default_device("meta")
    try:
        decoded = decode_row(encode_rows([row])[0])
    finally:
        torch.set_default_device(None)
    assert strict(row, decoded)


# --- one copy in, none out ------------------------------------------------------------------------------------------


def allocated(work: Callable[[], object]) -> int:
    """Bytes of tensor and array memory that ``work`` asked for."""
    tracemalloc.start()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        keep = work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    del keep
    return peak + sum(max(event.self_cpu_memory_usage, 0) for event in profile.key_averages())


def test_each_payload_byte_is_copied_once_and_decode_copies_none() -> None:
    mib = 1 << 20
    base = bits(torch.uint8, (8 * mib,))
    row = {
        "plain": base.view(torch.bfloat16),
        "transposed": base.view(torch.float32).reshape(1024, 2048).t(),
        "strided": base[::2],
        "expanded": base[:mib].expand(8, mib),
        "conj": base.view(torch.complex64).conj(),
        "grad": torch.nn.Parameter(base.view(torch.float16)),
        "array": base.numpy()[::-1],
    }
    arena = torch.empty(64 * mib, dtype=torch.uint8)
    assert allocated(lambda: base.clone()) >= 8 * mib
    assert allocated(lambda: encode_rows([row], arena_allocator=lambda nbytes: arena)) < mib
    encoded = encode_rows([row])[0]
    assert allocated(lambda: decode_row(encoded)) < mib
    assert allocated(lambda: decode_row(encoded, copy=True)) < encoded.numel() + mib


def test_decoded_values_are_views_of_the_row_and_copies_are_not() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        encoded = encode_rows([{"x": torch.zeros(40, dtype=dtype), "a": np.zeros(3), "n": [torch.zeros(2, 2)]}])[0]
        view, own, other = decode_row(encoded), decode_row(encoded, copy=True), decode_row(encoded, copy=True)
        assert view is not None
        assert own is not None
        assert other is not None
        view["x"][3] = 1
        view["a"][0] = 5
        assert float(decode_row(encoded)["x"][3]) == 1  # type: ignore[index]
        assert decode_row(encoded)["a"][0] == 5  # type: ignore[index]
        assert float(own["x"][3]) == 0
        own["n"][0][0] = 9
        assert float(other["n"][0][0, 0]) == 0


def test_read_only_memory_is_copied_not_written() -> None:
    data = encode_rows([{"x": torch.zeros(40), "a": np.zeros(3)}])[0].numpy().tobytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        row = decode_row(memoryview(data))
    assert row is not None
    row["x"][0] = 7
    row["a"][0] = 7
    assert strict(decode_row(memoryview(data)), {"x": torch.zeros(40), "a": np.zeros(3)})


def test_decoded_tensors_keep_the_memory_alive() -> None:
    made = [decode_row(encode_rows([{"x": torch.full((256,), float(n))}])[0]) for n in range(50)]
    trash = [torch.full((1024,), -1.0) for _ in range(200)]
    assert all(row is not None and (row["x"] == n).all() for n, row in enumerate(made))
    del trash


def test_the_arena_is_one_buffer_and_every_byte_of_it_is_written() -> None:
    poison = torch.full((1 << 16,), 0xAA, dtype=torch.uint8)
    batch = [{"x": torch.zeros(n, dtype=torch.uint8)} for n in (0, 1, 63, 64, 65)] + [None, {"a": np.zeros(3, "u1")}]
    for checksum in (False, True):
        poison.fill_(0xAA)
        asked: list[int] = []

        def lend(nbytes: int, asked: list[int] = asked) -> torch.Tensor:
            asked.append(nbytes)
            return poison

        column = encode_column(batch, arena_allocator=lend, checksum=checksum)
        assert asked == [column.offsets[-1]] == [column.arena.numel()]
        assert column.arena.data_ptr() == poison.data_ptr()
        for at, row in zip(column.offsets, column.rows, strict=False):
            assert row.data_ptr() == poison.data_ptr() + at
            assert at % ALIGN == 0
        clean = encode_column(batch, put_id=column.put, checksum=checksum)
        assert torch.equal(column.arena, clean.arena)
        assert (poison[column.offsets[-1] :] == 0xAA).all()


def test_an_arena_that_cannot_hold_the_rows_is_refused() -> None:
    wrong = {
        "cannot hold": [torch.empty(64, dtype=torch.uint8), torch.empty(4096, dtype=torch.uint8)[8:]],
        "contiguous 1-D uint8 CPU tensor": [torch.empty(4096), torch.empty(4096, dtype=torch.uint8, device="meta")],
    }
    for message, arenas in wrong.items():
        for arena in arenas:
            with pytest.raises(ValueError, match=message):
                encode_rows([{"x": torch.ones(9)}], arena_allocator=lambda nbytes, arena=arena: arena)


def test_a_lease_with_an_offset_is_written_in_the_right_place() -> None:
    block = torch.zeros(8192, dtype=torch.uint8)
    row = {"x": bits(torch.float64, (7, 3)).t(), "y": bits(torch.complex128, (5,))}
    (encoded,) = encode_rows([row], arena_allocator=lambda nbytes: block[128:])
    assert encoded.data_ptr() == block.data_ptr() + 128
    assert strict(row, decode_row(encoded))
    assert not block[:128].any()


def test_the_column_is_the_jagged_tensor_of_its_rows() -> None:
    column = encode_column([{"x": torch.ones(n)} for n in (1, 100, 3)])
    nested = column.jagged()
    assert nested.layout is torch.jagged
    assert nested.values().data_ptr() == column.arena.data_ptr()
    assert all(torch.equal(a, b) for a, b in zip(nested.unbind(), column.rows, strict=True))


# --- what a decoded tensor costs to pass on -------------------------------------------------------------------------


def saved(value: object) -> int:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.tell()


def carried_by_ray(value: object) -> int:
    """Bytes of a task's return value as Ray serialises it: cloudpickle with out-of-band buffers."""
    buffers: list[pickle.PickleBuffer] = []
    inband = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return len(inband) + sum(buffer.raw().nbytes for buffer in buffers)


def batch_of(count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    encoded = encode_rows([{"x": bits(dtype, (64, 128), n), "y": torch.zeros(3, 0)} for n in range(count)])
    decoded = [decode_row(row) for row in encoded]
    return [row["x"] for row in decoded if row is not None]


@pytest.mark.parametrize("count", [1, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64])
def test_a_decoded_tensor_costs_its_own_bytes_to_pass_on(count: int, dtype: torch.dtype) -> None:
    tensors = batch_of(count, dtype)
    own = sum(tensor.nbytes for tensor in tensors)
    fresh = [tensor.clone() for tensor in tensors]
    for size in (lambda v: len(pickle.dumps(v)), lambda v: len(pickle.dumps(v, 5)), carried_by_ray):
        assert own <= size(tensors) <= own + 1024 * count
    assert saved(tensors) <= saved(fresh)  # an empty file of torch.save alone is 1.5 KiB
    for value in (tensors[0], {"x": tensors}):
        assert carried_by_ray(value) <= carried_by_ray(copy.deepcopy(value))
    for twin in copy.deepcopy(tensors):
        assert twin.untyped_storage().nbytes() == twin.nbytes
    for tensor in tensors:
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert tensor.storage_offset() == 0


def test_a_decoded_array_costs_its_own_bytes_to_pass_on() -> None:
    encoded = encode_rows([{"x": np.full((64, 64), float(n))} for n in range(64)])
    arrays = [row["x"] for row in map(decode_row, encoded) if row is not None]
    own = sum(array.nbytes for array in arrays)
    for size in (lambda v: len(pickle.dumps(v)), carried_by_ray):
        assert own <= size(arrays) <= own + 1024 * len(arrays)
    assert saved(arrays) <= saved([array.copy() for array in arrays])


def test_passed_on_values_are_right() -> None:
    (tensor,) = batch_of(1, torch.float32)
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    buffer.seek(0)
    for twin in (pickle.loads(pickle.dumps(tensor)), copy.deepcopy(tensor), torch.load(buffer)):  # noqa: S301
        assert strict(tensor, twin)


# --- edges ----------------------------------------------------------------------------------------------------------


def test_a_put_id_is_16_bytes() -> None:
    with pytest.raises(ValueError, match="16 bytes, not 3"):
        encode_rows([{}], put_id=b"abc")


def test_decoding_an_original_object_is_an_error_not_a_guess() -> None:
    with pytest.raises(RowFormatError, match="not an RTQ1 row"):
        decode_row(torch.zeros(64, dtype=torch.uint8))
