"""The default rollout function: groups of answers, the image processor once per sample, rows put as they complete."""

from __future__ import annotations

import asyncio
import base64
import copy
import io
import logging
import time
import uuid
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from relax.standin import engine
from relax.standin.line import NEW, WITH
from relax.utils.async_utils import run
from relax.utils.data.processor_pool import ProcessorPool, prepare_mm_inputs_for_ipc, process_sample_in_worker
from relax.utils.misc import SingletonMeta, load_function
from relax.utils.types import Sample
from relax.utils.utils import transfer_batch_to_data_system
from relax_tq_rdma.demo import prompts

logger = logging.getLogger(__name__)


class GenerateState(metaclass=SingletonMeta):
    """What all coroutines of this process share."""

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.tokenizer = engine.Tokenizer()
        self.processor = engine.Processor(args.standin_image_max_tokens)
        pool_size = args.mm_processor_pool_size
        self.processor_pool = ProcessorPool(str(args.standin_image_max_tokens), pool_size) if pool_size else None
        self.encode_executor = ThreadPoolExecutor(2, thread_name_prefix="encode")
        self.semaphore = asyncio.Semaphore(args.sglang_server_concurrency)
        self.sampling_params = {"max_new_tokens": args.rollout_max_response_len, "temperature": 1.0}
        self.evaluating = 0
        self.reset()

    def reset(self) -> None:
        self.remaining_batch_size = 0
        self.pendings: set[asyncio.Task[Any]] = set()
        self.protected_pendings: set[asyncio.Task[Any]] = set()
        self.aborted = False

    def submit_generate_tasks(self, samples: list[list[Sample]]) -> None:
        """One task a group."""
        for group in samples:
            params = self.sampling_params.copy()
            task = asyncio.create_task(
                generate_and_rm_group(self.args, group, sampling_params=params, evaluation=False)
            )
            self.pendings.add(task)
        self.remaining_batch_size += len(samples)


# --- one sample -------------------------------------------------------------------------------------------------------


def _has_media(multimodal_inputs: dict[str, Any] | None) -> bool:
    return bool(multimodal_inputs) and any(multimodal_inputs.get(kind) for kind in ("images", "videos", "audio"))


async def _run_image_processor(
    state: GenerateState, args: Namespace, prompt: str, multimodal_inputs: dict[str, Any]
) -> tuple[list[int], dict[str, Any] | None, float]:
    """Prompt ids, train inputs and seconds."""
    began = time.time()
    loop = asyncio.get_running_loop()
    if state.processor_pool is not None:
        inputs = prepare_mm_inputs_for_ipc(multimodal_inputs)
        prompt_ids, train_inputs = await loop.run_in_executor(
            state.processor_pool.executor, process_sample_in_worker, prompt, inputs, {}
        )
    else:
        output = await loop.run_in_executor(
            state.encode_executor, lambda: state.processor(text=prompt, **multimodal_inputs)
        )
        prompt_ids = output["input_ids"][0]
        train_inputs = {
            key: value if isinstance(value, torch.Tensor) else torch.as_tensor(value)
            for key, value in output.items()
            if key not in ("input_ids", "attention_mask")
        } or None
    return prompt_ids, train_inputs, time.time() - began


async def _encode_multimodal_inputs(multimodal_inputs: dict[str, Any]) -> tuple[dict[str, list[Any]], float]:
    """Media as text for the inference engine."""
    began = time.time()

    def encode(image: Any) -> str:
        buffer = io.BytesIO()
        image.save(buffer, format="PNG", compress_level=1)
        return base64.b64encode(buffer.getvalue()).decode()

    loop = asyncio.get_running_loop()
    state = GenerateState(None)  # it exists by now
    tasks = [loop.run_in_executor(state.encode_executor, encode, image) for image in multimodal_inputs["images"] or ()]
    images = list(await asyncio.gather(*tasks))
    encoded = {
        "image_data": images,
        "video_data": multimodal_inputs["videos"],
        "audio_data": multimodal_inputs["audio"],
    }
    return encoded, time.time() - began


async def generate(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample:
    state = GenerateState(args)
    timing: dict[str, float] = {}
    prompt_ids = state.tokenizer.encode(sample.prompt)
    if hasattr(sample, "_group_processor_output"):
        prompt_ids, sample.multimodal_train_inputs, timing["image_processor"] = sample._group_processor_output
        del sample._group_processor_output
    elif _has_media(sample.multimodal_inputs):
        prompt_ids, train_inputs, timing["image_processor"] = await _run_image_processor(
            state, args, sample.prompt, sample.multimodal_inputs
        )
        sample.multimodal_train_inputs = train_inputs
    if sample.response_length:  # re-entry after an abort
        left = sampling_params["max_new_tokens"] - (len(sample.tokens) - len(prompt_ids))
    else:
        left = sampling_params["max_new_tokens"]
    if left <= 0:
        sample.status = Sample.Status.TRUNCATED
        return sample

    encoded: dict[str, Any] = {}
    if _has_media(sample.multimodal_inputs):
        pre_encoded = getattr(sample, "_pre_encoded_mm", None)
        if pre_encoded is not None:
            encoded, timing["mm_encode"] = pre_encoded, sample._pre_encoded_mm_elapsed
            del sample._pre_encoded_mm, sample._pre_encoded_mm_elapsed
        else:
            encoded, timing["mm_encode"] = await _encode_multimodal_inputs(sample.multimodal_inputs)
    if not sample.tokens:
        sample.tokens = prompt_ids

    began = time.time()
    answer = await engine.generate(args, sample, prompt_ids, encoded, left, evaluation=evaluation)
    timing["generate"] = time.time() - began

    began = time.time()
    sample.tokens = sample.tokens + answer.tokens
    sample.rollout_log_probs = (sample.rollout_log_probs or []) + answer.log_probs
    sample.response += state.tokenizer.decode(answer.tokens)
    sample.response_length += len(answer.tokens)
    sample.weight_versions = [*sample.weight_versions, answer.weight_version]
    sample.status = answer.status
    if args.use_rollout_routing_replay:
        sample.rollout_routed_experts = engine.routed_experts(sample.tokens)
    timing["post_generate"] = time.time() - began
    sample.metadata["_timing"] = timing
    return sample


async def _dispatch_generate(
    state: GenerateState, args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool
) -> Sample:
    path = sample.generate_function_path or args.custom_generate_function_path
    custom = load_function(path)
    if custom is None:
        async with state.semaphore:
            if state.aborted:
                sample.status = Sample.Status.ABORTED
                return sample
            return await generate(args, sample, sampling_params, evaluation=evaluation)
    if getattr(custom, "manages_inference_permit", False):
        return await custom(args, sample, sampling_params)
    async with state.semaphore:
        return await custom(args, sample, sampling_params)


async def generate_and_rm(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample:
    """Answer and reward of one sample; one that is done already comes back as it is."""
    if sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED):
        return sample
    state = GenerateState(args)
    if state.aborted and not (NEW and evaluation):
        sample.status = Sample.Status.ABORTED
        return sample
    sample = await _dispatch_generate(state, args, sample, sampling_params, evaluation)
    if sample.status is Sample.Status.ABORTED:
        return sample
    digits = [token - ord("0") for token in sample.tokens[-sample.response_length :]] if sample.response_length else []
    sample.reward = prompts.reward(digits[: len(sample.label)], sample.label[: len(digits)]) if digits else 0.0
    return sample


async def generate_and_rm_group(
    args: Namespace, group: list[Sample], sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Sample]:
    """All members at once. Their media are encoded once when it is the same object; the processor runs for each."""
    state = GenerateState(args)
    if state.aborted:
        return group
    first = group[0].multimodal_inputs
    for sample in group:
        if sample.session_id is None:
            sample.session_id = uuid.uuid4().hex
    if len(group) > 1 and _has_media(first) and all(sample.multimodal_inputs is first for sample in group):
        encoded, elapsed = await _encode_multimodal_inputs(first)
        for position, sample in enumerate(group):
            sample._pre_encoded_mm = encoded
            sample._pre_encoded_mm_elapsed = 0.0 if position else elapsed
    if "group-processor" in WITH:
        await _process_once(state, args, group)
    tasks = [
        asyncio.create_task(generate_and_rm(args, sample, sampling_params.copy(), evaluation=evaluation))
        for sample in group
    ]
    return list(await asyncio.gather(*tasks))


async def _process_once(state: GenerateState, args: Namespace, group: list[Sample]) -> None:
    """What an unmerged branch of the host does; the mainline has nothing like it."""
    from relax.utils.data.group_processor import copy_group_processor_output, get_reusable_group_processor_input

    shared = get_reusable_group_processor_input(group)
    if shared is None:
        return
    prompt_ids, train_inputs, elapsed = await _run_image_processor(state, args, *shared)
    for position, sample in enumerate(group):
        copies = copy_group_processor_output(prompt_ids, train_inputs)
        sample._group_processor_output = (*copies, 0.0 if position else elapsed)


# --- one rollout ------------------------------------------------------------------------------------------------------


async def abort(args: Namespace, rollout_id: int) -> tuple[list[list[Sample]], list[list[Sample]]]:
    """Stop what is under way: unfinished groups to be drawn again, and finished ones that were protected."""
    state = GenerateState(args)
    state.aborted = True
    engine.abort_all()
    unfinished = []
    for task in list(state.pendings):
        group = await task
        for sample in group:
            if sample.status not in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED):
                sample.abort_count += 1
        unfinished.append(group)
    completed = [await task for task in list(state.protected_pendings)]
    state.pendings.clear()
    return unfinished, completed


async def generate_rollout_async(
    args: Namespace, rollout_id: int, data_source: Any, data_system_client: Any
) -> list[list[Sample]]:
    """Draw, answer and put one partition. Several puts may be in flight at once."""
    state = GenerateState(args)
    engine.begin(args, rollout_id)
    wanted = args.rollout_batch_size
    per_put = (
        args.global_batch_size // args.num_iters_per_train_update // args.n_samples_per_prompt
        if args.fully_async
        else wanted
    )
    done: list[list[Sample]] = []
    batch: list[list[Sample]] = []
    puts: list[asyncio.Task[None]] = []
    while len(done) < wanted:
        while state.remaining_batch_size < wanted:
            drawn = await data_source.get_samples.remote(args.over_sampling_batch_size)
            state.submit_generate_tasks(drawn)
        finished, state.pendings = await asyncio.wait(state.pendings, return_when=asyncio.FIRST_COMPLETED)
        for task in finished:
            group = task.result()
            if len(done) == wanted:
                await data_source.add_samples.remote([group])
                continue
            done.append(group)
            batch.append(group)
            if len(batch) == per_put:
                is_last = len(done) == wanted
                puts.append(
                    asyncio.create_task(
                        transfer_batch_to_data_system(
                            args, batch, len(puts), rollout_id, data_system_client, is_last=is_last
                        )
                    )
                )
                batch = []
    await asyncio.gather(*puts)
    unfinished, _ = await abort(args, rollout_id)
    if unfinished:
        await data_source.add_samples.remote(unfinished)
    state.reset()
    return sorted(done, key=lambda group: group[0].index)


async def eval_rollout(args: Namespace, rollout_id: int, data_source: Any) -> dict[str, Any]:
    """Answer held-out prompts. Every sample is a deep copy, so members of a group share no object."""
    state = GenerateState(args)
    state.evaluating += 1
    try:
        groups = await data_source.get_eval_samples.remote(args.n_samples_per_eval_prompt)
        copies = [[copy.deepcopy(sample) for sample in group] for group in groups]
        params = state.sampling_params.copy()
        answered = await asyncio.gather(
            *(generate_and_rm_group(args, group, params, evaluation=True) for group in copies)
        )
    finally:
        state.evaluating -= 1
    rewards = [sample.reward for group in answered for sample in group]
    return {"eval/reward": sum(rewards) / len(rewards)}


def generate_rollout(
    args: Namespace, rollout_id: int, data_buffer: Any, data_system_client: Any, evaluation: bool = False
) -> Any:
    """The default of ``--rollout-function-path`` and ``--eval-function-path``."""
    if evaluation:
        return run(eval_rollout(args, rollout_id, data_buffer))
    return run(generate_rollout_async(args, rollout_id, data_buffer, data_system_client))
