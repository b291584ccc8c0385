"""The producer: draws prompts, answers them with the policy it was given, and puts the rows. Runs as a Ray actor."""

from __future__ import annotations

import asyncio
import inspect
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from relax_tq_rdma import accounting
from relax_tq_rdma.demo import model, prompts, rows
from relax_tq_rdma.demo.accounting_lines import LineCatcher
from relax_tq_rdma.demo.processor import ImageProcessor, visual_tokens
from relax_tq_rdma.demo.rows import Sample
from relax_tq_rdma.rollout.group_processor import GroupProcessor, Output

PROCESSOR_THREADS = 2


@dataclass(frozen=True)
class Produced:
    """One partition. ``unique_bytes`` counts equal tensors once; ``lines`` are the accounting's, if it is on."""

    step: int
    rows: int
    bytes: int
    unique_bytes: int
    put_s: float
    mean_reward: float
    lines: list[str]


@dataclass(frozen=True)
class Member:
    """What of a sample decides whether its group shares one run of the image processor."""

    prompt: str
    multimodal_inputs: dict[str, Any] | None


class Rollout:
    """``await prepare()`` and ``await connect(tq_config)`` once, then ``await produce(step, weights)`` per step.

    The event loop of the actor is the one that awaits the client, and image processing runs in threads beside it, once
    per sample, as the host does it, or with ``share_processor`` once per group.
    """

    def __init__(
        self, seed: int, prompts_per_step: int, samples_per_prompt: int, max_tokens: int, share_processor: bool
    ) -> None:
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        self._seed = seed
        self._prompts = prompts_per_step
        self._samples = samples_per_prompt
        self._max_tokens = max_tokens
        self._sharing = GroupProcessor() if share_processor else None
        self._run_image_processor = self._sharing.share(self._pixels) if self._sharing else self._pixels
        self._threads = ThreadPoolExecutor(PROCESSOR_THREADS, thread_name_prefix="processor")
        self._client: Any = None
        self._lines = LineCatcher()

    async def prepare(self) -> None:
        """Load the image processor. Not in the constructor, whose errors Ray buries in its own."""
        self._processor = ImageProcessor(self._max_tokens)

    async def connect(self, tq_config: Any, with_plugin: bool) -> None:
        """Join the job's data system."""
        from relax_tq_rdma.demo.data_system import attach

        self._client = attach(tq_config, with_plugin)
        self._lines.attach()

    async def leave(self) -> None:
        """Close the client. Not on the event loop: closing waits for what runs there."""
        from relax_tq_rdma.demo.data_system import leave

        await asyncio.get_running_loop().run_in_executor(None, leave)

    async def produce(self, step: int, weights: model.Weights) -> Produced:
        """Make the samples of ``step`` and put them into partition ``train_<step>``."""
        partition = f"train_{step}"
        first = step * self._prompts
        drawn = [prompts.draw_prompt(self._seed, first + i) for i in range(self._prompts)]
        groups = [rows.make_group(prompt, self._samples) for prompt in drawn]
        samples = [sample for group in groups for sample in group]

        await asyncio.gather(*(self._process_group(group, partition) for group in groups))
        for group in groups:
            self._answer(group, weights)
        data = rows.to_tensordict(samples)
        fields = accounting.measure(data, content=True).fields

        started = time.perf_counter()
        await _put(self._client, data, partition, rows.custom_meta(samples))
        put_s = time.perf_counter() - started
        return Produced(
            step=step,
            rows=len(samples),
            bytes=sum(field.bytes for field in fields),
            unique_bytes=sum(field.unique_bytes for field in fields),
            put_s=put_s,
            mean_reward=sum(s.raw_reward for s in samples) / len(samples),
            lines=self._lines.take(),
        )

    async def _process_group(self, group: list[Sample], partition: str) -> None:
        members = [Member(sample.prompt.text, sample.multimodal_inputs) for sample in group]
        with self._sharing.scope(None, members) if self._sharing else nullcontext():
            await asyncio.gather(*(self._process(sample, partition) for sample in group))

    async def _process(self, sample: Sample, partition: str) -> None:
        text, media = sample.prompt.text, sample.multimodal_inputs
        sample.tokens = prompts.text_tokens(text)
        if media is not None:
            sample.tokens, sample.multimodal_train_inputs, _ = await self._run_image_processor(
                self._processor, partition, text, media
            )

    async def _pixels(self, processor: Any, partition: Any, text: str, media: dict[str, Any]) -> Output:
        """With the host's signature: tokens of pictures and text, train inputs, seconds."""
        began = time.perf_counter()
        with accounting.stage("image_processor", partition):
            made = await asyncio.get_running_loop().run_in_executor(self._threads, processor, media)
        tokens = prompts.picture_tokens(visual_tokens(made)) + prompts.text_tokens(text)
        return tokens, made, time.perf_counter() - began

    def _answer(self, group: list[Sample], weights: model.Weights) -> None:
        for sample in group:
            inputs = model.make_inputs(torch.tensor(sample.tokens), sample.multimodal_train_inputs)
            with torch.no_grad():
                logits = model.forward(weights, range(model.LAYERS), inputs, None, _alone, _alone)
            log_probs = torch.log_softmax(logits[: len(sample.prompt.answer)], dim=-1)
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + sample.index)
            digits = torch.multinomial(log_probs.exp(), 1, generator=generator)
            sample.response = [int(digit) for digit in digits]
            sample.log_probs = [float(value) for value in log_probs.gather(1, digits)]
            sample.tokens = sample.tokens + [prompts.digit_token(digit) for digit in sample.response]
            sample.raw_reward = prompts.reward(sample.response, sample.prompt.answer)
        for sample, advantage in zip(group, prompts.group_advantages([s.raw_reward for s in group]), strict=True):
            sample.reward = advantage


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


async def _put(client: Any, data: Any, partition_id: str, custom_meta: list[dict[str, int]]) -> None:
    """Put with per-row metadata: TransferQueue's newest line takes it as a keyword, 0.1.10 and 0.1.11 on the meta."""
    if "custom_meta" in inspect.signature(client.async_put).parameters:
        await client.async_put(data=data, partition_id=partition_id, custom_meta=custom_meta)
        return
    meta = await client.async_get_meta(
        data_fields=list(data.keys()), batch_size=data.batch_size[0], partition_id=partition_id, mode="insert"
    )
    meta.update_custom_meta(custom_meta)
    await client.async_put(data=data, metadata=meta)
