"""The ``RTQ1`` row format: framing, header and bounds (RFC §4.3, design §6). Bytes only: no torch, nothing executed.

::

    row = "RTQ1" | u32 header length | header (msgpack) | u32 crc32c of all before it | pad to 64
          | data: payload slices, each aligned to 64 | pad to 64 | [64 bytes that end with a u32 crc32c of the payload]

All integers are little-endian; entry offsets count from the start of the data. The whole format is specified in
``docs/reference/row-format.md``. A row is written once and never changed, so its length is exact: a missing or a
surplus byte is an error.
"""

from __future__ import annotations

import struct
from typing import Annotated, Any, Union

import google_crc32c
import msgspec
import numpy as np
from numpy.typing import NDArray

from relax_tq_rdma.errors import DataplaneError

MAGIC = b"RTQ1"
VERSION = 1
ALIGN = 64  # cache line, and the alignment torch gives its own tensors
PUT_ID_BYTES = 16
MAX_DIMENSIONS = 64  # of a tensor; numpy's own limit too
MAX_HEADER_BYTES = 64 << 20  # far above any real header; a damaged length must not cost gigabytes
CHECKSUM_BLOCK = ALIGN  # the optional trailer; the crc is its last four bytes, so that no bit of a row is unprotected

_PREFIX = struct.Struct("<4sI")  # magic, header length
_CRC = struct.Struct("<I")
_CRC_CHUNK = 16 << 20  # the library holds the GIL: let other threads in between
_ZEROS = bytes(ALIGN)

Bytes = NDArray[np.uint8]


class RowFormatError(DataplaneError):
    """A row is foreign, truncated, damaged or of a newer version. The message names which."""


class NewerRowError(RowFormatError):
    """A row of a format that this version of the plugin does not know."""


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to the next multiple of 64."""
    return nbytes + (-nbytes % ALIGN)


# --- header ---------------------------------------------------------------------------------------------------------

Count = Annotated[int, msgspec.Meta(ge=0)]
Key = Union[str, int, bool, None]  # noqa: UP007  (msgspec evaluates it on Python 3.10)


class TensorEntry(msgspec.Struct, tag="tensor", tag_field="kind", omit_defaults=True, gc=False):
    """A torch tensor: ``nbytes`` bytes at ``offset``, C order. ``dtype`` is torch's name without the ``torch.``."""

    dtype: str
    shape: tuple[Count, ...]
    offset: Count
    nbytes: Count
    key: Key = None


class ArrayEntry(msgspec.Struct, tag="ndarray", tag_field="kind", omit_defaults=True, gc=False):
    """A numeric numpy array. ``dtype`` is numpy's array-interface code, byte order included (``">i4"``)."""

    dtype: str
    shape: tuple[Count, ...]
    offset: Count
    nbytes: Count
    key: Key = None


class ScalarEntry(msgspec.Struct, tag="scalar", tag_field="kind", omit_defaults=True, gc=False):
    """A numpy scalar, its bytes in the header."""

    dtype: str
    value: bytes
    key: Key = None


class RawEntry(msgspec.Struct, tag="raw", tag_field="kind", omit_defaults=True, gc=False):
    """A plain Python value, or lists and dicts of such, as msgpack writes them."""

    value: Any
    key: Key = None


class ListEntry(msgspec.Struct, tag="list", tag_field="kind", omit_defaults=True, gc=False):
    """A list with at least one item that msgpack alone would not keep (nested tensors, tuples, numpy scalars)."""

    items: list[Entry]
    key: Key = None


class TupleEntry(msgspec.Struct, tag="tuple", tag_field="kind", omit_defaults=True, gc=False):
    """A tuple: ``of`` is the list with the same items."""

    of: Entry
    key: Key = None


class DictEntry(msgspec.Struct, tag="dict", tag_field="kind", omit_defaults=True, gc=False):
    """A dict with at least one value that msgpack alone would not keep. Order is kept."""

    items: list[Entry]
    key: Key = None


Entry = Union[TensorEntry, ArrayEntry, ScalarEntry, RawEntry, ListEntry, TupleEntry, DictEntry]  # noqa: UP007


def payload_bytes(entry: Entry) -> int:
    """Bytes of the data section that belong to an entry, without padding."""
    if isinstance(entry, (TensorEntry, ArrayEntry)):
        return entry.nbytes
    if isinstance(entry, (ListEntry, DictEntry)):
        return sum(map(payload_bytes, entry.items))
    return payload_bytes(entry.of) if isinstance(entry, TupleEntry) else 0


class Reference(msgspec.Struct, gc=False):
    """The row equals another row: global ``index``, its encoded size, and the put and ordinal it must still have."""

    index: Count
    nbytes: Count
    put: bytes
    ord: Count


class Header(msgspec.Struct, omit_defaults=True, gc=False):
    """What a row says about itself. Exactly one of ``entries``, ``none``, ``ref`` is there.

    ``put`` is the random 128-bit id of the put that wrote the row, ``ord`` the row's place in that put, ``size`` the
    bytes of the data section. ``refs``: how many other rows of the put refer to this one.
    """

    v: int
    put: bytes
    ord: Count
    size: Count = 0
    entries: list[Entry] | None = None
    none: bool = False
    ref: Reference | None = None
    checksum: bool = False
    refs: Count = 0


class _AnyVersion(msgspec.Struct):
    v: int


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Header)


def encode_entries(entries: list[Entry]) -> bytes:
    """The entries as msgpack. Equal bytes mean: same keys, order, kinds, dtypes, shapes and non-tensor values.

    Raises:
        OverflowError, UnicodeEncodeError, ValueError, RecursionError: a raw value is outside msgpack.
    """
    return _ENCODER.encode(entries)


def encode_frame(
    put: bytes,
    ord: int,
    size: int,
    *,
    entries: bytes | None,
    ref: Reference | None = None,
    checksum: bool = False,
    refs: int = 0,
) -> bytes:
    """All of a row before its data section.

    ``entries`` comes from ``encode_entries``; without it and without ``ref`` it is a None row.

    Raises:
        ValueError: the header is larger than ``MAX_HEADER_BYTES``.
    """
    written: Any = None if entries is None else msgspec.Raw(entries)
    header = Header(VERSION, put, ord, size, written, entries is None and ref is None, ref, checksum, refs)
    body = _ENCODER.encode(header)
    if len(body) > MAX_HEADER_BYTES:
        raise ValueError(f"header of {len(body)} bytes, limit {MAX_HEADER_BYTES}")
    frame = _PREFIX.pack(MAGIC, len(body)) + body
    frame += _CRC.pack(google_crc32c.value(frame))
    return frame + _ZEROS[: -len(frame) % ALIGN]


# --- reading --------------------------------------------------------------------------------------------------------


class Frame(msgspec.Struct, gc=False):
    """A parsed header; ``end`` is where it ends, ``start`` where the data begins, ``nbytes`` the whole row's length."""

    header: Header
    end: int
    start: int
    nbytes: int


def is_row(head: bytes) -> bool:
    """Whether a value's first bytes are those of a row of this format, of any version."""
    return head[:3] == MAGIC[:3] and head[3:4].isdigit()


def frame_nbytes(head: memoryview, total: int) -> int:
    """Bytes of magic, length, header and crc, from a row's first 8 bytes and its length.

    Raises:
        RowFormatError: foreign, newer or truncated.
    """
    if total < _PREFIX.size or len(head) < _PREFIX.size:
        raise RowFormatError(f"this is not a whole RTQ1 row: it has only {total} bytes")
    magic, length = _PREFIX.unpack_from(head)
    if magic != MAGIC:
        if is_row(magic):
            raise _newer(magic.decode())
        raise RowFormatError(f"this is not an RTQ1 row: it has {total} bytes and begins with {magic!r}")
    end: int = _PREFIX.size + length + _CRC.size
    if length > MAX_HEADER_BYTES or end > total:
        raise RowFormatError(
            f"the row is truncated or its header length is damaged: it says {length} bytes of header, "
            f"the row has {total} bytes"
        )
    return end


def parse_frame(head: memoryview, total: int) -> Frame:
    """Check and read a row's header.

    Args:
        head: the row's first bytes, at least ``frame_nbytes`` of them.
        total: length of the whole row in bytes.

    Raises:
        RowFormatError: foreign, truncated, too long, damaged, newer, or not as specified.
    """
    end = frame_nbytes(head, total)
    if end > len(head):
        raise RowFormatError(f"the row's header of {end} bytes is cut in two: there are {len(head)} at hand")
    covered = bytes(head[: end - _CRC.size])
    if google_crc32c.value(covered) != _CRC.unpack_from(head, end - _CRC.size)[0]:
        raise RowFormatError("the row's header is damaged: its crc32c does not match")
    header = _decode_header(covered[_PREFIX.size :])
    start = aligned(end)
    if start + header.size != total:
        what = "truncated" if total < start + header.size else "followed by bytes that are not its own"
        raise RowFormatError(f"the row is {what}: its header says {start + header.size} bytes, there are {total}")
    return Frame(header, end, start, total)


def _decode_header(body: bytes) -> Header:
    try:
        header = _DECODER.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as exc:
        _refuse_newer(body)
        raise RowFormatError(f"the row's header is not as format RTQ1 says: {exc}") from None
    ref = header.ref
    if header.v != VERSION:
        _refuse_newer(body)
        raise RowFormatError(f"the row's header has the unknown version {header.v}")
    if (header.entries is not None) + header.none + (ref is not None) != 1:
        raise RowFormatError("the row's header must hold exactly one of entries, none and ref")
    if len(header.put) != PUT_ID_BYTES or (ref is not None and len(ref.put) != PUT_ID_BYTES):
        raise RowFormatError(f"the row's put id is not {PUT_ID_BYTES} bytes")
    if header.size % ALIGN or (header.checksum and header.size < CHECKSUM_BLOCK):
        raise RowFormatError(f"the row's data section cannot have {header.size} bytes")
    return header


def _refuse_newer(body: bytes) -> None:
    try:
        version = msgspec.msgpack.decode(body, type=_AnyVersion).v
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return
    if version > VERSION:
        raise _newer(f"RTQ1 version {version}")


def _newer(found: str) -> NewerRowError:
    return NewerRowError(
        f"the row has format {found}, this plugin reads {MAGIC.decode()} version {VERSION}: "
        "install the writer's relax_tq_rdma version here"
    )


# --- payload checksum -----------------------------------------------------------------------------------------------


def payload_crc(row: Bytes) -> bytes:
    """crc32c of all bytes between a whole row's header crc and its last four, as those last four store it."""
    begin = frame_nbytes(row.data, len(row))
    crc = 0
    for at in range(begin, len(row) - _CRC.size, _CRC_CHUNK):
        crc = google_crc32c.extend(crc, row[at : min(at + _CRC_CHUNK, len(row) - _CRC.size)])
    return _CRC.pack(crc)
