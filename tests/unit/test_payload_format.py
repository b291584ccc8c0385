"""The row format: damage of any kind is one clear error, and what a header claims is checked before it is believed."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import google_crc32c
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_tq_rdma.payload import RowFormatError, decode_row, encode_rows, is_encoded, open_row
from relax_tq_rdma.payload.format import ALIGN, aligned, encode_frame
from relax_tq_rdma.payload.plan import plan_row
from tests.payload_cases import EXAMPLES, bits, strict

PUT = bytes(range(16))
SMALL = {"pixel_values": torch.arange(5, dtype=torch.int16), "n": [1, "x"], "grid": np.ones(3)}


def row_of(value: Any = SMALL, **options: Any) -> bytearray:
    return bytearray(encode_rows([value], put_id=PUT, **options)[0].numpy().tobytes())


def framed(header: Any, data: bytes = b"", *, magic: bytes = b"RTQ1") -> memoryview:
    """A row around any header, with a correct crc: what a broken or hostile writer could send."""
    body = header if isinstance(header, bytes) else msgspec.msgpack.encode(header)
    frame = magic + len(body).to_bytes(4, "little") + body
    frame += google_crc32c.value(frame).to_bytes(4, "little")
    return memoryview(bytearray(frame + bytes(-len(frame) % ALIGN) + data))


def header_of(*entries: dict[str, Any], size: int = 0, **more: Any) -> dict[str, Any]:
    return {"v": 1, "put": PUT, "ord": 0, "size": size, "entries": list(entries), **more}


def tensor_entry(**changes: Any) -> dict[str, Any]:
    entry = {"kind": "tensor", "key": "x", "dtype": "float32", "shape": [4], "offset": 0, "nbytes": 16}
    return {**entry, **changes}


def test_layout_is_as_documented() -> None:
    row = bytes(row_of({"x": torch.tensor([1, 2], dtype=torch.int16), "s": "é"}))
    length = int.from_bytes(row[4:8], "little")
    header = msgspec.msgpack.decode(row[8 : 8 + length])
    assert row[:4] == b"RTQ1"
    assert header == {
        "v": 1,
        "put": PUT,
        "ord": 0,
        "size": 64,
        "entries": [
            {"kind": "tensor", "dtype": "int16", "shape": [2], "offset": 0, "nbytes": 4, "key": "x"},
            {"kind": "raw", "value": "é", "key": "s"},
        ],
    }
    assert google_crc32c.value(row[: 8 + length]) == int.from_bytes(row[8 + length : 12 + length], "little")
    start = aligned(12 + length)
    assert row[start:] == bytes([1, 0, 2, 0]) + bytes(60)
    assert len(row) % ALIGN == 0


def test_a_stored_row_of_this_version_stays_readable() -> None:
    head = bytes.fromhex(
        "525451317d00000085a17601a3707574c410000102030405060708090a0b0c0d0e0fa36f726400a473697a6540a7656e7472"
        "6965739286a46b696e64a674656e736f72a56474797065a5696e743136a57368617065920102a66f666673657400a66e6279"
        "74657304a36b6579a17883a46b696e64a3726177a576616c7565c0a36b6579a16ee3006397"
    )
    row = memoryview(bytearray(head + bytes(-len(head) % ALIGN) + bytes([7, 0, 8, 0]) + bytes(60)))
    assert strict(decode_row(row), {"x": torch.tensor([[7, 8]], dtype=torch.int16), "n": None})


@pytest.mark.parametrize("options", [{}, {"checksum": True}])
@pytest.mark.parametrize("value", [SMALL, None, {}])
def test_every_truncation_and_extension_is_refused(value: Any, options: dict[str, Any]) -> None:
    row = row_of(value, **options)
    for length in range(len(row)):
        with pytest.raises(RowFormatError):
            decode_row(memoryview(row)[:length])
        with pytest.raises(RowFormatError):
            decode_row(torch.frombuffer(row, dtype=torch.uint8)[:length])
    for extra in (1, ALIGN):
        with pytest.raises(RowFormatError, match="followed by bytes that are not its own"):
            decode_row(memoryview(row + bytes(extra)))


def test_every_flipped_header_bit_is_refused() -> None:
    row = row_of()
    end = open_row(memoryview(row)).frame.end
    for bit in range(end * 8):
        row[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RowFormatError):
            decode_row(memoryview(row))
        row[bit // 8] ^= 1 << bit % 8
    assert strict(decode_row(memoryview(row)), SMALL)


@pytest.mark.parametrize("value", [SMALL, None, {}])
def test_with_checksums_every_flipped_bit_is_refused(value: Any) -> None:
    row = row_of(value, checksum=True)
    assert strict(decode_row(memoryview(row)), value)
    for bit in range(len(row) * 8):
        row[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RowFormatError):
            decode_row(memoryview(row))
        row[bit // 8] ^= 1 << bit % 8


def test_errors_say_what_is_wrong() -> None:
    cases = {
        "not an RTQ1 row: it has 64 bytes and begins with b'PK": b"PK\x03\x04" + bytes(60),
        "not a whole RTQ1 row: it has only 0 bytes": b"",
        "format RTQ2, this plugin reads RTQ1 version 1": bytes(framed(header_of(), magic=b"RTQ2")),
        "format RTQ1 version 7, this plugin reads RTQ1 version 1": bytes(framed({**header_of(), "v": 7})),
        "unknown version 0": bytes(framed({**header_of(), "v": 0})),
        "header length is damaged: it says 4294967295": b"RTQ1" + b"\xff" * 60,
        "header is damaged: its crc32c": bytes(row_of())[:20] + b"\x00" + bytes(row_of())[21:],
    }
    for message, row in cases.items():
        with pytest.raises(RowFormatError, match=message):
            decode_row(memoryview(row))


def test_a_newer_row_is_refused_by_name_though_its_fields_are_unknown() -> None:
    newer = {"v": 2, "blocks": {"x": 1}, "put": 5}
    with pytest.raises(RowFormatError, match=r"version 2, .* install the writer's relax_tq_rdma version"):
        decode_row(framed(newer))


HOSTILE = {
    "must hold exactly one of": [header_of(none=True), {"v": 1, "put": PUT, "ord": 0}],
    "put id is not 16 bytes": [{**header_of(), "put": b"short"}],
    "cannot have 63 bytes": [{**header_of(), "size": 63}],
    "cannot have 0 bytes": [{**header_of(), "checksum": True}],
    "not as format RTQ1 says": [
        *(b"\xc1", b"", msgspec.msgpack.encode([1]), b"\x91" * 5000, {"v": 1}, {**header_of(), "ord": -1}),
        *(header_of({"kind": "pickle", "value": b""}), header_of({"kind": "tensor", "key": "x"})),
        *(header_of(tensor_entry(shape=[-2, -2])), header_of(tensor_entry(offset=-64)), header_of({"kind": "list"})),
    ],
    "names a key twice": [header_of({"kind": "raw", "value": 1, "key": 1}, {"kind": "raw", "value": 2, "key": True})],
    "is not 16 bytes": [header_of(tensor_entry(shape=[5])), header_of(tensor_entry(dtype="float64"))],
    "leave the row's 0 bytes": [header_of(tensor_entry()), header_of(tensor_entry(offset=2**62))],
    "has dtype 'float3'": [header_of(tensor_entry(dtype="float3"))],
    "unknown numpy dtype '|O'": [header_of(tensor_entry(kind="ndarray", dtype="|O", nbytes=32))],
    "not a numpy scalar": [header_of({"kind": "scalar", "dtype": "<f4", "value": b"abc"})],
    "tuple that is not made of a list": [header_of({"kind": "tuple", "of": {"kind": "raw", "value": 3}})],
    "cannot exist": [header_of(tensor_entry(shape=[2**62, 2**62, 0], nbytes=0))],
}


@pytest.mark.parametrize(("message", "header"), [(m, h) for m, headers in HOSTILE.items() for h in headers])
def test_a_header_with_a_right_crc_is_still_not_believed(message: str, header: Any) -> None:
    size = header.get("size", 0) if isinstance(header, dict) else 0
    with pytest.raises(RowFormatError, match=message):
        decode_row(framed(header, bytes(size)))


def test_entries_must_not_overlap_or_be_misaligned() -> None:
    for first, second in ((0, 0), (64, 0), (0, 16), (0, 128)):
        header = header_of(tensor_entry(offset=first), tensor_entry(key="y", offset=second), size=128)
        with pytest.raises(RowFormatError, match="misaligned, overlap another entry or leave the row's 128 bytes"):
            decode_row(framed(header, bytes(128)))
    good = header_of(tensor_entry(), tensor_entry(key="y", offset=64), size=128)
    assert list(decode_row(framed(good, bytes(128))) or ()) == ["x", "y"]


def test_a_payload_entry_cannot_reach_into_the_checksum() -> None:
    header = header_of(tensor_entry(), size=64, checksum=True)
    row = framed(header, bytes(64))
    row[-4:] = google_crc32c.value(bytes(row[12 + int.from_bytes(row[4:8], "little") : -4])).to_bytes(4, "little")
    with pytest.raises(RowFormatError, match="leave the row's 0 bytes"):
        decode_row(row)


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_random_bytes_are_an_error_never_a_crash(data: bytes, marked: bool) -> None:
    with pytest.raises(RowFormatError):
        decode_row(memoryview(b"RTQ1" + data if marked else data))


_NUMBERS = st.one_of(st.integers(-2, 300), st.integers(0, 2**64 - 1))
_PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), _NUMBERS, st.text(max_size=4), st.binary(max_size=16)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=5,
)
_ENTRY_FIELDS = {
    "kind": st.sampled_from(["tensor", "ndarray", "scalar", "raw"]),
    "key": st.one_of(st.text(max_size=3), st.integers(), st.none()).filter(
        lambda k: not isinstance(k, int) or k < 2**63
    ),
    "dtype": st.sampled_from(["float32", "bool", "uint8", "bfloat16", "<f4", ">c16", "|O", ""]),
    "shape": st.lists(st.one_of(st.integers(0, 9), _NUMBERS), max_size=3),
    "offset": st.one_of(st.sampled_from([0, 64, 128]), _NUMBERS),
    "nbytes": st.one_of(st.sampled_from([0, 4, 64]), _NUMBERS),
    "value": _PLAIN,
}
_ENTRIES = st.recursive(
    st.fixed_dictionaries({}, optional=_ENTRY_FIELDS),
    lambda inner: st.one_of(
        st.fixed_dictionaries({"kind": st.sampled_from(["list", "dict"]), "items": st.lists(inner, max_size=3)}),
        st.fixed_dictionaries({"kind": st.just("tuple"), "of": inner}),
    ),
    max_leaves=4,
)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    st.one_of(
        st.builds(lambda entries, size: header_of(*entries, size=size), st.lists(_ENTRIES, max_size=3), _NUMBERS),
        st.dictionaries(st.sampled_from(["v", "put", "ord", "size", "entries", "none", "ref", "checksum"]), _PLAIN),
    ),
    st.sampled_from([0, 64, 128]),
)
def test_random_headers_are_an_error_or_a_dict_never_a_crash(header: dict[str, Any], size: int) -> None:
    if "size" in header and size:
        header["size"] = size
    try:
        decoded = decode_row(framed(msgspec.msgpack.encode(_within_64_bits(header)), bytes(size)))
    except RowFormatError:
        return
    assert decoded is None or isinstance(decoded, dict)
    for value in (decoded or {}).values():
        if isinstance(value, torch.Tensor):
            value.clone()


def _within_64_bits(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _within_64_bits(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_within_64_bits(item) for item in value]
    return max(-(2**63), min(2**64 - 1, value)) if type(value) is int else value


def test_offsets_beyond_4_gib_without_allocating_them(tmp_path: Path) -> None:
    big = torch.zeros(1, dtype=torch.uint8).expand(5, 1 << 30)
    plan = plan_row({"big": big, "after": torch.tensor([1.5, -2.5])})
    assert plan.size == (5 << 30) + 64
    assert [(offset, nbytes) for _, offset, nbytes in plan.leaves] == [(0, 5 << 30), (5 << 30, 8)]

    frame = encode_frame(PUT, 0, plan.size, entries=plan.entries)
    path = tmp_path / "row"  # sparse: only the pages touched exist
    with path.open("w+b") as file:
        file.truncate(len(frame) + plan.size)
        with mmap.mmap(file.fileno(), 0) as memory:
            memory[: len(frame)] = frame
            view = memoryview(memory)
            view[len(frame) + (5 << 30) : len(frame) + (5 << 30) + 8] = torch.tensor([1.5, -2.5]).numpy().tobytes()
            view[len(frame) + (5 << 30) - 1] = 9
            row = decode_row(view)
            assert row is not None
            assert row["big"].shape == (5, 1 << 30)
            assert row["big"][4, -1] == 9
            assert row["after"].tolist() == [1.5, -2.5]
            with pytest.raises(RowFormatError, match="truncated"):
                decode_row(view[: 3 << 30])
            view.release()
            del row


def test_rows_are_told_from_other_values() -> None:
    assert is_encoded(encode_rows([{}])[0])
    assert is_encoded(memoryview(row_of()))
    assert is_encoded(memoryview(b"RTQ9"))
    for other in (None, {}, b"RTQ1", torch.zeros(8), bits(torch.uint8, (3, 4)), torch.empty(0, dtype=torch.uint8)):
        assert not is_encoded(other)
    assert not is_encoded(memoryview(b"RTQ"))
    assert not is_encoded(memoryview(b"R.T.Q.1.")[::2])


@pytest.mark.parametrize(
    "row", [torch.zeros(64), torch.zeros(8, 8, dtype=torch.uint8), torch.zeros(128, dtype=torch.uint8)[::2]]
)
def test_a_row_tensor_must_be_flat_bytes(row: torch.Tensor) -> None:
    with pytest.raises(RowFormatError, match="a row is a contiguous 1-D uint8 tensor"):
        decode_row(row)


def test_a_memoryview_of_any_item_type_is_read_and_gaps_are_refused() -> None:
    row = row_of()
    assert strict(decode_row(memoryview(row).cast("I")), SMALL)
    assert strict(decode_row(memoryview(np.frombuffer(row, np.uint8).reshape(-1, 64))), SMALL)
    with pytest.raises(RowFormatError, match="this memoryview has gaps"):
        decode_row(memoryview(row)[::2])
