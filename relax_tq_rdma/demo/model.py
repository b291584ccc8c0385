"""A small vision-to-logit model with real parallel layouts: TP splits its width, CP the patches, PP the layers.

``encode`` pools patch features over the four quarters of the picture and adds the mean of the text's embeddings; two
residual blocks follow; ``head`` gives ten digit logits for each of the four response positions. Everything here is
pure: a rank holds the shard of its layers, and the sums over TP and CP come in as functions.

Weights are a ``dict`` of float32 tensors, named and shaped as in :data:`PARAMETERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import gelu

from relax_tq_rdma.demo.processor import MERGE, PATCH_VALUES
from relax_tq_rdma.demo.prompts import IMAGE_PAD, QUARTERS, VOCABULARY

HIDDEN = 32
DIGITS = 10
POSITIONS = len(QUARTERS)
LAYERS = 4
"""encode, block, block, head: the most pipeline stages the model can be cut into."""

Weights = dict[str, torch.Tensor]
Sum = Callable[[torch.Tensor], torch.Tensor]
"""Sum over a group of ranks that lets gradients through (identity in a group of one)."""


@dataclass(frozen=True)
class Parameter:
    """``split`` is the dimension that TP divides (``None``: every TP rank holds it whole)."""

    name: str
    shape: tuple[int, ...]
    layer: int
    split: int | None


PARAMETERS: tuple[Parameter, ...] = (
    Parameter("vision.weight", (PATCH_VALUES, HIDDEN), 0, 1),
    Parameter("vision.bias", (HIDDEN,), 0, 0),
    Parameter("text.weight", (VOCABULARY, HIDDEN), 0, 1),
    Parameter("block1.scale", (HIDDEN,), 1, 0),
    Parameter("block1.shift", (HIDDEN,), 1, 0),
    Parameter("block2.scale", (HIDDEN,), 2, 0),
    Parameter("block2.shift", (HIDDEN,), 2, 0),
    Parameter("head.weight", (HIDDEN, DIGITS), 3, 0),
    Parameter("head.bias", (DIGITS,), 3, None),
)

ENCODER_LAYER = 0
"""The layer whose gradients are partial on each CP rank: it alone sees the patches."""


def initial_weights(seed: int) -> Weights:
    """Whole model: normal weights scaled by fan-in, zero biases; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    weights: Weights = {}
    for parameter in PARAMETERS:
        values = torch.randn(parameter.shape, generator=generator)
        weights[parameter.name] = values * parameter.shape[0] ** -0.5 if len(parameter.shape) > 1 else values * 0.1
    return weights


def stage_layers(stage: int, stages: int) -> range:
    """Layers of pipeline stage ``stage``, as even as possible."""
    return range(stage * LAYERS // stages, (stage + 1) * LAYERS // stages)


def shard(weights: Weights, layers: Sequence[int], tp_rank: int, tp: int) -> Weights:
    """The part of the whole model that one rank holds (own memory, so training does not touch ``weights``)."""
    part: Weights = {}
    for parameter in PARAMETERS:
        if parameter.layer in layers:
            whole = weights[parameter.name]
            piece = whole if parameter.split is None else whole.chunk(tp, dim=parameter.split)[tp_rank]
            part[parameter.name] = piece.clone(memory_format=torch.contiguous_format)
    return part


def assemble(shards: Mapping[int, Sequence[Weights]]) -> Weights:
    """Inverse of :func:`shard`: shards of every stage, by TP rank."""
    weights: Weights = {}
    for parameter in PARAMETERS:
        pieces = [
            part[parameter.name] for tp_rank in sorted(shards) for part in shards[tp_rank] if parameter.name in part
        ]
        weights[parameter.name] = pieces[0] if parameter.split is None else torch.cat(pieces, dim=parameter.split)
    return weights


@dataclass(frozen=True)
class Inputs:
    """What ``encode`` reads of one sample, already cut to one CP rank's part.

    ``patches`` float32 ``[p, 1176]``, ``pooling`` float32 ``[4, p]`` (each quarter's patch weights), ``text`` int64
    ``[t]`` and ``text_scale``, one over the number of text tokens of the whole prompt.
    """

    patches: torch.Tensor
    pooling: torch.Tensor
    text: torch.Tensor
    text_scale: float


def make_inputs(
    prompt_tokens: torch.Tensor, train_inputs: Mapping[str, torch.Tensor] | None, cp_rank: int = 0, cp: int = 1
) -> Inputs:
    """Cut one sample for CP rank ``cp_rank`` of ``cp``.

    Everything is copied into fresh memory: a decoded payload may start at any address, and the result of a matrix
    product may depend, in the last bit, on how its operands are aligned.
    """
    text = prompt_tokens[prompt_tokens != IMAGE_PAD]
    mine = slice(cp_rank, None, cp)
    if train_inputs is None:
        patches, pooling = torch.zeros(0, PATCH_VALUES), torch.zeros(POSITIONS, 0)
    else:
        patches = train_inputs["pixel_values"][mine].to(torch.float32).clone(memory_format=torch.contiguous_format)
        pooling = _quarter_pooling(train_inputs["image_grid_thw"])[:, mine].clone(memory_format=torch.contiguous_format)
    return Inputs(patches, pooling, text[mine].clone(), 1.0 / len(text))


def forward(
    weights: Weights, layers: Sequence[int], inputs: Inputs, received: torch.Tensor | None, tp_sum: Sum, cp_sum: Sum
) -> torch.Tensor:
    """Run ``layers``. ``received`` is the activation ``[4, hidden / tp]`` of the stage before, ``None`` for the first.

    Returns an activation of that shape, or the logits ``[4, 10]`` when the last layer is among ``layers``.
    """
    activation = received
    for layer in layers:
        if layer == ENCODER_LAYER:
            activation = cp_sum(_encode(weights, inputs))
        elif layer == LAYERS - 1:
            assert activation is not None
            activation = tp_sum(activation @ weights["head.weight"]) + weights["head.bias"]
        else:
            assert activation is not None
            scale, shift = weights[f"block{layer}.scale"], weights[f"block{layer}.shift"]
            activation = activation + gelu(activation * scale + shift)
    assert activation is not None
    return activation


def _encode(weights: Weights, inputs: Inputs) -> torch.Tensor:
    seen = inputs.pooling @ gelu(inputs.patches @ weights["vision.weight"] + weights["vision.bias"])
    read: torch.Tensor = weights["text.weight"][inputs.text].sum(dim=0) * inputs.text_scale
    return seen + read


def _quarter_pooling(grid: torch.Tensor) -> torch.Tensor:
    """``[4, patches]``: row q averages the patches of quarter q. Patches come in 2 x 2 merge blocks, as in Qwen2-VL."""
    _, height, width = (int(side) for side in grid[0])
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    quarter = (rows >= height / 2).long() * 2 + (columns >= width / 2).long()
    ordered = quarter.reshape(height // MERGE, MERGE, width // MERGE, MERGE).transpose(1, 2).reshape(-1)
    one_hot = torch.nn.functional.one_hot(ordered, POSITIONS).to(torch.float32).T
    return one_hot / one_hot.sum(dim=1, keepdim=True).clamp(min=1.0)


def grpo_loss(
    logits: torch.Tensor,
    response: torch.Tensor,
    behaviour_log_probs: torch.Tensor,
    advantage: float,
    mask: torch.Tensor,
) -> torch.Tensor:
    """Clipped GRPO objective of one answer with an entropy bonus; scalar, to be minimised.

    ``response`` int64 ``[r]`` holds digits, ``behaviour_log_probs`` and ``mask`` have the same length.
    """
    log_probs = torch.log_softmax(logits[: len(response)], dim=-1)
    ratio = torch.exp(log_probs.gather(1, response[:, None])[:, 0] - behaviour_log_probs)
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
    return -((gain + 0.01 * entropy) * mask).sum() / mask.sum()
