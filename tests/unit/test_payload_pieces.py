"""Rows in pieces: the same bytes as in one, no copy of what is large, and no piece that is out of place is believed."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_tq_rdma.payload import RowFormatError, explain, open_pieces, plan_column
from relax_tq_rdma.payload import encode as encoding
from tests.payload_cases import EXAMPLES, FITS, rows, strict

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")


@pytest.fixture(autouse=True)
def small_pieces() -> Iterator[None]:
    """Tensors of a few bytes are pieces, so that every case has some."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "PIECE_BYTES", 8)
        yield


def picture() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.rand(16, 12), "image_grid_thw": torch.tensor([[1, 4, 4]]), "flag": torch.tensor(True)}


@pytest.mark.parametrize("name", FITS)
@pytest.mark.parametrize("checksum", [False, True])
def test_the_pieces_are_the_row(name: str, checksum: bool) -> None:
    row = FITS[name]()
    plan = plan_column([row], checksum=checksum)
    pieces = plan.pieces(0)
    (joined,) = plan.write([0], encoding.ordinary_memory(plan.nbytes(0)))
    assert torch.equal(torch.cat(pieces), joined)
    opened = open_pieces(pieces)
    assert opened.nbytes == plan.nbytes(0)
    assert opened.payload_bytes == plan.payload_bytes(0)
    for decoded in (opened.decode(), opened.decode(copy=True), opened.copied().decode()):
        assert strict(row, decoded)


def test_a_large_tensor_is_never_copied_and_small_things_ride_together() -> None:
    row = picture()
    head, pixels, grid, tail = plan_column([row]).pieces(0)
    assert pixels.data_ptr() == row["pixel_values"].data_ptr()
    assert grid.data_ptr() == row["image_grid_thw"].data_ptr()
    assert bytes(tail.tolist()).strip(b"\0") == b"\x01"
    decoded = open_pieces([head, pixels, grid, tail]).decode()
    assert decoded is not None
    assert decoded["pixel_values"].data_ptr() == pixels.data_ptr()
    assert decoded["pixel_values"].untyped_storage().nbytes() == 16 * 12 * 4


def test_a_decoded_tensor_costs_its_own_bytes_to_pickle_and_save() -> None:
    decoded = open_pieces(plan_column([picture()]).pieces(0)).decode()
    assert decoded is not None
    file = io.BytesIO()
    torch.save(decoded["pixel_values"], file)
    for cost in (len(pickle.dumps(decoded["pixel_values"])), file.tell()):
        assert cost <= 16 * 12 * 4 + 2048


def test_read_only_arrays_are_copied_because_a_tensor_could_be_written() -> None:
    frozen = np.arange(100, dtype=np.uint8)
    frozen.flags.writeable = False
    pieces = plan_column([{"x": frozen}]).pieces(0)
    for piece in pieces:
        piece.fill_(7)
    assert frozen.tolist() == list(range(100))


def test_copies_are_independent_of_the_pieces() -> None:
    pieces = plan_column([picture()]).pieces(0)
    pieces = [piece.clone() for piece in pieces]
    opened = open_pieces(pieces)
    before, copied = opened.decode(copy=True), opened.copied()
    for piece in pieces:
        piece.fill_(0xA5)
    assert before is not None
    assert strict(before, copied.decode())
    assert before["image_grid_thw"].tolist() == [[1, 4, 4]]


def test_pieces_that_are_missing_doubled_or_out_of_order_are_refused() -> None:
    head, pixels, grid, tail = plan_column([picture()]).pieces(0)
    for wrong in (
        [],
        [pixels],
        [head],
        [head, pixels, grid],
        [head, pixels, grid, tail, tail],
        [pixels, head, grid, tail],
    ):
        with pytest.raises(RowFormatError):
            open_pieces(wrong).decode()
    with pytest.raises(RowFormatError, match="cut in two by the end of a piece"):
        open_pieces([head, grid, pixels, tail]).decode()
    with pytest.raises(RowFormatError, match=r"header of .* bytes is cut in two"):
        open_pieces([head[:50], head[50:], pixels, grid, tail])
    with pytest.raises(RowFormatError, match="contiguous 1-D uint8"):
        open_pieces([head, pixels.view(torch.float32), grid, tail])


def test_a_checksum_is_checked_over_pieces_too() -> None:
    (whole,) = plan_column([picture()], checksum=True).pieces(0)
    cut = [whole[:-128].clone(), whole[-128:].clone()]
    assert strict(open_pieces(cut).decode(), open_pieces([whole]).decode())
    cut[1][5] ^= 1
    with pytest.raises(RowFormatError, match="payload is damaged"):
        open_pieces(cut).decode()


@settings(max_examples=EXAMPLES, deadline=None)
@given(rows(), st.lists(st.floats(0, 1), max_size=4))
def test_any_row_cut_anywhere_is_right_or_refused(row: object, cuts: list[float]) -> None:
    if explain(row) is not None:
        return
    plan = plan_column([row])
    (joined,) = plan.write([0], encoding.ordinary_memory(plan.nbytes(0)))
    places = sorted({0, len(joined), *(int(cut * len(joined)) for cut in cuts)})
    pieces = [joined[start:end] for start, end in pairwise(places)]
    try:
        decoded = open_pieces(pieces).decode()
    except RowFormatError as exc:
        assert "cut in two" in str(exc) or len(pieces[0]) < 8  # noqa: PT017
    else:
        assert strict(row, decoded)
