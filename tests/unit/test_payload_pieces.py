"""Rows in pieces: the same bytes as in one, no copy of what is large, and no piece that is out of place is believed."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_tq_rdma.payload import RowFormatError, explain, open_pieces, plan_column
from relax_tq_rdma.payload import encode as encoding
from relax_tq_rdma.payload.encode import ColumnPlan, Piece
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


def joined(pieces: Iterable[Piece]) -> bytes:
    return b"".join(map(bytes, pieces))


def whole(plan: ColumnPlan) -> np.ndarray:
    """The first row in one piece."""
    (row,) = plan.write([0], encoding.ordinary_memory(plan.nbytes(0)))
    return row.numpy()


@pytest.mark.parametrize("name", FITS)
@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("inline", [0, encoding.INLINE_BYTES])
def test_the_pieces_are_the_row(name: str, checksum: bool, inline: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "INLINE_BYTES", inline)
    row = FITS[name]()
    plan = plan_column([row], checksum=checksum)
    pieces = plan.pieces(0)
    assert joined(pieces) == bytes(whole(plan))
    assert all(len(piece) <= inline for piece in pieces if isinstance(piece, bytes))
    opened = open_pieces(pieces)
    assert opened.nbytes == plan.nbytes(0)
    assert opened.payload_bytes == plan.payload_bytes(0)
    for decoded in (opened.decode(), opened.decode(copy=True), opened.copied().decode()):
        assert strict(row, decoded)


def test_a_large_tensor_is_never_copied_and_small_things_ride_together() -> None:
    row = picture()
    head, pixels, grid, tail = plan_column([row]).pieces(0)
    assert pixels.ctypes.data == row["pixel_values"].data_ptr()
    assert grid.ctypes.data == row["image_grid_thw"].data_ptr()
    assert (type(head), type(tail)) == (bytes, bytes)
    assert tail.strip(b"\0") == b"\x01"
    decoded = open_pieces([head, pixels, grid, tail]).decode()
    assert decoded is not None
    assert decoded["pixel_values"].data_ptr() == pixels.ctypes.data
    assert decoded["pixel_values"].untyped_storage().nbytes() == 16 * 12 * 4


def test_what_comes_from_a_byte_string_can_be_written_to_and_the_string_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "PIECE_BYTES", 512)
    head, pixels, tail = plan_column([picture()]).pieces(0)
    before = bytes(bytearray(tail))
    decoded = open_pieces([head, pixels, tail]).decode()
    assert decoded is not None
    assert decoded["pixel_values"].data_ptr() == pixels.ctypes.data, "the large one is still not copied"
    decoded["image_grid_thw"].fill_(7)
    decoded["flag"].logical_not_()
    assert tail == before
    assert decoded["image_grid_thw"].tolist() == [[7, 7, 7]]
    assert decoded["image_grid_thw"].untyped_storage().nbytes() == 3 * 8


def test_a_decoded_tensor_costs_its_own_bytes_to_pickle_and_save() -> None:
    decoded = open_pieces(plan_column([picture()]).pieces(0)).decode()
    assert decoded is not None
    file = io.BytesIO()
    torch.save(decoded["pixel_values"], file)
    for cost in (len(pickle.dumps(decoded["pixel_values"])), file.tell()):
        assert cost <= 16 * 12 * 4 + 2048


def test_what_is_decoded_from_read_only_memory_can_be_written_to_and_the_memory_stays() -> None:
    frozen = np.arange(100, dtype=np.uint8)
    frozen.flags.writeable = False
    decoded = open_pieces(plan_column([{"x": frozen}]).pieces(0)).decode()
    assert decoded is not None
    decoded["x"].fill(7)
    assert frozen.tolist() == list(range(100))


def test_copies_are_independent_of_the_pieces() -> None:
    pieces = [np.array(bytearray(piece), np.uint8) for piece in plan_column([picture()]).pieces(0)]
    opened = open_pieces(pieces)
    before, copied = opened.decode(copy=True), opened.copied()
    for piece in pieces:
        piece.fill(0xA5)
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
    with pytest.raises(RowFormatError, match="bytes or a uint8 array, this is an array of float32"):
        open_pieces([head, pixels.view(np.float32), grid, tail])


def test_a_checksum_is_checked_over_pieces_too() -> None:
    (row,) = plan_column([picture()], checksum=True).pieces(0)
    cut = [row[:-128], bytearray(row[-128:])]
    assert strict(open_pieces(list(map(bytes, cut))).decode(), open_pieces([row]).decode())
    cut[1][5] ^= 1
    with pytest.raises(RowFormatError, match="payload is damaged"):
        open_pieces(list(map(bytes, cut))).decode()


@settings(max_examples=EXAMPLES, deadline=None)
@given(rows(), st.lists(st.floats(0, 1), max_size=4), st.integers(0, 31))
def test_any_row_cut_anywhere_is_right_or_refused(row: object, cuts: list[float], strings: int) -> None:
    """``strings``: which pieces are byte strings, a bit each."""
    if explain(row) is not None:
        return
    row_bytes = whole(plan_column([row]))
    places = sorted({0, len(row_bytes), *(int(cut * len(row_bytes)) for cut in cuts)})
    arrays = [row_bytes[start:end] for start, end in pairwise(places)]
    pieces = [bytes(array) if strings >> at & 1 else array for at, array in enumerate(arrays)]
    try:
        decoded = open_pieces(pieces).decode()
    except RowFormatError as exc:
        assert "cut in two" in str(exc) or len(pieces[0]) < 8  # noqa: PT017
    else:
        assert strict(row, decoded)
