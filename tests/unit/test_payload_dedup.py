"""Dedup: copies become references, different payloads never merge, and a reference never serves another row."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_tq_rdma.payload import (
    RowFormatError,
    StaleReferenceError,
    check_source,
    decode_row,
    dedup,
    encode_column,
    encode_rows,
    open_row,
    plan_resolution,
)
from relax_tq_rdma.payload.dedup import find_sources
from relax_tq_rdma.payload.plan import Leaf, plan_row
from tests.payload_cases import EXAMPLES, FITS, bits, rows, strict

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
PUT, OTHER = bytes(range(16)), bytes(16)


def picture(seed: int = 0, nbytes: int = 200_000, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    pixels = bits(torch.uint8, (nbytes,), seed).view(dtype)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]])}


def sources_of(batch: list[Any]) -> list[int]:
    return find_sources([plan_row(row) for row in batch])


def restored(batch: list[Any], indexes: list[int] | None = None) -> list[Any]:
    """Encode with dedup, then read as a consumer with the whole put in one batch does."""
    indexes = list(range(100, 100 + len(batch))) if indexes is None else indexes
    opened = [open_row(row) for row in encode_rows(batch, dedup_indexes=indexes)]
    inside = plan_resolution(opened, indexes).inside
    return [opened[inside.get(position, position)].decode() for position in range(len(opened))]


# --- equal rows are found -------------------------------------------------------------------------------------------


def test_a_group_that_shares_one_object_costs_one() -> None:
    row = picture()
    assert sources_of([row] * 8) == [0] * 8
    assert sources_of([dict(row) for _ in range(8)]) == [0] * 8


def test_eight_deep_copies_cost_one() -> None:
    groups = [[copy.deepcopy(picture(seed)) for _ in range(8)] for seed in range(4)]
    batch = list(itertools.chain(*groups))
    assert sources_of(batch) == [8 * (i // 8) for i in range(32)]
    column = encode_column(batch, dedup_indexes=range(32))
    unique = sum(encode_column([group[0] for group in groups]).offsets[-1:])
    assert column.arena.numel() < unique * 1.01
    assert column.sources == [8 * (i // 8) for i in range(32)]
    for row, back in zip(batch, restored(batch), strict=True):
        assert strict(row, back)


def test_the_same_memory_is_never_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dedup, "_digest", None)
    row = picture()
    assert sources_of([row, dict(row), {k: v.view(v.shape) for k, v in row.items()}]) == [0, 0, 0]


def test_views_of_one_storage_are_not_confused() -> None:
    base = bits(torch.uint8, (40, 40, 4))
    views = [base[:20], base[20:], base[:20].transpose(0, 1).contiguous().transpose(0, 1), base.flip(0)[:20]]
    assert sources_of([{"x": view} for view in [*views, base[:20]]]) == [0, 1, 0, 3, 0]
    square = torch.arange(1024.0).reshape(32, 32)
    assert sources_of([{"x": square}, {"x": square.t()}, {"x": square.t().contiguous()}]) == [0, 1, 1]
    number = bits(torch.complex64, (256,))
    assert sources_of([{"x": number}, {"x": number.conj()}, {"x": number.conj().resolve_conj()}]) == [0, 1, 1]


@pytest.mark.parametrize("name", [name for name, build in FITS.items() if (plan_row(build()).size) >= 256])
def test_every_kind_of_row_finds_its_copy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dedup, "MIN_BYTES", 1)
    first, second = FITS[name](), FITS[name]()
    assert sources_of([first, second, first]) == [0, 0, 0]


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(rows(), min_size=1, max_size=4), st.lists(st.integers(0, 3), max_size=6))
def test_any_batch_with_copies_comes_back_exactly(distinct: list[Any], picks: list[int]) -> None:
    batch = distinct + [copy.deepcopy(distinct[pick % len(distinct)]) for pick in picks]
    batch = [row for row in batch if _fits(row)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dedup, "MIN_BYTES", 1)
        for row, back in zip(batch, restored(batch), strict=True):
            assert strict(row, back)


def _fits(row: Any) -> bool:
    return not isinstance(encode_rows([row])[0], dict)


# --- different rows are not merged ----------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [2048, 65_536, 65_544, 1_000_008])
def test_images_that_differ_in_one_byte_are_never_merged(nbytes: int) -> None:
    base = bits(torch.uint8, (nbytes,))
    places = sorted({0, 1, nbytes - 1, nbytes // 2, *torch.randint(nbytes, (12,)).tolist()})
    variants = [base.clone() for _ in places]
    for variant, place in zip(variants, places, strict=True):
        variant[place] ^= 1
    batch = [{"x": tensor.clone()} for tensor in [base, *variants] for _ in range(8)]
    assert sources_of(batch) == [8 * (i // 8) for i in range(len(batch))]
    interleaved = batch[::8] * 2
    assert sources_of(interleaved) == list(range(len(variants) + 1)) * 2


def test_a_digest_alone_never_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dedup, "_digest", lambda leaves, sample=False: b"all collide")
    batch = [picture(seed) for seed in (0, 1, 2, 0, 1, 2)]
    assert sources_of(batch) == [0, 1, 2, 0, 1, 2]


def test_what_looks_equal_to_python_is_not_merged() -> None:
    pixels = bits(torch.uint8, (4096,))
    tails: list[Any] = [0, False, 0.0, -0.0, None, "", b"", [], (), {}, [0], (0,), {"a": 0}, {0: "a"}, {False: "a"}]
    batch: list[Any] = [{"x": pixels, "tail": tail} for tail in tails]
    batch += [
        {"tail": 0, "x": pixels},
        {"x": pixels},
        {"x": [pixels]},
        {"x": pixels.numpy()},
        {"x": pixels.view(64, 64)},
    ]
    batch += [{"x": pixels.view(dtype)} for dtype in (torch.int8, torch.float32, torch.int32, torch.bool)]
    batch += [{"x": pixels.numpy().view(code)} for code in ("<i4", ">i4")]
    assert sources_of(batch) == list(range(len(batch)))


def test_hashing_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """None for rows alone in their class; a sample each for different images; all bytes only where samples meet."""
    calls: list[bool] = []
    digest = dedup._digest

    def count(leaves: list[Leaf], *, sample: bool = False) -> bytes:
        calls.append(sample)
        return digest(leaves, sample=sample)

    monkeypatch.setattr(dedup, "_digest", count)
    sources_of([picture(0, 200_000 + 64 * n) for n in range(16)])
    assert calls == []
    sources_of([picture(seed) for seed in range(16)])
    assert calls == [True] * 16
    calls.clear()
    sources_of([copy.deepcopy(picture(0)) for _ in range(8)])
    assert calls == [True] * 8


def test_small_and_empty_rows_are_not_worth_a_reference() -> None:
    for row in (None, {}, {"text": "x" * 500}, {"x": torch.zeros(8)}):
        assert sources_of([row, copy.deepcopy(row)]) == [0, 1]
    assert find_sources([None, None]) == [0, 1]


def test_payload_in_the_header_is_payload_too() -> None:
    image = {"image": bytes(range(256)) * 100}
    other = {"image": bytes(range(1, 256)) * 100}
    assert sources_of([image, copy.deepcopy(image), other]) == [0, 0, 2]


def test_reused_addresses_do_not_bring_back_the_dead() -> None:
    """Tensors of one size, built and dropped: addresses and ids return at once (FC-46)."""
    for n in range(300):
        batch = [{"x": torch.full((512,), float(n))}, {"x": torch.full((512,), float(-n - 1))}]
        batch.append(copy.deepcopy(batch[0]))
        assert sources_of(batch) == [0, 1, 0]


def test_a_tensor_changed_between_two_puts_is_a_new_payload() -> None:
    row = picture()
    first = encode_rows([row, row], dedup_indexes=[0, 1])
    before = copy.deepcopy(row)
    row["pixel_values"].view(torch.uint8)[7] ^= 255
    second = encode_rows([row, row], dedup_indexes=[0, 1])
    assert strict(before, decode_row(first[0]))
    assert strict(row, decode_row(second[0]))


def test_a_row_that_stays_raw_has_no_references_to_it() -> None:
    raw = {"x": torch.ones(1000), "why": {1}}
    column = encode_column([raw, raw, picture(), picture()], dedup_indexes=range(4))
    assert column.rows[0] is raw
    assert column.rows[1] is raw
    assert column.sources == [0, 1, 2, 2]
    assert set(column.reasons) == {0, 1}


# --- references -----------------------------------------------------------------------------------------------------


def put(groups: int, indexes: list[int], put_id: bytes = PUT, **options: Any) -> dict[int, torch.Tensor]:
    """A store: global index -> row, of a put with ``groups`` groups of equal rows."""
    size = len(indexes) // groups
    batch = [picture(position // size) for position in range(len(indexes))]
    return dict(zip(indexes, encode_rows(batch, put_id=put_id, dedup_indexes=indexes, **options), strict=True))


def test_a_reference_says_where_its_bytes_are() -> None:
    store = put(1, [40, 41])
    ref = open_row(store[41]).reference
    assert ref is not None
    assert (ref.index, ref.nbytes, ref.put, ref.ord) == (40, store[40].numel(), PUT, 0)
    assert store[41].numel() <= 256
    with pytest.raises(RowFormatError, match="reference to global index 40: decode the row stored there"):
        decode_row(store[41])


def fetch(store: dict[int, torch.Tensor], wanted: list[int]) -> tuple[list[Any], list[int]]:
    """Read rows as a consumer does; also the extra indexes it had to fetch."""
    opened = [open_row(store[index]) for index in wanted]
    plan = plan_resolution(opened, wanted)
    rows_at = [opened[plan.inside.get(position, position)] for position in range(len(wanted))]
    for index, positions in plan.fetch.items():
        source = open_row(store[index])
        for position in positions:
            check_source(opened[position], source)
            rows_at[position] = source
    return [row.decode() for row in rows_at], list(plan.fetch)


@pytest.mark.parametrize("checksum", [False, True])
def test_groups_split_over_batches_ranks_and_orders(checksum: bool) -> None:
    """Members 3 and 6 on two ranks, a rank with nothing, shuffled orders, GRPO groups, dp_size 2 (FC-47)."""
    indexes = [7, 3, 12, 5, 9, 1, 20, 4]
    store = put(2, indexes, checksum=checksum)
    for wanted in itertools.chain(
        itertools.permutations(indexes[:4], 3),
        [[], [12], [5, 20], indexes[::-1], indexes[0::2], indexes[1::2], [9, 1, 20, 4], [20, 12, 4, 3]],
    ):
        got, extra = fetch(store, list(wanted))
        for index, row in zip(wanted, got, strict=True):
            assert strict(row, picture(indexes.index(index) // 4))
        assert len(extra) == len(set(extra)) <= 2
        assert not set(extra) & set(wanted)


def test_a_batch_fetches_each_source_once() -> None:
    store = put(1, list(range(8)))
    wanted = [3, 5, 6, 7]
    plan = plan_resolution([open_row(store[index]) for index in wanted], wanted)
    assert plan.inside == {}
    assert plan.fetch == {0: [0, 1, 2, 3]}


def stale_sources() -> Iterator[tuple[str, torch.Tensor | None]]:
    yield "nothing encoded is there", None
    yield f"row 0 of put {OTHER.hex()[:8]}", put(1, [0, 1], OTHER)[0]  # cleared, its index reused
    yield "row 1 of put 00010203", put(2, [5, 0], PUT)[0]  # the same put, another row
    yield "row 0 of put 00010203 .* expected row 0", encode_rows([picture(0, 100_000)], put_id=PUT)[0]
    yield "row 0 of put", encode_rows([None], put_id=PUT)[0]
    yield "row 1 of put", put(1, [7, 0], PUT)[0]  # itself a reference


@pytest.mark.parametrize(("found", "source"), list(stale_sources()))
def test_a_source_that_vanished_or_was_replaced_is_loud(found: str, source: torch.Tensor | None) -> None:
    referrer = open_row(put(1, [0, 1])[1])
    opened = None if source is None else open_row(source)
    with pytest.raises(StaleReferenceError, match=f"stale: at global index 0 {found}"):
        check_source(referrer, opened)
    with pytest.raises(StaleReferenceError, match="expected row 0 of put 00010203"):
        plan_resolution([referrer, opened], [1, 0])


def test_two_puts_with_the_same_indexes_do_not_serve_each_other() -> None:
    old, new = put(1, [0, 1], PUT), put(1, [0, 1], OTHER)
    assert strict(fetch(new, [0, 1])[0][1], picture(0))
    with pytest.raises(StaleReferenceError):
        fetch({0: new[0], 1: old[1]}, [1])


def test_raw_and_none_rows_pass_through_a_plan() -> None:
    store = put(1, [0, 1])
    opened = [None, open_row(encode_rows([None])[0]), open_row(store[1]), open_row(store[0])]
    plan = plan_resolution(opened, [8, 9, 1, 0])
    assert (plan.inside, plan.fetch) == ({2: 3}, {})


def test_only_a_reference_has_a_source() -> None:
    row = open_row(put(1, [0, 1])[0])
    with pytest.raises(ValueError, match="not a reference"):
        check_source(row, row)


def test_indexes_must_be_one_per_row() -> None:
    with pytest.raises(ValueError, match="2 rows but 1 indexes"):
        encode_rows([{}, {}], dedup_indexes=[0])


def test_numpy_and_tensor_indexes_are_taken_as_ints() -> None:
    row = picture()
    for indexes in (np.array([3, 4]), torch.tensor([3, 4]).tolist()):
        ref = open_row(encode_rows([row, row], dedup_indexes=indexes)[1]).reference  # type: ignore[arg-type]
        assert ref is not None
        assert ref.index == 3
