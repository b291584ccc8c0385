"""L3a in the stand-in host: its own rollout module, its data source, transformers' real image processor."""

from __future__ import annotations

import asyncio
import importlib
import os
import pickle
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from relax_tq_rdma.demo import model
from relax_tq_rdma.flags import add_arguments
from relax_tq_rdma.rollout.group_processor import Counts
from relax_tq_rdma.seams.base import require
from relax_tq_rdma.seams.on_import import when_imported
from relax_tq_rdma.seams.relax_rollout import MODULE, RelaxRollout
from tests.host_jobs import STANDIN
from tests.host_module import forget, modules_in
from tests.unit.test_payload_mixin import Manager, Unit, get, put

pytestmark = [pytest.mark.host, pytest.mark.timeout(120)]

GROUPS, MEMBERS = 2, 8
ARGV = [
    *("train", "--fully-async", "--multimodal-keys", '{"image": "images"}', "--standin-image-max-tokens", "64"),
    *("--rollout-batch-size", str(GROUPS), "--n-samples-per-prompt", str(MEMBERS)),
]
MM = "multimodal_train_inputs"


class Processor:
    """The host's, counting its runs. It can be held, and can fail."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.runs = 0
        self.go = threading.Event()
        self.go.set()
        self.entered = threading.Event()
        self.error: Exception | None = None

    def __call__(self, **asked: Any) -> Any:
        self.runs += 1
        self.entered.set()
        assert self.go.wait(60)
        if self.error is not None:
            raise self.error
        return self._real(**asked)


class Host:
    """The rollout process of one job, with or without the plugin. ``more``: attributes of the host's arguments."""

    def __init__(self, share: bool, **more: Any) -> None:
        parse_args = importlib.import_module("relax.utils.arguments").parse_args
        self.args = parse_args(add_custom_arguments=add_arguments)
        for name, value in {"rollout_group_share_processor": share, **more}.items():
            assert hasattr(self.args, name)
            setattr(self.args, name, value)
        self.seam = RelaxRollout()
        self._hook = when_imported(MODULE, self.seam.apply) if share else None
        self.module = importlib.import_module(MODULE)
        require([self.seam])
        self.engine = importlib.import_module("relax.standin.engine")
        self.engine.update_weights(0, model.initial_weights(self.args.seed))
        self.engine.begin(self.args, 0)
        self.state = self.module.GenerateState(self.args)
        self.processor = self.state.processor = Processor(self.state.processor)

    def close(self) -> None:
        if self._hook is not None:
            self._hook.cancel()
        self.seam.remove()

    @property
    def counts(self) -> Counts:
        return self.seam.counts

    def draw(self, groups: int = GROUPS) -> list[list[Any]]:
        """Groups with pictures, as they come out of the data source's actor."""
        source = importlib.import_module("relax.engine.rollout.data_source").RolloutDataSource(self.args)
        drawn = [group for group in source.get_samples(groups + 2) if group[0].multimodal_inputs is not None][:groups]
        return as_message(drawn)

    async def generate(self, groups: list[list[Any]], evaluation: bool = False) -> list[list[Any]]:
        params = self.state.sampling_params
        tasks = [self.module.generate_and_rm_group(self.args, group, params.copy(), evaluation) for group in groups]
        return await asyncio.wait_for(asyncio.gather(*tasks), 60)

    def run(self, groups: list[list[Any]], evaluation: bool = False) -> list[list[Any]]:
        return asyncio.run(self.generate(groups, evaluation))


BOTH_LINES = pytest.mark.parametrize("start", ["mid", "new"], indirect=True)


@pytest.fixture
def start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Host]]:
    """Starts a host of one line, in this process; a second one replaces the first."""
    monkeypatch.setattr(sys, "argv", ARGV)
    monkeypatch.setenv("STANDIN_LINE", getattr(request, "param", "new"))
    hosts: list[Host] = []

    with modules_in(STANDIN, monkeypatch):

        def begin(share: bool = True, **more: Any) -> Host:
            if hosts:
                hosts[-1].close()
                forget()
            hosts.append(Host(share, **more))
            return hosts[-1]

        yield begin
        for one in hosts:
            one.close()


_ALONE: dict[str, tuple[list[list[Any]], int]] = {}


@pytest.fixture
def alone(start: Callable[..., Host]) -> tuple[list[list[Any]], int]:
    """The same groups without the plugin, and how often the processor ran for them. Once for each line."""
    line = os.environ["STANDIN_LINE"]
    if line not in _ALONE:
        host = start(share=False)
        _ALONE[line] = host.run(host.draw()), host.processor.runs
    return _ALONE[line]


def as_message(groups: list[list[Any]]) -> list[list[Any]]:
    """Through a Ray message."""
    return pickle.loads(pickle.dumps(groups))  # noqa: S301 (our own bytes)


def flat(groups: list[list[Any]]) -> list[Any]:
    return [sample for group in groups for sample in group]


def same(mine: list[list[Any]], theirs: list[list[Any]]) -> bool:
    """Bit for bit: tokens, log-probs, rewards, and training inputs with key order, dtype and shape."""
    for a, b in zip(flat(mine), flat(theirs), strict=True):
        if (a.index, a.tokens, a.rollout_log_probs, a.reward) != (b.index, b.tokens, b.rollout_log_probs, b.reward):
            return False
        if list(a.multimodal_train_inputs) != list(b.multimodal_train_inputs):
            return False
        pairs = zip(a.multimodal_train_inputs.values(), b.multimodal_train_inputs.values(), strict=True)
        if not all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs):
            return False
    return True


def image_processor_time(groups: list[list[Any]]) -> float:
    """The host's ``perf_detail/rollout/image_processor_time/mean``."""
    seconds = [sample.metadata["_timing"]["image_processor"] for sample in flat(groups)]
    return sum(seconds) / len(seconds)


@BOTH_LINES
def test_eight_members_cost_one_run_of_the_real_processor_and_no_bit_changes(
    start: Callable[..., Host], alone: tuple[list[list[Any]], int]
) -> None:
    unshared, runs = alone
    host = start()
    shared = host.run(host.draw())
    assert (runs, host.processor.runs) == (GROUPS * MEMBERS, GROUPS)
    assert same(shared, unshared)
    assert (host.counts.groups, host.counts.runs, host.counts.served) == (GROUPS, GROUPS, GROUPS * (MEMBERS - 1))
    assert not host.counts.own
    # One eighth of the work, and less waiting for it; a busy machine leaves room below that.
    assert image_processor_time(shared) < image_processor_time(unshared) / 3
    for group in shared:
        assert sorted(one.metadata["_timing"]["image_processor"] > 0 for one in group) == [False] * 7 + [True]


def test_no_attribute_of_the_plugin_is_on_a_sample_or_in_its_dump(start: Callable[..., Host]) -> None:
    host = start()
    group = host.run(host.draw(1))[0]
    declared = {field.name for field in fields(type(group[0]))}
    for sample in group:
        assert set(vars(sample)) == declared
        assert set(sample.to_dict()) == declared
    assert b"relax_tq_rdma" not in pickle.dumps(group)
    # What the group shares crosses a Ray message once.
    pixels = group[0].multimodal_train_inputs["pixel_values"]
    assert len(pickle.dumps(group)) < 2 * pixels.nbytes + len(pickle.dumps(group[0].multimodal_inputs))


def test_one_by_one_behind_the_host_s_semaphore_is_one_run_too(start: Callable[..., Host]) -> None:
    host = start(sglang_server_concurrency=1)
    host.run(host.draw(1))
    assert host.processor.runs == 1


def test_members_change_their_own_lists_only(start: Callable[..., Host]) -> None:
    """A custom rollout extends ``sample.tokens``, which on the first turn is the list of the processor."""
    host = start(rollout_max_response_len=1)
    first, second, *_ = host.run(host.draw(1))[0]
    before = list(second.tokens)
    first.tokens.extend([1, 2, 3])
    del first.multimodal_train_inputs["image_grid_thw"]
    assert second.tokens == before
    assert "image_grid_thw" in second.multimodal_train_inputs


@BOTH_LINES
def test_an_aborted_group_that_is_drawn_again_shares_again(
    start: Callable[..., Host], alone: tuple[list[list[Any]], int]
) -> None:
    unshared, _ = alone
    host = start(standin_token_seconds=30.0)

    async def interrupted() -> list[list[Any]]:
        rollout = asyncio.create_task(host.generate(host.draw()))
        while host.counts.runs + host.counts.served < GROUPS * MEMBERS:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)  # all wait for their first token
        host.state.aborted = True
        host.engine.abort_all()
        return await rollout

    again = as_message(asyncio.run(interrupted()))  # back to the data source, and drawn
    assert {sample.status.value for sample in flat(again)} == {"aborted"}
    assert host.processor.runs == GROUPS
    host.state.reset()
    host.engine.begin(host.args, 0)
    host.args.standin_token_seconds = 0.0
    again[0][3].status = type(again[0][3].status).COMPLETED  # an early return
    done = host.run(again)
    assert host.processor.runs == 2 * GROUPS
    done[0][3] = unshared[0][3]
    assert same(done, unshared)


def test_a_failing_run_fails_the_group_as_without_sharing_and_is_not_kept(start: Callable[..., Host]) -> None:
    host = start()
    host.processor.error = ValueError("truncated picture")
    for _ in range(2):
        with pytest.raises(ValueError, match="truncated picture"):
            host.run(host.draw(1))
    host.processor.error = None
    host.run(host.draw(1))
    assert host.processor.runs == 3


@BOTH_LINES
def test_a_hot_reload_in_the_middle_of_a_run_is_followed(
    start: Callable[..., Host], alone: tuple[list[list[Any]], int]
) -> None:
    host = start()
    held, next_one = host.draw()

    async def main() -> list[list[Any]]:
        host.processor.go.clear()
        under_way = asyncio.create_task(host.generate([held]))
        await asyncio.to_thread(host.processor.entered.wait, 60)
        reloaded = importlib.import_module("relax.utils.reload_utils").reload_function(f"{MODULE}.generate_rollout")
        assert reloaded is not None
        state = host.module.GenerateState(host.args)
        assert state is not host.state  # all that was rebound in the module is gone
        host.state, state.processor = state, Processor(state.processor)
        host.processor.go.set()
        return [(await under_way)[0], (await host.generate([next_one]))[0]]

    assert same(asyncio.run(main()), alone[0])
    assert host.processor.runs == 1
    assert host.state.processor.runs == 1
    assert host.counts.runs == 2


def test_deep_copies_of_an_evaluation_run_one_by_one(start: Callable[..., Host]) -> None:
    host = start(n_samples_per_eval_prompt=2)
    source = importlib.import_module("relax.engine.rollout.data_source").RolloutDataSource(host.args)

    async def drawn(count: int) -> list[list[Any]]:
        return source.get_eval_samples(count)

    actor = SimpleNamespace(get_eval_samples=SimpleNamespace(remote=drawn))
    asyncio.run(host.module.eval_rollout(host.args, 0, actor))
    media = sum(group[0].multimodal_inputs is not None for group in source.get_eval_samples(2))
    assert host.processor.runs == host.counts.own["outside a group"] == 2 * media > 0


async def custom_generate(args: Namespace, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """A user's function: it runs the processor by itself, and extends the ids it is given."""
    rollout = importlib.import_module(MODULE)
    state = rollout.GenerateState(args)
    ids, sample.multimodal_train_inputs, _ = await rollout._run_image_processor(
        state, args, sample.prompt, sample.multimodal_inputs
    )
    sample.tokens = ids
    sample.tokens.extend([ord("1")])
    sample.status, sample.response_length = type(sample.status).COMPLETED, 1
    return sample


def test_a_custom_generate_function_runs_one_by_one(start: Callable[..., Host]) -> None:
    path = f"{__name__}.custom_generate"
    host = start(custom_generate_function_path=path)
    host.run(host.draw(1))
    assert host.processor.runs == MEMBERS
    host = start()
    group = host.draw(1)
    group[0][2].generate_function_path = path
    host.run(group)
    assert host.processor.runs == MEMBERS
    assert host.counts.own == {"custom generate function": MEMBERS}


@pytest.mark.parametrize("share_view", [False, True])
@pytest.mark.parametrize("size", [4, 1], ids=["many", "one"])
def test_what_is_written_to_one_member_is_seen_by_no_other(
    start: Callable[..., Host], share_view: bool, size: int
) -> None:
    """The sentinel of RFC §5.1: share, put, fetch, build micro-batches, overwrite the first member's pixels.

    On a CPU the micro-batch of one entry is that entry's own tensor (docs/audits/multimodal-readonly.md, risk 1): the
    sentinel shows in it, and in the rows that share its memory. Nowhere else.
    """
    host = start()
    group = host.run(host.draw(1))[0]
    utils = importlib.import_module("relax.utils.utils")
    data = importlib.import_module("relax.backends.megatron.data")
    train_data = utils.convert_samples_to_train_data(host.args, group)
    truth = group[0].multimodal_train_inputs["pixel_values"].clone()

    manager = Manager(Unit(), dedup_multimodal=True, dedup_share_view=share_view)
    put(manager, list(train_data[MM]))
    rows = get(manager, list(range(MEMBERS)))
    columns = {
        "tokens": [torch.tensor(sample.tokens) for sample in group],
        "loss_masks": [torch.tensor(sample.loss_mask) for sample in group],
        "total_lengths": [len(sample.tokens) for sample in group],
        "response_lengths": [sample.response_length for sample in group],
        MM: rows,
    }
    iterator = data.DataIterator(columns, micro_batch_size=size)
    batches = [data.get_batch(iterator, list(columns)) for _ in range(MEMBERS // size)]

    rows[0]["pixel_values"].fill_(-12345.0)
    hit = [bool((row["pixel_values"] == -12345.0).any()) for row in rows]
    assert hit == [True] + [share_view] * (MEMBERS - 1)
    seen = [bool((batch[MM]["pixel_values"] == -12345.0).any()) for batch in batches]
    assert seen == ([False] * len(batches) if size > 1 else hit)
    assert torch.equal(group[0].multimodal_train_inputs["pixel_values"], truth), "the rollout's own tensor was reached"
