"""The producer: draws prompts, answers them with the policy it was given, and puts the rows. Runs as a Ray actor."""

from __future__ import annotations

import asyncio
import inspect
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from relax_tq_rdma import accounting
from relax_tq_rdma.demo import model, prompts, rows
from relax_tq_rdma.demo.accounting_lines import LineCatcher
from relax_tq_rdma.demo.processor import ImageProcessor, visual_tokens
from relax_tq_rdma.demo.rows import Sample

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


class Rollout:
    """``await prepare()`` and ``await connect(tq_config)`` once, then ``await produce(step, weights)`` per step.

    The event loop of the actor is the one that awaits the client, and image processing runs in threads beside it, once
    per sample, as the host does it.
    """

    def __init__(self, seed: int, prompts_per_step: int, samples_per_prompt: int, max_tokens: int) -> None:
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        self._seed = seed
        self._prompts = prompts_per_step
        self._samples = samples_per_prompt
        self._max_tokens = max_tokens
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

        await asyncio.gather(*(self._process(sample, partition) for sample in samples))
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

    async def _process(self, sample: Sample, partition: str) -> None:
        sample.tokens = prompts.text_tokens(sample.prompt.text)
        if sample.multimodal_inputs is not None:
            loop = asyncio.get_running_loop()
            made = await loop.run_in_executor(self._threads, self._pixels, sample.multimodal_inputs, partition)
            sample.multimodal_train_inputs = made
            sample.tokens = prompts.picture_tokens(visual_tokens(made)) + sample.tokens

    def _pixels(self, multimodal_inputs: dict[str, Any], partition: str) -> dict[str, torch.Tensor]:
        with accounting.stage("image_processor", partition):
            return self._processor(multimodal_inputs)

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
