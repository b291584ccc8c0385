"""Where prompts come from: an actor of its own, so groups travel to and from it as Ray messages."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from relax.utils.types import Sample
from relax_tq_rdma.demo.prompts import Prompt, draw_prompt

EVAL_PROMPTS = 2
_EVAL_FROM = 1_000_000


def _shallow_copy_sample(src: Sample) -> Sample:
    """A member of a group: lists of its own, ``multimodal_inputs`` shared."""
    copy = Sample.__new__(Sample)
    copy.__dict__.update(src.__dict__)
    copy.tokens, copy.rollout_tokens = list(src.tokens), list(src.rollout_tokens)
    copy.weight_versions, copy.metadata = list(src.weight_versions), dict(src.metadata)
    return copy


class RolloutDataSource:
    """The demo's prompts, in order. Samples and groups are counted over the whole job."""

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.sample_group_index = args.start_rollout_id * args.rollout_batch_size
        self.sample_index = self.sample_group_index * args.n_samples_per_prompt

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """``num_samples`` groups."""
        return [self._next_group() for _ in range(num_samples)]

    def get_eval_samples(self, n_samples: int) -> list[list[Sample]]:
        drawn = [draw_prompt(self.args.seed, _EVAL_FROM + i) for i in range(EVAL_PROMPTS)]
        return [self._group(prompt, prompt.index, prompt.index * n_samples, n_samples) for prompt in drawn]

    def _next_group(self) -> list[Sample]:
        prompt = draw_prompt(self.args.seed, self.sample_group_index)
        group = self._group(prompt, self.sample_group_index, self.sample_index, self.args.n_samples_per_prompt)
        self.sample_group_index += 1
        self.sample_index += len(group)
        return group

    def _group(self, prompt: Prompt, group_index: int, first_index: int, size: int) -> list[Sample]:
        media: dict[str, Any] | None = None
        if prompt.image is not None:
            media = {"images": [prompt.image], "videos": None, "audio": None}
        drawn = Sample(prompt=prompt.text, label=prompt.answer, multimodal_inputs=media)
        group = [_shallow_copy_sample(drawn) for _ in range(size)]
        for position, sample in enumerate(group):
            sample.group_index, sample.index = group_index, first_index + position
        return group


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """Groups that were given back are drawn first."""

    def __init__(self, args: Namespace) -> None:
        super().__init__(args)
        self.buffer: list[list[Sample]] = []

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        again, self.buffer = self.buffer[:num_samples], self.buffer[num_samples:]
        return again + super().get_samples(num_samples - len(again))

    def add_samples(self, groups: list[list[Sample]]) -> None:
        for group in groups:
            assert len(group) == self.args.n_samples_per_prompt, f"a group of {len(group)} was given back"
        self.buffer.extend(groups)

    def buffer_length(self) -> int:
        return len(self.buffer)
