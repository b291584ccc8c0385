"""Micro-batches for the model. ``get_batch`` changes the dict it is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

MULTIMODAL = "multimodal_train_inputs"


class DataIterator:
    """Over a rollout that is here as a whole. Every micro-batch is a fresh dict, so ``rollout_data`` stays as it is."""

    def __init__(
        self,
        rollout_data: dict[str, Any],
        micro_batch_size: int | None = None,
        micro_batch_indices: list[list[int]] | None = None,
    ) -> None:
        self.rollout_data = rollout_data
        rows = len(rollout_data["total_lengths"])
        size = micro_batch_size or rows
        self._indices = micro_batch_indices or [list(range(at, min(at + size, rows))) for at in range(0, rows, size)]
        self.offset = 0

    def get_next(self, keys: Sequence[str]) -> dict[str, Any]:
        if self.offset >= len(self._indices):
            raise StopIteration
        indices = self._indices[self.offset]
        self.offset += 1
        return {key: [self.rollout_data[key][i] for i in indices] for key in keys if key in self.rollout_data}

    def reset(self) -> DataIterator:
        self.offset = 0
        return self


def get_batch(
    data_iterator: Any,
    keys: Sequence[str],
    pad_multiplier: int = 128,
    qkv_format: str = "thd",
    allgather_cp: bool = False,
    is_vl_model: bool = False,
) -> dict[str, Any]:
    """The next micro-batch, packed in place: on streaming paths the iterator's own buffer holds the packed dict.

    Multimodal dicts become one dict of concatenated tensors; the tensor of a lone entry is taken as it is.
    """
    batch = data_iterator.get_next(keys) if hasattr(data_iterator, "get_next") else next(data_iterator)[0]
    lengths = [len(tokens) for tokens in batch["tokens"]]
    batch["unconcat_tokens"] = batch["tokens"]
    batch["tokens"] = torch.cat(batch["tokens"])
    batch["packed_seq_params"] = torch.tensor([0, *lengths]).cumsum(0)
    batch["loss_masks"] = torch.cat(batch["loss_masks"])
    if batch.get(MULTIMODAL) is not None:
        batch[MULTIMODAL], batch["multimodal_num_items"] = _merge(batch[MULTIMODAL])
    return batch


def _merge(entries: list[dict[str, Any] | None]) -> tuple[dict[str, torch.Tensor], dict[str, list[int]]]:
    parts: dict[str, list[torch.Tensor]] = {}
    items: dict[str, list[int]] = {}
    for position, entry in enumerate(entries):
        for key, value in (entry or {}).items():
            tensor = torch.tensor(value) if isinstance(value, list) else value
            parts.setdefault(key, []).append(tensor)
            items.setdefault(key, [0] * len(entries))[position] = len(tensor)
    return {key: found[0] if len(found) == 1 else torch.cat(found) for key, found in parts.items()}, items


def rows_of(batch: dict[str, Any]) -> list[dict[str, Any]]:
    """Samples of a packed micro-batch, as the stand-in's model takes them one by one."""
    count = len(batch["total_lengths"])
    masks = batch["loss_masks"].split(batch["response_lengths"])
    media: list[dict[str, torch.Tensor] | None] = [None] * count
    if batch.get(MULTIMODAL):
        pieces = {key: batch[MULTIMODAL][key].split(sizes) for key, sizes in batch["multimodal_num_items"].items()}
        some = next(iter(batch["multimodal_num_items"].values()))
        media = [{key: piece[i] for key, piece in pieces.items()} if some[i] else None for i in range(count)]
    return [
        {
            **{name: values[i] for name, values in batch.items() if isinstance(values, list) and len(values) == count},
            "tokens": batch["unconcat_tokens"][i],
            "loss_masks": masks[i],
            MULTIMODAL: media[i],
        }
        for i in range(count)
    ]
