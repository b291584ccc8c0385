"""Rows in device memory, and device tensors in rows. The memory handling also runs on the CPU; the rest needs CUDA."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from relax_tq_rdma.payload import (
    Row,
    RowFormatError,
    decode_row,
    encode_column,
    encode_rows,
    is_encoded,
    open_pieces,
    open_row,
    plan_column,
)
from relax_tq_rdma.payload.dtypes import TORCH_KINDS
from tests.payload_cases import FITS, bits, strict

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
SLEEP_CYCLES = 500_000_000
"""For which ``torch.cuda._sleep`` keeps a stream busy: a quarter of a second at 2 GHz."""


def on(device: str, row: torch.Tensor) -> Row:
    """The row opened as one in device memory; on the CPU with the device's way of handling memory."""
    return Row(row, open_row(row).frame) if device == "cpu" else open_row(row.cuda())


def to_cuda(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cuda()
    if isinstance(value, dict):
        return {key: to_cuda(item) for key, item in value.items()}
    return type(value)(map(to_cuda, value)) if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FITS)
def test_every_kind_comes_back_from_a_row_in_device_memory(name: str, device: str) -> None:
    row = FITS[name]()
    for checksum in (False, True):
        opened = on(device, encode_rows([row], checksum=checksum)[0])
        assert strict(row, opened.decode())
        assert strict(row, opened.decode(copy=True))


@pytest.mark.parametrize("device", DEVICES)
def test_its_tensors_stay_there_with_their_own_storage(device: str) -> None:
    value = {"x": bits(torch.bfloat16, (9, 7)), "a": np.arange(3), "e": torch.empty(0, 2), "y": torch.arange(5)}
    arena = encode_column([{"first": torch.zeros(100)}, value]).arena.to(device)
    begin = encode_column([{"first": torch.zeros(100)}]).offsets[1]
    row = arena[begin:]
    decoded = on(device, row).decode() if device == "cpu" else decode_row(row)
    assert decoded is not None
    assert strict(value, decoded)
    for key in ("x", "e", "y"):
        tensor = decoded[key]
        assert tensor.device.type == device
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert len(pickle.dumps(tensor)) <= tensor.nbytes + 1024
        assert strict(copy.deepcopy(tensor), value[key])
    assert decoded["y"].data_ptr() > arena.data_ptr()
    decoded["y"][0] = 77
    assert on(device, row.cpu()).decode()["y"][0] == 77  # type: ignore[index]


@pytest.mark.parametrize("device", DEVICES)
def test_its_tensors_keep_the_memory_alive(device: str) -> None:
    made = [on(device, encode_rows([{"x": torch.full((256,), float(n))}])[0]).decode() for n in range(50)]
    trash = [torch.full((1024,), -1.0, device=device) for _ in range(200)]
    assert all(row is not None and bool((row["x"] == n).all()) for n, row in enumerate(made))
    del trash


@cuda
def test_a_damaged_or_foreign_row_on_the_device_is_an_error() -> None:
    row = encode_rows([{"x": torch.ones(3), "s": "y" * 10_000}], checksum=True)[0].cuda()
    assert is_encoded(row)
    for at in (0, 5, 100, 9000, row.numel() - 70, row.numel() - 1):
        damaged = row.clone()
        damaged[at] ^= 16
        with pytest.raises(RowFormatError):
            decode_row(damaged)
    for length in (0, 3, 8, 4000, 5000, row.numel() - 64):
        with pytest.raises(RowFormatError):
            decode_row(row[:length])


@cuda
def test_device_tensors_are_copied_into_the_row() -> None:
    for name, build in FITS.items():
        row = build()
        (encoded,) = encode_rows([to_cuda(row)])
        assert encoded.is_cpu, name
        assert strict(row, decode_row(encoded)), name


@cuda
def test_device_views_are_copied_by_value() -> None:
    base = bits(torch.float32, (64, 32)).cuda()
    number = torch.randn(40, dtype=torch.complex64).cuda()  # no NaN: its sign after a negation is the device's choice
    row = {
        **{
            "t": base.t(),
            "s": base[::3, 1::2],
            "e": base[:1].expand(5, 32),
            "c": number.conj(),
            "n": number.conj().imag,
            "cs": number.conj()[::2],
        },
        "g": base.clone().requires_grad_() * 1,
    }
    decoded = decode_row(encode_rows([row])[0])
    assert decoded is not None
    assert [key for key in row if not strict(row[key], decoded[key])] == []


@cuda
@pytest.mark.parametrize("dtype", [kind.dtype for kind in TORCH_KINDS.values()], ids=list(TORCH_KINDS))
def test_every_dtype_and_layout_comes_from_the_device_by_value(dtype: torch.dtype) -> None:
    base = bits(dtype, (6, 10, 4))
    layouts = {
        "plain": lambda t: t,
        "transposed": lambda t: t.transpose(0, 2),
        "every third": lambda t: t[:, ::3],
        "expanded": lambda t: t[:1].expand(3, 10, 4),
        "one": lambda t: t[0, 0, 0],
        "none": lambda t: t[:0],
    }
    row = {name: view(base.cuda()) for name, view in layouts.items()}
    wanted = {name: view(base) for name, view in layouts.items()}
    plan = plan_column([row])
    assert strict(wanted, decode_row(encode_rows([row])[0]))
    assert strict(wanted, open_pieces(plan.pieces(0)).decode())


@cuda
def test_rows_of_the_device_and_of_the_host_share_a_put_and_a_row() -> None:
    host = bits(torch.bfloat16, (40_000,))
    rows = [{"x": host}, {"x": host.cuda()}, None, {"x": host.cuda(), "y": host[::2], "s": "z", "a": np.arange(3)}]
    wanted = [{"x": host}, {"x": host}, None, {"x": host, "y": host[::2], "s": "z", "a": np.arange(3)}]
    for checksum in (False, True):
        assert [decode_row(row) for row in encode_rows(rows, checksum=checksum)][2] is None
        assert all(map(strict, wanted, map(decode_row, encode_rows(rows, checksum=checksum))))
    pieces = plan_column(rows)
    assert all(strict(row, open_pieces(pieces.pieces(n)).decode()) for n, row in enumerate(wanted))


@cuda
def test_a_device_tensor_with_a_gradient_comes_back_without() -> None:
    leaf = torch.randn(70_000, device="cuda", requires_grad=True)
    row = {"leaf": leaf, "node": leaf * 2, "parameter": torch.nn.Parameter(leaf.detach().clone())}
    decoded = decode_row(encode_rows([row])[0])
    assert decoded is not None
    assert [key for key in row if decoded[key].requires_grad or not strict(row[key].detach().cpu(), decoded[key])] == []


@cuda
def test_rows_are_read_in_the_order_of_the_callers_stream_and_at_once() -> None:
    pixels = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(SLEEP_CYCLES)
        pixels.fill_(7)
        (row,) = encode_rows([{"x": pixels}])
        pixels.fill_(9)
        decoded = decode_row(row)
    assert decoded is not None
    assert bool((decoded["x"] == 7).all())


@cuda
def test_device_rows_dedupe_by_identity_only() -> None:
    pixels = bits(torch.bfloat16, (4096,)).cuda()
    batch = [{"x": pixels}, {"x": pixels}, {"x": pixels.clone()}, {"x": pixels.cpu()}]
    assert encode_column(batch, dedup_indexes=range(4)).sources == [0, 0, 2, 3]
