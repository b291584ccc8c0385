"""Image processing in processes of its own."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

_BF16_DOWNCAST_KEYS = ("pixel_values", "pixel_values_videos", "input_features")
_processor: Any = None


def prepare_mm_inputs_for_ipc(multimodal_inputs: dict[str, Any]) -> dict[str, Any]:
    """Video tensors move into shared memory, in the caller's own dict."""
    for video in multimodal_inputs.get("videos") or ():
        if isinstance(video, torch.Tensor):
            video.share_memory_()
    return multimodal_inputs


def process_sample_in_worker(
    text: str, multimodal_inputs: dict[str, Any], processor_kwargs: dict[str, Any]
) -> tuple[list[int], dict[str, Any] | None]:
    """Prompt ids and train inputs; large float columns as bf16."""
    output = _processor(text=text, **multimodal_inputs, **processor_kwargs)
    train_inputs: dict[str, Any] = {}
    for key, value in output.items():
        if key in ("input_ids", "attention_mask"):
            continue
        tensor = value if isinstance(value, torch.Tensor) else torch.as_tensor(value)
        narrow = key in _BF16_DOWNCAST_KEYS and tensor.dtype == torch.float32
        train_inputs[key] = (tensor.to(torch.bfloat16) if narrow else tensor).contiguous()
    return output["input_ids"][0], train_inputs or None


def _load(model_path: str) -> None:
    global _processor
    from relax.standin.engine import Processor

    torch.set_num_threads(1)
    _processor = Processor(int(model_path))


class ProcessorPool:
    """``executor`` runs :func:`process_sample_in_worker`. Here ``model_path`` is the limit of visual tokens."""

    def __init__(self, model_path: str, pool_size: int | None = None, trust_remote_code: bool = True) -> None:
        self.executor = ProcessPoolExecutor(
            pool_size, mp_context=multiprocessing.get_context("spawn"), initializer=_load, initargs=(model_path,)
        )

    def shutdown(self, wait: bool = True) -> None:
        self.executor.shutdown(wait=wait, cancel_futures=True)
