"""The model's shards, its view of a picture, and what the trainer's losses mean. One process."""

import pytest
import torch

from relax_tq_rdma.demo import model
from relax_tq_rdma.demo.prompts import IMAGE_PAD


def alone(tensor):
    return tensor


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("tp", [1, 2, 8])
def test_shards_put_together_are_the_whole_model(tp, stages):
    whole = model.initial_weights(3)
    shards = {
        rank: [model.shard(whole, model.stage_layers(stage, stages), rank, tp) for stage in range(stages)]
        for rank in range(tp)
    }
    again = model.assemble(shards)
    assert list(again) == list(whole)
    assert all(torch.equal(again[name], whole[name]) for name in whole)


def test_stages_share_the_layers_without_gap():
    for stages in range(1, model.LAYERS + 1):
        layers = [layer for stage in range(stages) for layer in model.stage_layers(stage, stages)]
        assert layers == list(range(model.LAYERS))


def picture(quarters, height=4, width=4):
    """Train inputs whose patches all hold the value of their quarter, in Qwen2-VL's merge-block order."""
    plane = torch.zeros(height, width)
    for quarter, value in enumerate(quarters):
        rows = slice(0, height // 2) if quarter < 2 else slice(height // 2, height)
        columns = slice(0, width // 2) if quarter % 2 == 0 else slice(width // 2, width)
        plane[rows, columns] = value
    blocks = plane.reshape(height // 2, 2, width // 2, 2).transpose(1, 2).reshape(-1)
    return {
        "pixel_values": blocks[:, None].expand(-1, 1176).clone(),
        "image_grid_thw": torch.tensor([[1, height, width]]),
    }


def test_pooling_separates_the_quarters():
    inputs = model.make_inputs(torch.tensor([1]), picture((1.0, 2.0, 3.0, 4.0)))
    means = inputs.pooling @ inputs.patches
    assert torch.allclose(means[:, 0], torch.tensor([1.0, 2.0, 3.0, 4.0]))


def test_inputs_are_fresh_memory_and_leave_out_picture_tokens():
    payload = picture((0, 1, 2, 3))
    inputs = model.make_inputs(torch.tensor([5, IMAGE_PAD, IMAGE_PAD, 7]), payload)
    assert inputs.text.tolist() == [5, 7]
    inputs.patches.zero_()
    assert payload["pixel_values"].any()


@pytest.mark.parametrize("cp", [2, 3])
def test_parts_of_a_sample_add_up_to_it(cp):
    weights, payload, text = model.initial_weights(0), picture((0.1, -0.2, 0.3, 0.9)), torch.tensor([3, 4, 5, 6])
    whole = model.forward(weights, [0], model.make_inputs(text, payload), None, alone, alone)
    parts = [
        model.forward(weights, [0], model.make_inputs(text, payload, rank, cp), None, alone, alone)
        for rank in range(cp)
    ]
    assert torch.allclose(sum(parts), whole, atol=1e-5)


def test_text_only_samples_have_logits_and_no_vision_gradient():
    weights = {name: weight.requires_grad_() for name, weight in model.initial_weights(0).items()}
    logits = model.forward(weights, range(4), model.make_inputs(torch.tensor([65, 66]), None), None, alone, alone)
    assert logits.shape == (model.POSITIONS, model.DIGITS)
    logits.sum().backward()
    assert not weights["vision.weight"].grad.any()
    assert weights["text.weight"].grad[65].any()


def test_loss_of_the_behaviour_policy_is_minus_the_advantage_and_the_entropy():
    logits = torch.zeros(4, 10)
    behaviour = torch.full((2,), -torch.log(torch.tensor(10.0)).item())
    loss = model.grpo_loss(logits, torch.tensor([1, 2]), behaviour, 0.5, torch.ones(2))
    assert loss.item() == pytest.approx(-0.5 - 0.01 * torch.log(torch.tensor(10.0)).item())


def test_loss_is_clipped_for_good_answers_that_became_likelier():
    logits = torch.zeros(1, 10)
    logits[0, 1] = 5.0
    unlikely = torch.tensor([-6.0])
    clipped = model.grpo_loss(logits, torch.tensor([1]), unlikely, 1.0, torch.ones(1))
    more = model.grpo_loss(logits, torch.tensor([1]), unlikely - 1, 1.0, torch.ones(1))
    assert clipped.item() == pytest.approx(more.item())
    assert clipped.item() == pytest.approx(-1.2, abs=0.02)
