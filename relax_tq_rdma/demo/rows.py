"""Samples, and the rows they become: columns shaped like Relax's (tokens, lengths, rewards, masks, picture dicts)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorData

from relax_tq_rdma.demo.prompts import Prompt

MULTIMODAL = "multimodal_train_inputs"

NUMBERS: tuple[str, ...] = (
    "response_lengths",
    "rewards",
    "raw_reward",
    "truncated",
    "sample_indices",
    "total_lengths",
)
"""Columns with one number a row."""

LISTS: tuple[str, ...] = ("tokens", "loss_masks", "rollout_log_probs")
"""Columns with one list a row."""

FIELDS: tuple[str, ...] = (*LISTS, *NUMBERS, MULTIMODAL)
"""Columns the producer puts and the trainer asks for."""

Row = dict[str, Any]
"""One sample as the trainer sees it: field to tensor, number, or ``dict | None`` for :data:`MULTIMODAL`."""


@dataclass
class Sample:
    """One answer to a prompt. Members of a group share ``multimodal_inputs`` by reference, as in the host."""

    index: int
    group_index: int
    prompt: Prompt
    multimodal_inputs: dict[str, Any] | None
    multimodal_train_inputs: dict[str, torch.Tensor] | None = None
    tokens: list[int] = field(default_factory=list)
    response: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    raw_reward: float = 0.0
    reward: float = 0.0


def make_group(prompt: Prompt, samples: int) -> list[Sample]:
    """The ``samples`` members of one GRPO group; indexes count samples over the whole job."""
    shared = None if prompt.image is None else {"images": [prompt.image]}
    return [Sample(prompt.index * samples + i, prompt.index, prompt, shared) for i in range(samples)]


def to_tensordict(samples: Sequence[Sample]) -> TensorDict:
    """Rows in the order given: numbers become dense columns, lists jagged ones, multimodal dicts stay as they are."""
    columns: dict[str, Any] = {
        "tokens": _jagged([s.tokens for s in samples], torch.int64),
        "response_lengths": torch.tensor([len(s.response) for s in samples]),
        "rewards": torch.tensor([s.reward for s in samples], dtype=torch.float32),
        "raw_reward": torch.tensor([s.raw_reward for s in samples], dtype=torch.float32),
        "truncated": torch.zeros(len(samples), dtype=torch.int64),  # an answer always fits
        "sample_indices": torch.tensor([s.index for s in samples]),
        "loss_masks": _jagged([[1] * len(s.response) for s in samples], torch.int64),
        "total_lengths": torch.tensor([len(s.tokens) for s in samples]),
        "rollout_log_probs": _jagged([s.log_probs for s in samples], torch.float32),
        MULTIMODAL: [s.multimodal_train_inputs for s in samples],
    }
    return TensorDict(columns, batch_size=[len(samples)])


def custom_meta(samples: Sequence[Sample]) -> list[dict[str, int]]:
    """Per row, for samplers: the host's newest line sends length and sample index."""
    return [{"total_lengths": len(s.tokens), "sample_index": s.index} for s in samples]


def to_columns(data: TensorDict) -> dict[str, list[Any]]:
    """A fetched batch as plain lists, one entry a row.

    Raises:
        TypeError: a column holds something a trainer cannot use.
    """
    return {name: _column(name, data[name]) for name in data.keys()}  # noqa: SIM118 (a TensorDict iterates rows)


def to_rows(columns: dict[str, list[Any]]) -> list[Row]:
    """Columns to rows, in the order of the sample index."""
    names = list(columns)
    rows = [dict(zip(names, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return sorted(rows, key=lambda row: int(row["sample_indices"]))


def _column(name: str, values: Any) -> list[Any]:
    if name == MULTIMODAL:
        return [_multimodal_entry(value) for value in values]
    if not isinstance(values, torch.Tensor):
        raise TypeError(f"column {name} came back as {type(values).__name__}, a tensor was put")
    if name in NUMBERS:
        return list(values.reshape(-1).tolist())  # a key-value backend returns [rows, 1]
    return [row.clone() for row in values.unbind()]  # own memory: a pickled view would drag the column along


def _multimodal_entry(value: Any) -> dict[str, Any] | None:
    plain = value.data if isinstance(value, NonTensorData) else value
    if plain is None or isinstance(plain, dict):
        return plain
    if hasattr(plain, "items"):
        return dict(plain.items())
    raise TypeError(f"a row of {MULTIMODAL} came back as {type(plain).__name__}, a dict or None was put")


def _jagged(rows: list[list[Any]], dtype: torch.dtype) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)
