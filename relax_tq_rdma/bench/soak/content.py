"""What is moved: random rows that both ends can make from a seed, so that nothing but the store carries them.

All content is cut from one block of noise, each tensor from a place of its own: a stale or a neighbour's byte cannot
pass for the right one, and comparing costs no memory.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

KIB, MIB = 1 << 10, 1 << 20
MAX_ROWS = 64
SMALLEST_ROW = KIB
OVERSIZED_TENSOR = 16 * MIB
"""The oversized row is made of these, so that the noise need not be as large."""

_NOISE_PLACES = 32 * MIB
_RAW_BYTES = MIB
_TOKENS = 2000
_COPIES = (1, 1, 1, 2, 4, 8)
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "uint8": 1, "int64": 8, "int32": 4}
_NOT_IN_NUMPY = "bfloat16"
_ODD = "odd"

Kind = Literal["tensor", "array", "list"]


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What random rows there are. Sizes in bytes.

    Attributes:
        seed: of everything random.
        max_row: largest row, but for the oversized one.
        put_bytes: most payload of one put.
        oversized: size of one row in the first step that no pool can serve; 0: none.
    """

    seed: int
    max_row: int
    put_bytes: int
    oversized: int = 0

    @property
    def noise_bytes(self) -> int:
        return _NOISE_PLACES + max(self.max_row, OVERSIZED_TENSOR if self.oversized else 0) + 64


class Leaf(msgspec.Struct, frozen=True, kw_only=True):
    """One value of a row. ``list``: one tensor for each index of the first dimension. ``start``: place in the noise."""

    key: str
    kind: Kind
    dtype: str
    shape: tuple[int, ...]
    start: int


class Payload(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the image column.

    Attributes:
        kind: ``tensors``; ``text``: plain values only; ``raw``: with a value that the row format does not hold, so that
            the row stays as it is; ``none``.
        leaves: of all but ``text`` and ``none``.
        text: of ``text``.
        shared: copies are the same tensors, not equal ones.
    """

    kind: Literal["tensors", "text", "raw", "none"]
    leaves: tuple[Leaf, ...] = ()
    text: str = ""
    shared: bool = False


class RowPlan(msgspec.Struct, frozen=True, kw_only=True):
    """``tokens`` and ``start``: length and place in the noise of the row's own tensor column."""

    payload: Payload
    tokens: int
    start: int


class Mismatch(Exception):
    """What arrived is not what was sent; the text says where."""


def plan_step(shape: Shape, step: int) -> list[list[RowPlan]]:
    """The puts of a step, with their rows. The same in every process."""
    dice = random.Random(f"{shape.seed}/{step}")
    puts = [list(_rows(shape, dice)) for _ in range(dice.randint(1, 4))]
    if step == 0 and shape.oversized:
        puts.append([_row(dice, _oversized(shape, dice))])
    return puts


def _rows(shape: Shape, dice: random.Random) -> Iterator[RowPlan]:
    left, count = shape.put_bytes, dice.randint(1, MAX_ROWS)
    while count:
        payload, nbytes = _payload(shape, dice, left)
        left -= nbytes
        copies = min(dice.choice(_COPIES), count)
        count -= copies
        for _ in range(copies):
            yield _row(dice, payload)


def _row(dice: random.Random, payload: Payload) -> RowPlan:
    return RowPlan(payload=payload, tokens=dice.randint(1, _TOKENS), start=dice.randrange(_NOISE_PLACES))


def _payload(shape: Shape, dice: random.Random, left: int) -> tuple[Payload, int]:
    """A random row of at most ``left`` bytes, and its size."""
    chance = dice.random()
    if chance < 0.04:
        return Payload(kind="none"), 0
    if chance < 0.10:
        return Payload(kind="text", text=f"no picture here: {dice.random()!r}" * dice.randint(1, 20)), 0
    raw = chance < 0.13
    largest = max(SMALLEST_ROW, min(shape.max_row, left, _RAW_BYTES if raw else left))
    nbytes = round(math.exp(dice.uniform(math.log(SMALLEST_ROW), math.log(largest))))
    cuts = sorted(dice.random() for _ in range(dice.randint(0, 3)))
    shares = [end - start for start, end in zip([0.0, *cuts], [*cuts, 1.0], strict=True)]
    leaves = tuple(_leaf(dice, f"value_{at}", round(nbytes * share)) for at, share in enumerate(shares))
    return Payload(kind="raw" if raw else "tensors", leaves=leaves, shared=dice.random() < 0.3), nbytes


def _leaf(dice: random.Random, key: str, nbytes: int) -> Leaf:
    dtype = dice.choice(list(_ITEM_BYTES))
    width = dice.choice((1, 3, 12, 588))
    values = max(1, nbytes // _ITEM_BYTES[dtype])
    shape: tuple[int, ...] = (values,) if values < 2 * width else (values // width, width)
    kind: Kind = "tensor"
    chance = dice.random()
    if chance < 0.1 and dtype != _NOT_IN_NUMPY:
        kind = "array"
    elif chance < 0.2 and len(shape) == 2 and values >= 64:
        kind, shape = "list", (dice.randint(1, 4), max(1, values // (4 * width)), width)
    return Leaf(key=key, kind=kind, dtype=dtype, shape=shape, start=dice.randrange(_NOISE_PLACES))


def _oversized(shape: Shape, dice: random.Random) -> Payload:
    each = OVERSIZED_TENSOR // 4
    leaves = tuple(
        Leaf(key=f"frame_{at}", kind="tensor", dtype="float32", shape=(each,), start=dice.randrange(_NOISE_PLACES))
        for at in range(-(-shape.oversized // OVERSIZED_TENSOR))
    )
    return Payload(kind="tensors", leaves=leaves)


class Content:
    """Makes rows and compares them. Safe to use from several threads."""

    def __init__(self, shape: Shape) -> None:
        import numpy as np
        import torch

        noise = np.random.default_rng(shape.seed).integers(0, 2**64, -(-shape.noise_bytes // 8), dtype=np.uint64)
        self._noise = torch.from_numpy(noise.view(np.uint8))

    def values(self, payloads: Sequence[Payload]) -> list[Any]:
        """The image column of a put: separate objects, but for copies that are ``shared``."""
        originals: dict[int, Any] = {}
        values = []
        for payload in payloads:
            value = self._value(payload)
            values.append(dict(originals.setdefault(id(payload), value)) if payload.shared else value)
        return values

    def tokens(self, row: RowPlan) -> Any:
        """The row's own tensor: 1-D int64."""
        import torch

        return self._bytes(row.start, row.tokens * 8).clone().view(torch.int64)

    def check(self, payload: Payload, value: Any) -> int:
        """Compare a row with what was sent: type, keys in their order, dtype, shape, and every byte.

        Returns:
            Bytes compared.

        Raises:
            Mismatch: with the first difference.
        """
        if payload.kind == "none":
            _must(value is None, f"a {type(value).__name__} instead of None")
            return 0
        _must(type(value) is dict, f"a {type(value).__name__} instead of a dict")
        if payload.kind == "text":
            _must(value == _text(payload), f"{str(value)[:80]!r} instead of {payload.text[:80]!r}")
            return len(payload.text)
        keys = [leaf.key for leaf in payload.leaves] + ([_ODD] if payload.kind == "raw" else [])
        _must(list(value) == keys, f"keys {list(value)} instead of {keys}")
        if payload.kind == "raw":
            _must(value[_ODD] == _odd(payload), f"{value[_ODD]} under {_ODD!r}")
        return sum(self._check_leaf(leaf, value[leaf.key]) for leaf in payload.leaves)

    def check_tokens(self, row: RowPlan, tokens: Any) -> int:
        """As :meth:`check`, for the row's own tensor."""
        import torch

        _must(tokens.dtype == torch.int64 and tuple(tokens.shape) == (row.tokens,), f"tokens: {tokens.shape}")
        self._compare("tokens", row.start, tokens)
        return row.tokens * 8

    def _value(self, payload: Payload) -> Any:
        if payload.kind == "none":
            return None
        if payload.kind == "text":
            return _text(payload)
        value = {leaf.key: self._make(leaf) for leaf in payload.leaves}
        return {**value, _ODD: _odd(payload)} if payload.kind == "raw" else value

    def _make(self, leaf: Leaf) -> Any:
        import torch

        dtype = getattr(torch, leaf.dtype)
        tensor = self._bytes(leaf.start, math.prod(leaf.shape) * dtype.itemsize).clone().view(dtype).view(leaf.shape)
        if leaf.kind == "array":
            return tensor.numpy()
        return [one.clone() for one in tensor.unbind()] if leaf.kind == "list" else tensor

    def _check_leaf(self, leaf: Leaf, value: Any) -> int:
        import numpy as np
        import torch

        dtype = getattr(torch, leaf.dtype)
        if leaf.kind == "list":
            _must(type(value) is list and len(value) == leaf.shape[0], f"{leaf.key}: {type(value).__name__}")
            tensors, shape = value, leaf.shape[1:]
        elif leaf.kind == "array":
            _must(type(value) is np.ndarray, f"{leaf.key}: {type(value).__name__} instead of an array")
            tensors, shape = [torch.from_numpy(value)], leaf.shape
        else:
            tensors, shape = [value], leaf.shape
        start, nbytes = leaf.start, math.prod(shape) * dtype.itemsize
        for tensor in tensors:
            _must(type(tensor) is torch.Tensor, f"{leaf.key}: a {type(tensor).__name__} instead of a tensor")
            found = (tensor.dtype, tuple(tensor.shape), tensor.is_contiguous())
            _must(found == (dtype, shape, True), f"{leaf.key}: {found} instead of {(dtype, shape, True)}")
            self._compare(leaf.key, start, tensor)
            start += nbytes
        return int(nbytes) * len(tensors)

    def _compare(self, what: str, start: int, tensor: Any) -> None:
        import torch

        got = tensor.reshape(-1).view(torch.uint8)
        sent = self._bytes(start, got.numel())
        if not torch.equal(got, sent):
            wrong = (got != sent).nonzero()
            raise Mismatch(f"{what}: {len(wrong)} of {got.numel()} bytes differ, first byte {int(wrong[0])}")

    def _bytes(self, start: int, nbytes: int) -> Any:
        return self._noise[start : start + nbytes]


def _odd(payload: Payload) -> complex:
    """A value that the row format does not hold and that TransferQueue's own does."""
    return complex(payload.leaves[0].start, 1)


def _text(payload: Payload) -> dict[str, Any]:
    return {"text": payload.text, "length": len(payload.text), "empty": None}


def _must(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Mismatch(otherwise)
