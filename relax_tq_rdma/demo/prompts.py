"""The task: how bright are the quarters of a photograph? Every answer can be checked, so rewards are real.

A picture prompt shows a random crop of a photograph and asks for the brightness (0 dark to 9 bright) of its first
one to four quarters. One prompt in eight is text only (a sum of two digits), as in a mixed RL data set.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relax_tq_rdma.demo.pictures import PHOTOGRAPHS, photograph

if TYPE_CHECKING:
    from PIL.Image import Image

QUARTERS = ("top left", "top right", "bottom left", "bottom right")
TEXT_ONLY_EVERY = 8

VISION_START, IMAGE_PAD, VISION_END = 256, 257, 258
VOCABULARY = 259
"""Tokens 0-255 are the bytes of UTF-8 text, then three marks as in Qwen2-VL. No tokenizer has to be downloaded."""


@dataclass(frozen=True)
class Prompt:
    """``index`` counts prompts over the whole job. ``answer`` is the right digits, one response token each."""

    index: int
    text: str
    image: Image | None
    answer: tuple[int, ...]


def draw_prompt(seed: int, index: int) -> Prompt:
    """Prompt ``index`` of the job; the same for the same seed in any process."""
    rng = random.Random(f"{seed}/{index}")
    if index % TEXT_ONLY_EVERY == TEXT_ONLY_EVERY - 1:
        left, right = rng.randrange(10), rng.randrange(10)
        tens, ones = divmod(left + right, 10)
        return Prompt(index, f"What is {left} + {right}? Answer with two digits.", None, (tens, ones))
    image = _crop(photograph(rng.choice(PHOTOGRAPHS)), rng)
    count = rng.randint(1, len(QUARTERS))
    text = f"How bright, from 0 (dark) to 9 (bright), is each of: {', '.join(QUARTERS[:count])}?"
    return Prompt(index, text, image, brightness(image)[:count])


def brightness(image: Image) -> tuple[int, ...]:
    """Mean luminance of the four quarters, each as a digit 0-9, in the order of :data:`QUARTERS`."""
    from PIL.Image import Resampling

    small = image.convert("L").resize((2, 2), Resampling.BOX)
    return tuple(value * 10 // 256 for value in small.tobytes())


def reward(response: Sequence[int], answer: Sequence[int]) -> float:
    """1 for the right digits, falling linearly to 0 with the mean distance."""
    return 1.0 - sum(abs(a - b) for a, b in zip(response, answer, strict=True)) / (9.0 * len(answer))


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """GRPO: rewards of one group, centred and scaled to unit deviation."""
    mean = sum(rewards) / len(rewards)
    deviation = (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5
    return [(r - mean) / (deviation + 1e-6) for r in rewards]


def text_tokens(text: str) -> list[int]:
    return list(text.encode())


def picture_tokens(visual_tokens: int) -> list[int]:
    return [VISION_START, *[IMAGE_PAD] * visual_tokens, VISION_END]


def digit_token(digit: int) -> int:
    return ord("0") + digit


def _crop(image: Image, rng: random.Random) -> Image:
    """A random part, each side 60 % to 100 % of the photograph."""
    width, height = (round(side * rng.uniform(0.6, 1.0)) for side in image.size)
    left, top = rng.randint(0, image.width - width), rng.randint(0, image.height - height)
    return image.crop((left, top, left + width, top + height))
