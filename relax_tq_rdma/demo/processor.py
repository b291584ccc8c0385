"""The real image processor: transformers' Qwen2-VL on PIL, built from its defaults, so no hub is asked."""

from __future__ import annotations

import os
from typing import Any

import torch

from relax_tq_rdma.demo.pictures import VISION_EXTRA
from relax_tq_rdma.errors import StartError

PATCH = 14
MERGE = 2
PIXELS_PER_TOKEN = (PATCH * MERGE) ** 2
"""One visual token covers 28 x 28 pixels: 2 x 2 patches of 14 x 14."""

PATCH_VALUES = 3 * 2 * PATCH * PATCH
"""Values of one row of ``pixel_values``: channels x temporal patch x patch x patch = 1176."""

MIN_TOKENS = 4


class ImageProcessor:
    """Turns ``multimodal_inputs`` into the train inputs of one sample.

    ``max_tokens`` is the limit of visual tokens per picture. Output: ``pixel_values`` float32 ``[4 * tokens, 1176]``
    and ``image_grid_thw`` int64 ``[pictures, 3]``, freshly allocated by each call.
    """

    def __init__(self, max_tokens: int) -> None:
        self._processor = _processor_class()(
            min_pixels=MIN_TOKENS * PIXELS_PER_TOKEN, max_pixels=max_tokens * PIXELS_PER_TOKEN
        )

    def __call__(self, multimodal_inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
        output = self._processor(images=multimodal_inputs["images"], return_tensors="np")
        return {key: torch.from_numpy(value) for key, value in output.items()}


def visual_tokens(train_inputs: dict[str, torch.Tensor]) -> int:
    """Tokens the language model sees for the pictures of one sample."""
    return int(train_inputs["image_grid_thw"].prod(dim=1).sum()) // MERGE**2


def _processor_class() -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # this process never asks the hub for anything
    try:
        try:  # transformers 5 names the PIL processor so; its plain name needs torchvision
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

            return Qwen2VLImageProcessorPil
        except ModuleNotFoundError:  # transformers 4
            from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

            return Qwen2VLImageProcessor
    except ImportError as exc:
        raise StartError(f"transformers' Qwen2-VL image processor cannot be imported ({exc}): {VISION_EXTRA}") from None
