"""Groups, rows, digests: what the producer makes and the trainer gets back, without any service."""

import pytest
import torch
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorData

from relax_tq_rdma.demo.digest import combined, row_digest
from relax_tq_rdma.demo.prompts import draw_prompt
from relax_tq_rdma.demo.rows import FIELDS, MULTIMODAL, custom_meta, make_group, to_columns, to_rows, to_tensordict

PIXELS = torch.arange(8 * 1176, dtype=torch.float32).reshape(8, 1176)
GRID = torch.tensor([[1, 2, 4]])


def batch(prompts=(0, 7), samples=2):
    """Two groups: prompt 0 has a picture, prompt 7 is text only. The last response has one token, the others two."""
    made = []
    for index in prompts:
        for sample in make_group(draw_prompt(0, index), samples):
            sample.tokens = [65 + index, 66, 48, 49]
            sample.response, sample.log_probs = [0, 1], [-0.5, -0.25]
            sample.reward, sample.raw_reward = 1.5, 0.75
            if sample.multimodal_inputs is not None:
                sample.multimodal_train_inputs = {"pixel_values": PIXELS.clone(), "image_grid_thw": GRID.clone()}
            made.append(sample)
    made[-1].tokens, made[-1].response, made[-1].log_probs = [70, 48], [0], [-0.125]
    return made


def test_a_group_shares_its_inputs_by_reference_and_is_numbered_over_the_job():
    group = make_group(draw_prompt(0, 2), 4)
    assert [sample.index for sample in group] == [8, 9, 10, 11]
    assert {sample.group_index for sample in group} == {2}
    assert all(sample.multimodal_inputs is group[0].multimodal_inputs for sample in group)
    assert make_group(draw_prompt(0, 7), 1)[0].multimodal_inputs is None


def test_columns_have_the_hosts_names_shapes_and_types():
    data = to_tensordict(batch())
    assert tuple(data.keys()) == tuple(name for name in data.keys() if name in FIELDS)  # noqa: SIM118
    assert set(data.keys()) == set(FIELDS)
    assert data["tokens"].is_nested
    assert data["tokens"].dtype == torch.int64
    assert data["response_lengths"].tolist() == [2, 2, 2, 1]
    assert data["rollout_log_probs"].dtype == torch.float32
    assert [entry is None for entry in data[MULTIMODAL]] == [False, False, True, True]
    assert custom_meta(batch())[-1] == {"total_lengths": 2, "sample_index": 15}


def test_rows_come_back_as_they_were_put_in_sample_order():
    samples = batch()
    rows = to_rows(to_columns(to_tensordict(samples[::-1])))
    assert [row["sample_indices"] for row in rows] == [0, 1, 14, 15]
    assert rows[3]["tokens"].tolist() == [70, 48]
    assert rows[3]["loss_masks"].tolist() == [1]
    assert rows[0]["rewards"] == 1.5
    assert rows[3][MULTIMODAL] is None
    assert torch.equal(rows[1][MULTIMODAL]["pixel_values"], PIXELS)


def test_what_a_key_value_backend_returns_makes_the_same_rows():
    data = to_tensordict(batch())
    numbers = {"response_lengths", "rewards", "raw_reward", "truncated", "sample_indices", "total_lengths"}
    returned = {
        name: data[name].unsqueeze(1) if name in numbers else data[name] for name in FIELDS if name != MULTIMODAL
    }
    returned[MULTIMODAL] = [NonTensorData(entry) for entry in data[MULTIMODAL]]
    again = TensorDict(returned, batch_size=[4])
    assert [row_digest(r) for r in to_rows(to_columns(again))] == [row_digest(r) for r in to_rows(to_columns(data))]


def test_a_token_row_has_its_own_memory():
    tokens = to_columns(to_tensordict(batch()))["tokens"]
    assert all(row.untyped_storage().nbytes() == row.nbytes for row in tokens)


def test_a_column_of_another_type_is_refused_by_name():
    data = to_tensordict(batch())
    data["rewards"] = ["a", "b", "c", "d"]
    with pytest.raises(TypeError, match="column rewards"):
        to_columns(data)
    with pytest.raises(TypeError, match=f"a row of {MULTIMODAL}"):
        to_columns(TensorDict({MULTIMODAL: ["x"]}, batch_size=[1]))


def picture(pixels=PIXELS, **entries):
    return {"tokens": torch.tensor([1, 2]), MULTIMODAL: {"pixel_values": pixels, **entries}}


def test_a_digest_sees_every_bit_name_type_shape_and_the_order_of_a_dict():
    base = row_digest(picture(grid=GRID))
    flipped = PIXELS.clone()
    flipped[7, 1175] = torch.nextafter(flipped[7, 1175], torch.tensor(torch.inf))
    other = [
        picture(flipped, grid=GRID),
        picture(PIXELS.reshape(4, 2352), grid=GRID),
        picture(PIXELS.view(torch.int32), grid=GRID),
        picture(grid=GRID.to(torch.int32)),
        picture(grid2=GRID),
        picture(),
        {"tokens": torch.tensor([1, 2]), MULTIMODAL: {"grid": GRID, "pixel_values": PIXELS}},
        {"tokens": torch.tensor([1, 2]), MULTIMODAL: None},
    ]
    assert len({base, *map(row_digest, other)}) == len(other) + 1


def test_a_digest_does_not_see_memory_layout_or_column_order():
    base = row_digest(picture(grid=GRID))
    strided = torch.empty(1176, 8).T
    strided.copy_(PIXELS)
    assert not strided.is_contiguous()
    assert row_digest(picture(strided, grid=GRID)) == base
    assert row_digest(dict(reversed(picture(grid=GRID).items()))) == base


def test_a_digest_takes_empty_zero_dim_and_bf16_tensors_and_refuses_objects():
    values = [torch.empty(0, 3), torch.tensor(1.0), torch.ones(2, dtype=torch.bfloat16), [1, 2.5, "x", True, None]]
    assert len({row_digest({"a": value}) for value in values}) == len(values)
    with pytest.raises(TypeError, match="field a holds a object"):
        row_digest({"a": object()})


def test_combined_digests_depend_on_order():
    assert combined([b"a" * 16, b"b" * 16]) != combined([b"b" * 16, b"a" * 16])
