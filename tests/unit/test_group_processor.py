"""One processor run per group: what is shared, what is not, and what is left behind (RFC §4.4, §5.1; FC-46)."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import gc
import inspect
import weakref
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from relax_tq_rdma.errors import SeamError
from relax_tq_rdma.rollout.group_processor import GroupProcessor, Inputs, Output, common_inputs

PROMPT = "<image> what is this?"
ARGS = SimpleNamespace(custom_generate_function_path=None, use_audio_in_video=False)
STATE = SimpleNamespace(aborted=False)


class Picture:
    """An image that the processor turns into pixels; it can be watched by weak references, unlike a list."""

    def __init__(self, value: int) -> None:
        self.value = value


class HostProcessor:
    """A processor with the host's signature. Each run waits at ``gate``, then fails with ``error`` if there is one."""

    def __init__(self) -> None:
        self.runs: list[str] = []
        self.outputs: list[weakref.ref[torch.Tensor]] = []
        self.cancelled = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.started = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self, state: Any, args: Any, prompt: str, multimodal_inputs: dict[str, Any]) -> Output:
        self.runs.append(prompt)
        self.started.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return self.output(prompt, multimodal_inputs)

    def output(self, prompt: str, multimodal_inputs: dict[str, Any]) -> Output:
        pixels = torch.full((4, 3), float(multimodal_inputs["images"][0].value))
        self.outputs.append(weakref.ref(pixels))
        train_inputs = {
            "pixel_values": pixels,
            "image_grid_thw": torch.tensor([[1, 2, 2]]),
            "second_per_grid_ts": [0.5],
        }
        return [ord(char) for char in prompt], train_inputs, 2.0


def sample(media: Any, prompt: Any = PROMPT, **fields: Any) -> SimpleNamespace:
    return SimpleNamespace(prompt=prompt, multimodal_inputs=media, generate_function_path=None, **fields)


def make_group(n: int = 8, value: int = 7) -> list[SimpleNamespace]:
    media = {"images": [Picture(value)], "videos": [], "audio": []}
    return [sample(media) for _ in range(n)]


Member = Callable[[Any], Coroutine[Any, Any, Any]]


async def generate(
    sharing: GroupProcessor, group: Sequence[Any], member: Member, *, args: Any = ARGS, return_exceptions: bool = False
) -> list[Any]:
    """The host's ``generate_and_rm_group``: one task per member, inside the group's scope."""
    with sharing.scope(args, group):
        tasks = [asyncio.create_task(member(one)) for one in group]
        return await asyncio.gather(*tasks, return_exceptions=return_exceptions)


def member_of(shared: Callable[..., Awaitable[Output]], state: Any = STATE, args: Any = ARGS) -> Member:
    async def member(one: Any) -> Output:
        return await shared(state, args, one.prompt, one.multimodal_inputs)

    return member


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), timeout=20))


async def settle() -> None:
    """Let every task run as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


# What is shared


def test_the_runs_are_as_many_as_the_groups_and_the_outputs_equal_those_of_a_run_per_sample() -> None:
    async def main() -> None:
        sharing, host = GroupProcessor(), HostProcessor()
        groups = [make_group(8, value) for value in range(5)]
        member = member_of(sharing.share(host))
        outputs = await asyncio.gather(*(generate(sharing, group, member) for group in groups))
        assert len(host.runs) == len(groups)
        assert (sharing.counts.groups, sharing.counts.runs, sharing.counts.served) == (5, 5, 35)
        assert not sharing.counts.own
        for group, mine in zip(groups, outputs, strict=True):
            for one, (prompt_ids, train_inputs, _) in zip(group, mine, strict=True):
                expected_ids, expected, _ = host.output(one.prompt, one.multimodal_inputs)
                assert prompt_ids == expected_ids
                assert train_inputs is not None
                assert expected is not None
                assert list(train_inputs) == list(expected)
                for key in ("pixel_values", "image_grid_thw"):
                    assert train_inputs[key].dtype == expected[key].dtype
                    assert torch.equal(train_inputs[key], expected[key])
                assert train_inputs["second_per_grid_ts"] == expected["second_per_grid_ts"]

    run(main)


def test_without_sharing_the_same_groups_cost_a_run_per_member() -> None:
    async def main() -> None:
        host = HostProcessor()
        member = member_of(host)
        await asyncio.gather(*(member(one) for group in (make_group(8), make_group(8)) for one in group))
        assert len(host.runs) == 16

    run(main)


def test_tensors_are_shared_and_everything_that_somebody_may_change_is_not() -> None:
    async def main() -> None:
        sharing, host = GroupProcessor(), HostProcessor()
        (ids_a, a, _), (ids_b, b, _) = await generate(sharing, make_group(2), member_of(sharing.share(host)))
        assert a["pixel_values"] is b["pixel_values"]
        ids_a.append(99)
        a["second_per_grid_ts"].append(9.0)
        del a["image_grid_thw"]
        assert ids_b == [ord(char) for char in PROMPT]
        assert b["second_per_grid_ts"] == [0.5]
        assert "image_grid_thw" in b

    run(main)


def test_nested_containers_are_not_shared_either() -> None:
    async def main() -> None:
        frames = [torch.zeros(1), torch.ones(1)]

        async def host(state: Any, args: Any, prompt: str, multimodal_inputs: Any) -> Output:
            inputs = {"frames": [frames], "meta": OrderedDict(fps=[1.0]), "size": ([1], 2)}
            return [1], OrderedDict(inputs), 0.1

        sharing = GroupProcessor()
        (_, a, _), (_, b, _) = await generate(sharing, make_group(2), member_of(sharing.share(host)))
        assert type(a) is type(a["meta"]) is OrderedDict
        a["frames"][0].clear()
        a["meta"]["fps"].append(2.0)
        a["meta"]["more"] = 1
        a["size"][0].append(3)
        assert b == {"frames": [frames], "meta": {"fps": [1.0]}, "size": ([1], 2)}
        assert b["frames"][0][0] is frames[0]

    run(main)


def test_the_time_of_a_run_is_reported_once() -> None:
    async def main() -> None:
        sharing, host = GroupProcessor(), HostProcessor()
        outputs = await generate(sharing, make_group(8), member_of(sharing.share(host)))
        assert sorted(seconds for _, _, seconds in outputs) == [0.0] * 7 + [2.0]

    run(main)


def test_no_train_inputs_stay_none() -> None:
    async def main() -> None:
        async def host(state: Any, args: Any, prompt: str, multimodal_inputs: Any) -> Output:
            return [1, 2], None, 0.5

        sharing = GroupProcessor()
        outputs = await generate(sharing, make_group(3), member_of(sharing.share(host)))
        assert [train_inputs for _, train_inputs, _ in outputs] == [None] * 3

    run(main)


def test_a_synchronous_processor_is_shared_too() -> None:
    async def main() -> None:
        calls = []

        def host(state: Any, args: Any, prompt: str, multimodal_inputs: Any) -> Output:
            calls.append(prompt)
            return [1], None, 0.5

        sharing = GroupProcessor()
        await generate(sharing, make_group(4), member_of(sharing.share(host)))
        await sharing.share(host)(STATE, ARGS, "alone", {})
        assert calls == [PROMPT, "alone"]

    run(main)


def test_the_wrapper_keeps_the_host_s_signature_and_takes_keywords() -> None:
    async def main() -> None:
        async def _run_image_processor(state: Any, args: Any, prompt: str, multimodal_inputs: Any) -> Output:
            return [1], None, 0.5

        shared = GroupProcessor().share(_run_image_processor)
        assert inspect.signature(shared) == inspect.signature(_run_image_processor)
        assert inspect.iscoroutinefunction(shared)
        assert shared.__name__ == "_run_image_processor"
        assert await shared(STATE, ARGS, prompt="p", multimodal_inputs={}) == ([1], None, 0.5)

    run(main)


# Interleavings


def test_a_member_that_comes_while_the_run_is_in_flight_joins_it() -> None:
    async def main() -> None:
        sharing, host = GroupProcessor(), HostProcessor()
        shared, group = sharing.share(host), make_group(3)
        host.gate.clear()
        with sharing.scope(ARGS, group):
            first = asyncio.create_task(member_of(shared)(group[0]))
            await host.started.wait()
            second = asyncio.create_task(member_of(shared)(group[1]))
            await settle()
            assert not first.done()
            assert not second.done()
            host.gate.set()
            await asyncio.gather(first, second)
            # The last member was held back by the host's semaphore and comes when the run is long over.
            await member_of(shared)(group[2])
        assert len(host.runs) == 1

    run(main)


def test_the_member_that_started_the_run_can_be_cancelled_without_harm_to_the_others() -> None:
    async def main() -> None:
        sharing, host = GroupProcessor(), HostProcessor()
        host.gate.clear()
        group = make_group(4)
        with sharing.scope(ARGS, group):
            tasks = [asyncio.create_task(member_of(sharing.share(host))(one)) for one in group[:1]]
            await host.started.wait()
            shared = sharing.share(host)
            tasks += [asyncio.create_task(member_of(shared)(one)) for one in group[1:]]
            await settle()
            tasks[0].cancel()
            await settle()
            assert tasks[0].cancelled()
            host.gate.set()
            outputs = await asyncio.gather(*tasks[1:])
        assert (len(host.runs), host.cancelled) == (1, 0)
        # Nobody else has told the time of the run, so the first of those that got the output does.
        assert sorted(seconds for _, _, seconds in outputs) == [0.0, 0.0, 2.0]

    run(main)


def test_when_the_last_member_that_waits_is_cancelled_so_is_the_run_and_the_next_member_starts_anew() -> None:
    async def main() -> None:
        sharing, host = GroupProcessor(), HostProcessor()
        shared, group = sharing.share(host), make_group(3)
        host.gate.clear()
        with sharing.scope(ARGS, group):
            waiting = [asyncio.create_task(member_of(shared)(one)) for one in group[:2]]
            await host.started.wait()
            for task in waiting:
                task.cancel()
            # The third one comes when the run has been cancelled but does not know it yet.
            third = asyncio.create_task(member_of(shared)(group[2]))
            await settle()
            assert host.cancelled == 1
            host.gate.set()
            prompt_ids, _, seconds = await third
        assert prompt_ids
        assert seconds == 2.0
        assert len(host.runs) == 2

    run(main)


def test_a_wrapper_around_a_wrapper_does_not_wait_for_itself() -> None:
    async def main() -> None:
        sharing, host = GroupProcessor(), HostProcessor()
        twice = sharing.share(sharing.share(host))
        await asyncio.wait_for(generate(sharing, make_group(4), member_of(twice)), timeout=5)
        assert len(host.runs) == 1

    run(main)


def test_a_processor_that_calls_itself_does_not_wait_for_itself() -> None:
    async def main() -> None:
        sharing, host = GroupProcessor(), HostProcessor()

        async def twofold(state: Any, args: Any, prompt: str, multimodal_inputs: Any) -> Output:
            if not host.runs:
                await host(state, args, prompt, multimodal_inputs)
                return await shared(state, args, prompt, multimodal_inputs)
            return await host(state, args, prompt, multimodal_inputs)

        shared = sharing.share(twofold)
        await asyncio.wait_for(generate(sharing, make_group(4), member_of(shared)), timeout=5)
        assert len(host.runs) == 2

    run(main)


def test_two_groups_in_flight_do_not_mix_even_with_equal_prompts() -> None:
    async def main() -> None:
        sharing, host = GroupProcessor(), HostProcessor()
        member = member_of(sharing.share(host))
        host.gate.clear()
        tasks = [asyncio.create_task(generate(sharing, make_group(4, value), member)) for value in (1, 2)]
        await settle()
        assert len(host.runs) == 2
        host.gate.set()
        for value, outputs in zip((1, 2), await asyncio.gather(*tasks), strict=True):
            assert all(
                torch.equal(inputs["pixel_values"], torch.full((4, 3), float(value))) for _, inputs, _ in outputs
            )

    run(main)


def test_a_member_that_comes_back_for_another_turn_gets_the_same_output_without_a_run() -> None:
    async def main() -> None:
        sharing, host = GroupProcessor(), HostProcessor()
        shared = sharing.share(host)

        async def member(one: Any) -> list[Output]:
            return [await shared(STATE, ARGS, one.prompt, one.multimodal_inputs) for _ in range(2)]

        turns = await generate(sharing, make_group(2), member)
        assert len(host.runs) == 1
        assert sum(seconds for outputs in turns for _, _, seconds in outputs) == 2.0

    run(main)


@pytest.mark.parametrize("seed", range(30))
def test_any_order_of_arrivals_cancellations_and_failures_keeps_the_accounts(seed: int) -> None:
    """Every member that is not cancelled ends with the output or with an error of a run that it waited for."""
    import random

    async def main() -> None:
        rng, before, calls = random.Random(seed), asyncio.all_tasks(), 0
        sharing, host = GroupProcessor(), HostProcessor()
        shared, group = sharing.share(host), make_group(8)
        host.gate.clear()

        async def member(one: Any) -> Output:
            nonlocal calls
            calls += 1
            return await shared(STATE, ARGS, one.prompt, one.multimodal_inputs)

        with sharing.scope(ARGS, group):
            tasks: list[asyncio.Task[Output]] = []
            waiting = list(group)
            while waiting or not all(task.done() for task in tasks):
                match = rng.randrange(4)
                if match == 0 and waiting:
                    tasks.append(asyncio.create_task(member(waiting.pop())))
                elif match == 1 and tasks:
                    rng.choice(tasks).cancel()
                elif match == 2:
                    host.error = OSError("a file is gone") if rng.random() < 0.5 else None
                    host.gate.set()
                    await settle()
                    host.gate.clear()
                for _ in range(rng.randrange(3)):
                    await asyncio.sleep(0)
            results = await asyncio.gather(*tasks, return_exceptions=True)
        outputs = [result for result in results if isinstance(result, tuple)]
        assert len(results) == 8
        assert all(isinstance(result, (tuple, OSError, asyncio.CancelledError)) for result in results)
        assert len({id(inputs["pixel_values"]) for _, inputs, _ in outputs if inputs is not None}) <= 1
        assert sum(seconds for _, _, seconds in outputs) == (2.0 if outputs else 0.0)
        assert sharing.counts.runs + sharing.counts.served == calls
        await settle()
        assert asyncio.all_tasks() == before

    run(main)


# Failure


def test_a_failing_run_reaches_every_member_once_and_is_not_kept() -> None:
    async def main() -> None:
        sharing, host = GroupProcessor(), HostProcessor()
        shared, group = sharing.share(host), make_group(4)
        host.error = RuntimeError("Processor execution failed")
        host.gate.clear()
        with sharing.scope(ARGS, group):
            tasks = [asyncio.create_task(member_of(shared)(one)) for one in group[:3]]
            await settle()
            host.gate.set()
            errors = await asyncio.gather(*tasks, return_exceptions=True)
            assert errors == [host.error] * 3
            assert len(host.runs) == 1
            host.error = None
            _, _, seconds = await member_of(shared)(group[3])
        assert (len(host.runs), seconds) == (2, 2.0)

    run(main)


def test_a_member_that_comes_between_the_failure_and_its_delivery_starts_anew() -> None:
    async def main() -> None:
        sharing, group = GroupProcessor(), make_group(2)
        late: list[asyncio.Task[Output]] = []
        runs = []

        async def host(state: Any, args: Any, prompt: str, multimodal_inputs: Any) -> Output:
            runs.append(prompt)
            if len(runs) == 1:
                # Runs right after this task has failed, ahead of the member that waits for it.
                late.append(in_scope.run(asyncio.create_task, member_of(shared)(group[1])))
                raise OSError("once")
            return [1], None, 0.5

        shared = sharing.share(host)
        with sharing.scope(ARGS, group):
            in_scope = contextvars.copy_context()
            with pytest.raises(OSError, match="once"):
                await member_of(shared)(group[0])
            assert (await late[0])[0] == [1]
        assert len(runs) == 2

    run(main)


def test_a_failure_while_its_last_member_is_cancelled_is_not_reported_as_lost() -> None:
    async def main() -> None:
        complaints: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        sharing, group = GroupProcessor(), make_group(2)
        tasks: list[asyncio.Task[Output]] = []

        async def host(state: Any, args: Any, prompt: str, multimodal_inputs: Any) -> Output:
            await asyncio.sleep(0)
            tasks[0].cancel()
            raise OSError("at the same time")

        with sharing.scope(ARGS, group):
            tasks.append(asyncio.create_task(member_of(sharing.share(host))(group[0])))
            await asyncio.wait(tasks)
        assert tasks[0].cancelled()
        await settle()
        tasks.clear()
        gc.collect()
        await settle()
        assert complaints == []

    run(main)


@pytest.mark.parametrize("output", [([1], None), ((1,), None, 0.1), ([1], [], 0.1), None])
def test_an_output_of_another_shape_is_refused_with_the_way_out(output: Any) -> None:
    async def main() -> None:
        async def host(state: Any, args: Any, prompt: str, multimodal_inputs: Any) -> Any:
            return output

        sharing = GroupProcessor()
        with pytest.raises(SeamError, match="drop --rollout-group-share-processor"):
            await generate(sharing, make_group(2), member_of(sharing.share(host)))
        assert await sharing.share(host)(STATE, ARGS, PROMPT, {}) == output

    run(main)


# Divergence


def test_a_member_with_another_prompt_or_another_object_runs_on_its_own() -> None:
    async def main() -> None:
        sharing, host = GroupProcessor(), HostProcessor()
        shared, group = sharing.share(host), make_group(4)

        async def member(one: Any) -> Output:
            if one is group[1]:
                return await shared(STATE, ARGS, one.prompt + " and then?", one.multimodal_inputs)
            if one is group[2]:
                return await shared(STATE, ARGS, one.prompt, copy.copy(one.multimodal_inputs))
            return await shared(STATE, ARGS, one.prompt, one.multimodal_inputs)

        outputs = await generate(sharing, group, member)
        assert len(host.runs) == 3
        assert [seconds for _, _, seconds in outputs].count(2.0) == 3
        assert outputs[1][0] != outputs[0][0]
        assert outputs[2][1]["pixel_values"] is not outputs[0][1]["pixel_values"]
        assert dict(sharing.counts.own) == {
            "other prompt than the group's": 1,
            "other media object than the group's": 1,
        }

    run(main)


def test_members_under_a_reloaded_host_module_run_on_their_own() -> None:
    async def main() -> None:
        sharing, old, new = GroupProcessor(), HostProcessor(), HostProcessor()
        group = make_group(3)
        with sharing.scope(ARGS, group):
            await member_of(sharing.share(old))(group[0])
            await member_of(sharing.share(new), state=SimpleNamespace())(group[1])
            await member_of(sharing.share(old))(group[2])
        assert (len(old.runs), len(new.runs)) == (1, 1)
        assert dict(sharing.counts.own) == {"the host's module was reloaded": 1}

    run(main)


def test_a_call_from_another_loop_runs_on_its_own() -> None:
    async def main() -> None:
        sharing, host = GroupProcessor(), HostProcessor()
        shared, group = sharing.share(host), make_group(2)

        def elsewhere(one: Any) -> None:
            asyncio.run(member_of(shared)(one))

        with sharing.scope(ARGS, group):
            await member_of(shared)(group[0])
            host.gate = asyncio.Event()
            host.gate.set()
            await asyncio.to_thread(elsewhere, group[1])
        assert len(host.runs) == 2
        assert dict(sharing.counts.own) == {"another event loop than the group's": 1}

    run(main)


@pytest.mark.parametrize(
    ("group", "why"),
    [
        ([copy.deepcopy(one) for one in make_group(4)], "members hold different media objects"),
        ([sample({"images": ["a.png"]}) for _ in range(4)], "members hold different media objects"),
        ([sample(media := {"images": [Picture(1)]}), sample(media, prompt="other")], "members have different prompts"),
        ([sample(media := {"images": [Picture(1)]}, prompt=["turn"]) for _ in range(2)], None),
        (
            [
                sample(media := {"images": [Picture(1)]}),
                SimpleNamespace(prompt=PROMPT, multimodal_inputs=media, generate_function_path="my.generate"),
            ],
            "custom generate function",
        ),
        ([sample(None), sample(None)], "no media"),
        ([sample(media := {"images": [], "videos": [], "audio": []}), sample(media)], "no media"),
        (make_group(1), "one member"),
        ([], "one member"),
        ([make_group(2), make_group(2)], "no media"),
    ],
    ids=[
        "deep copies",
        "equal",
        "prompts",
        "list prompts",
        "custom",
        "none",
        "empty",
        "one",
        "zero",
        "lists of samples",
    ],
)
def test_groups_that_have_nothing_in_common_are_not_shared(group: list[Any], why: str | None) -> None:
    found = common_inputs(ARGS, group)
    assert isinstance(found, str)
    assert why is None or found == why


def test_groups_with_common_inputs() -> None:
    group = make_group(8)
    found = common_inputs(ARGS, group)
    assert isinstance(found, Inputs)
    assert found.media is group[0].multimodal_inputs
    assert found.prompt == PROMPT
    sound = {"images": None, "audio": torch.zeros(3)}  # has no truth value
    assert isinstance(common_inputs(ARGS, [sample(sound), sample(sound)]), Inputs)
    # A slot of the arguments that a custom generate function fills for all samples.
    custom = SimpleNamespace(custom_generate_function_path="my.generate")
    assert common_inputs(custom, group) == "custom generate function"
    # Hosts without these slots.
    bare = [SimpleNamespace(prompt=PROMPT, multimodal_inputs=group[0].multimodal_inputs) for _ in range(2)]
    assert isinstance(common_inputs(SimpleNamespace(), bare), Inputs)


def test_deep_copies_run_one_by_one_and_hide_the_group_around_them() -> None:
    async def main() -> None:
        sharing, host = GroupProcessor(), HostProcessor()
        shared, outer = sharing.share(host), make_group(2)
        with sharing.scope(ARGS, outer):
            await generate(sharing, [copy.deepcopy(one) for one in outer], member_of(shared))
            assert len(host.runs) == 2
            await member_of(shared)(outer[0])
            await member_of(shared)(outer[1])
        assert len(host.runs) == 3

    run(main)


# Nothing is left behind


def test_an_output_dies_with_its_samples_when_the_group_is_done() -> None:
    async def main() -> None:
        sharing, host = GroupProcessor(), HostProcessor()
        group = make_group(8)
        picture = weakref.ref(group[0].multimodal_inputs["images"][0])
        outputs = await generate(sharing, group, member_of(sharing.share(host)))
        for one, (_, train_inputs, _) in zip(group, outputs, strict=True):
            one.multimodal_train_inputs = train_inputs
            assert set(vars(one)) == {
                "prompt",
                "multimodal_inputs",
                "generate_function_path",
                "multimodal_train_inputs",
            }
        del outputs, one, train_inputs, _
        (pixels,) = host.outputs
        await settle()
        assert pixels() is not None
        del group
        gc.collect()
        assert pixels() is None
        assert picture() is None

    run(main)


@pytest.mark.parametrize("end", ["early return", "error of a member", "cancelled"])
def test_the_output_dies_however_the_group_ends(end: str) -> None:
    async def main() -> None:
        sharing, host = GroupProcessor(), HostProcessor()
        shared, group = sharing.share(host), make_group(3)
        picture = weakref.ref(group[0].multimodal_inputs["images"][0])
        lasting = asyncio.Event()

        async def member(one: Any) -> None:
            if end == "early return" and one is group[2]:
                return  # completed in an earlier step
            await shared(STATE, ARGS, one.prompt, one.multimodal_inputs)
            if end == "error of a member" and one is group[2]:
                raise ValueError("reward model")
            if end == "cancelled":
                await lasting.wait()

        task = asyncio.create_task(generate(sharing, group, member))
        await settle()
        if end == "cancelled":
            task.cancel()
        ended = (await asyncio.gather(task, return_exceptions=True))[0]
        assert type(ended) is {"early return": list, "cancelled": asyncio.CancelledError}.get(end, ValueError)
        del ended
        await settle()
        assert len(host.runs) == 1
        del task
        group.clear()
        gc.collect()
        assert host.outputs[0]() is None
        assert picture() is None

    run(main)


def test_a_task_that_outlives_its_group_keeps_nothing_alive_and_runs_on_its_own() -> None:
    async def main() -> None:
        sharing, host = GroupProcessor(), HostProcessor()
        shared, group = sharing.share(host), make_group(2)
        over = asyncio.Event()

        async def straggler() -> Output:
            await over.wait()
            return await shared(STATE, ARGS, PROMPT, {"images": [Picture(3)]})

        with sharing.scope(ARGS, group):
            late = asyncio.create_task(straggler())
            await settle()
            await member_of(shared)(group[0])
        del group
        await settle()
        gc.collect()
        assert host.outputs[0]() is None
        over.set()
        await late
        assert len(host.runs) == 2
        assert dict(sharing.counts.own) == {"the group has ended": 1}

    run(main)


def test_a_member_that_still_waits_when_the_group_ends_gets_its_output() -> None:
    """The host gathers members without waiting for all of them once one has failed."""

    async def main() -> None:
        sharing, host = GroupProcessor(), HostProcessor()
        shared, group = sharing.share(host), make_group(2)
        host.gate.clear()
        with sharing.scope(ARGS, group):
            waiting = asyncio.create_task(member_of(shared)(group[0]))
            await host.started.wait()
        await settle()
        assert not waiting.done()
        host.gate.set()
        assert (await waiting)[2] == 2.0
        assert (len(host.runs), host.cancelled) == (1, 0)

    run(main)


def test_a_group_that_comes_back_after_an_abort_is_processed_anew() -> None:
    async def main() -> None:
        sharing, host = GroupProcessor(), HostProcessor()
        member, group = member_of(sharing.share(host)), make_group(4)
        first = await generate(sharing, group, member)
        second = await generate(sharing, copy.deepcopy(group), member)
        assert len(host.runs) == 2
        assert first[0][1]["pixel_values"] is not second[0][1]["pixel_values"]

    run(main)
