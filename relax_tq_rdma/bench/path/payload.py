"""The batch that is moved: rows as the host's image processor makes them, different in every round.

The same bytes again and again would let a stale buffer pass for a fresh one, so each round stamps its own number into
every page of every tensor. The check covers every byte: crc32 of each row, made by the producer.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

MIB = 1 << 20
PIXELS, GRID = "pixel_values", "image_grid_thw"
KEYS = (PIXELS, GRID)
_WIDE, _NARROW = 1176, 12
"""Values of a patch: a Qwen2-VL one (3 channels x 2 frames x 14 x 14), and one for tiers of small rows."""
_PAGE_VALUES = 1024
_GRID_BYTES = 24

Row = Mapping[str, Any]


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """A batch of ``rows`` rows and about ``tier`` MiB, in groups of ``copies`` equal rows.

    ``shared``: the rows of a group are the same tensors, as with ``--rollout-group-share-processor``.
    """

    tier: int
    rows: int
    copies: int = 1
    shared: bool = False

    @property
    def width(self) -> int:
        return _WIDE if self.tier * MIB // self.rows >= 8 * _WIDE * 4 else _NARROW

    @property
    def patches(self) -> list[int]:
        """Patches of each row: between half and one and a half of the mean, the same within a group."""
        groups = self.rows // self.copies
        mean = self.tier * MIB / self.rows / (self.width * 4)
        shares = [0.5 + (7 * group % groups + 0.5) / groups for group in range(groups)]
        return [max(1, round(mean * share)) for share in shares for _ in range(self.copies)]

    @property
    def row_bytes(self) -> list[int]:
        return [count * self.width * 4 + _GRID_BYTES for count in self.patches]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the batch."""
        return sum(self.row_bytes)


def make_rows(shape: Shape) -> list[dict[str, Any]]:
    """One dict of tensors a row, equal within a group; separate tensors unless they are shared."""
    import torch

    rows: list[dict[str, Any]] = []
    for index, patches in enumerate(shape.patches):
        if index % shape.copies:
            rows.append({key: value if shape.shared else value.clone() for key, value in rows[-1].items()})
            continue
        generator = torch.Generator().manual_seed(index)
        rows.append(
            {
                PIXELS: torch.rand(patches, shape.width, generator=generator),
                GRID: torch.tensor([[1, 1, patches]]),
            }
        )
    return rows


def stamp(rows: Sequence[Row], shape: Shape, number: int) -> None:
    """Write ``number`` into every 4 KiB of the pixels, and the group into their second value."""
    for index, row in enumerate(rows):
        flat = row[PIXELS].view(-1)
        flat[::_PAGE_VALUES] = float(number)
        flat[1] = float(index // shape.copies)


def digests(rows: Sequence[Row]) -> list[int]:
    """crc32 over every byte of each row; no copy of the payload is made.

    Raises:
        ValueError: a row is not the dict of contiguous tensors it should be.
    """
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(_digest, rows))


def check(rows: Sequence[Row], shape: Shape, expected: Sequence[int]) -> None:
    """Compare what arrived with what was sent: keys, dtypes, shapes, and every byte.

    Raises:
        ValueError: the first difference, in words.
    """
    import torch

    if len(rows) != shape.rows:
        raise ValueError(f"{len(rows)} rows arrived instead of {shape.rows}")
    kinds = {PIXELS: torch.float32, GRID: torch.int64}
    for index, (row, patches) in enumerate(zip(rows, shape.patches, strict=True)):
        shapes = {PIXELS: (patches, shape.width), GRID: (1, 3)}
        found = {key: (value.dtype, tuple(value.shape)) for key, value in row.items()}
        if found != {key: (kinds[key], shapes[key]) for key in KEYS}:
            raise ValueError(f"row {index} arrived as {found}")
    wrong = [n for n, (got, sent) in enumerate(zip(digests(rows), expected, strict=True)) if got != sent]
    if wrong:
        raise ValueError(f"the bytes of {len(wrong)} of {shape.rows} rows differ, first of row {wrong[0]}")


def _digest(row: Row) -> int:
    crc = 0
    for key in KEYS:
        if not row[key].is_contiguous():
            raise ValueError(f"{key} is not contiguous")
        crc = zlib.crc32(row[key].numpy(), crc)
    return crc
