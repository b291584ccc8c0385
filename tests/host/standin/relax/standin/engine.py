"""Tokenizer, processor and inference engine of the stand-in, on the demo's task and model.

The engine answers from the pixels of the sample, with the weights that :func:`begin` chose for the rollout, and from a
random stream of its own for each sample: neither the order of requests nor an abort changes an answer.
"""

from __future__ import annotations

import asyncio
import threading
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

import torch

from relax.utils.types import Sample
from relax_tq_rdma.demo import model, prompts
from relax_tq_rdma.demo.processor import ImageProcessor, visual_tokens

Weights = model.Weights


class Tokenizer:
    def encode(self, text: str) -> list[int]:
        return prompts.text_tokens(text)

    def decode(self, tokens: list[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode()


class Processor:
    """Text and pictures to what transformers' Qwen2-VL processor returns for one prompt."""

    calls = 0
    """In this process, of all instances: a reload of the rollout's module makes a new one."""
    _counting = threading.Lock()

    def __init__(self, max_tokens: int) -> None:
        self.image_processor = ImageProcessor(max_tokens)

    def __call__(self, text: str, images: Any = None, videos: Any = None, audio: Any = None) -> dict[str, Any]:
        with Processor._counting:
            Processor.calls += 1
        made = self.image_processor({"images": images})
        ids = prompts.picture_tokens(visual_tokens(made)) + prompts.text_tokens(text)
        return {"input_ids": [ids], "attention_mask": [[1] * len(ids)], **made}


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    log_probs: list[float]
    weight_version: int
    status: Sample.Status


_weights: dict[int, Weights] = {}
_version = 0
_aborted = asyncio.Event()


def update_weights(version: int, weights: Weights) -> None:
    """Weights after ``version`` training steps. Old ones are dropped once no rollout can ask for them."""
    _weights[version] = weights
    for old in [v for v in _weights if v < version - 8]:
        del _weights[old]


def version_for(args: Namespace, rollout_id: int) -> int:
    """A rollout answers with the weights after step ``rollout_id - max_staleness``, so that runs can be compared."""
    return max(0, rollout_id - (args.max_staleness if args.fully_async else 0))


def ready(args: Namespace, rollout_id: int) -> bool:
    return version_for(args, rollout_id) in _weights


def begin(args: Namespace, rollout_id: int) -> None:
    global _version
    _version = version_for(args, rollout_id)
    _aborted.clear()


def abort_all() -> None:
    _aborted.set()


async def generate(
    args: Namespace,
    sample: Sample,
    prompt_ids: list[int],
    encoded: dict[str, Any],
    left: int,
    evaluation: bool = False,
) -> Answer:
    """At most ``left`` more tokens. An abort on the way gives back what there is."""
    if sample.multimodal_inputs is not None and not encoded.get("image_data"):
        raise RuntimeError(f"request of sample {sample.index} came without its pictures")
    tokens, log_probs = _whole_answer(args, sample, prompt_ids, evaluation)
    have = sample.response_length
    end = min(len(tokens), have + left)
    for position in range(have, end):
        if await _aborted_within(args.standin_token_seconds):
            done = slice(have, position)
            return Answer(tokens[done], log_probs[done], _version, Sample.Status.ABORTED)
    done = slice(have, end)
    status = Sample.Status.COMPLETED if end == len(tokens) else Sample.Status.TRUNCATED
    return Answer(tokens[done], log_probs[done], _version, status)


def routed_experts(tokens: list[int]) -> torch.Tensor:
    """Int32 ``[tokens, 2]``: two experts of eight for each token, as a mixture-of-experts engine reports them."""
    first = torch.tensor(tokens, dtype=torch.int32) % 8
    return torch.stack([first, (first + 3) % 8], dim=1)


def _whole_answer(
    args: Namespace, sample: Sample, prompt_ids: list[int], evaluation: bool
) -> tuple[list[int], list[float]]:
    inputs = model.make_inputs(torch.tensor(prompt_ids), sample.multimodal_train_inputs)
    with torch.no_grad():
        logits = model.forward(_weights[_version], range(model.LAYERS), inputs, None, _alone, _alone)
    log_probs = torch.log_softmax(logits[: len(sample.label)], dim=-1)
    generator = torch.Generator().manual_seed((args.seed * 1_000_003 + sample.index) * 2 + evaluation)
    digits = torch.multinomial(log_probs.exp(), 1, generator=generator)
    return (
        [prompts.digit_token(int(digit)) for digit in digits],
        [float(value) for value in log_probs.gather(1, digits)],
    )


async def _aborted_within(seconds: float) -> bool:
    if seconds <= 0:
        return _aborted.is_set()
    try:
        await asyncio.wait_for(_aborted.wait(), seconds)
    except asyncio.TimeoutError:
        return False
    return True


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
