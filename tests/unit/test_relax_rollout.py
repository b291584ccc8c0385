"""Seam R2 on a host of a few lines: taken, looked at, reloaded, given back (L3a)."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import inspect
import logging
import pickle
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from relax_tq_rdma import accounting, coverage
from relax_tq_rdma.accounting import notes
from relax_tq_rdma.seams import relax_rollout
from relax_tq_rdma.seams.base import require
from relax_tq_rdma.seams.relax_rollout import MODULE, RelaxRollout
from tests.host_module import forget, modules_in

HOST = """
import asyncio

RUNS = []


async def _run_image_processor(state, args, prompt, multimodal_inputs):
    RUNS.append(prompt)
    await asyncio.sleep(0)
    return [1, 2], {"pixel_values": object()}, 0.5


async def generate(args, sample, sampling_params, evaluation=False):
    ids, sample.multimodal_train_inputs, seconds = await _run_image_processor(
        STATE, args, sample.prompt, sample.multimodal_inputs
    )
    if not sample.tokens:
        sample.tokens = ids
    sample.metadata["_timing"] = {"image_processor": seconds}
    return sample


async def generate_and_rm_group(args, group, sampling_params, evaluation=False):
    return await asyncio.gather(*(asyncio.create_task(generate(args, one, sampling_params)) for one in group))


STATE = object()
"""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes modules of the host; the rollout is there."""
    with modules_in(tmp_path, monkeypatch) as write:
        write(MODULE, HOST)
        yield write


def args_of(**more: Any) -> argparse.Namespace:
    return argparse.Namespace(rollout_group_share_processor=True, custom_generate_function_path=None, **more)


def make_group(n: int = 8) -> list[SimpleNamespace]:
    media = {"images": ["a.png"]}
    return [
        SimpleNamespace(prompt="what?", multimodal_inputs=media, tokens=[], metadata={}, multimodal_train_inputs=None)
        for _ in range(n)
    ]


def generate(module: ModuleType, args: Any, group: list[Any]) -> list[Any]:
    call = module.generate_and_rm_group(args, group, sampling_params={}, evaluation=False)
    return list(asyncio.run(asyncio.wait_for(call, timeout=20)))


@pytest.fixture
def taken(host: Any) -> Any:
    seam = RelaxRollout()
    require([seam])
    module = importlib.import_module(MODULE)
    seam.apply()
    yield SimpleNamespace(seam=seam, module=module, write=host)
    seam.remove()


def test_a_group_costs_one_run_and_its_members_tell_its_time_once(taken: Any) -> None:
    group = generate(taken.module, args_of(), make_group())
    assert len(taken.module.RUNS) == 1
    assert sorted(one.metadata["_timing"]["image_processor"] for one in group) == [0.0] * 7 + [0.5]
    assert len({id(one.multimodal_train_inputs["pixel_values"]) for one in group}) == 1
    assert len({id(one.tokens) for one in group}) == 8
    assert (taken.seam.counts.runs, taken.seam.counts.served) == (1, 7)


def test_nothing_of_the_plugin_is_on_a_sample(taken: Any) -> None:
    fields = set(vars(make_group()[0]))
    for one in generate(taken.module, args_of(), make_group()):
        assert set(vars(one)) == fields
        one.multimodal_train_inputs = None
        assert b"relax_tq_rdma" not in pickle.dumps(one)


def test_without_the_flag_every_member_runs_on_its_own(taken: Any) -> None:
    generate(taken.module, argparse.Namespace(), make_group())
    generate(taken.module, argparse.Namespace(rollout_group_share_processor=False), make_group())
    assert len(taken.module.RUNS) == 16
    assert taken.seam.counts.groups == 0


def test_the_signatures_stay_the_host_s(taken: Any) -> None:
    assert str(inspect.signature(taken.module.generate_and_rm_group)) == (
        "(args, group, sampling_params, evaluation=False)"
    )
    assert str(inspect.signature(taken.module._run_image_processor)) == "(state, args, prompt, multimodal_inputs)"
    assert inspect.iscoroutinefunction(taken.module.generate_and_rm_group)


def test_applied_twice_is_applied_once(taken: Any) -> None:
    before = taken.module.generate_and_rm_group
    taken.seam.apply()
    assert taken.module.generate_and_rm_group is before
    generate(taken.module, args_of(), make_group())
    assert taken.seam.counts.groups == 1


def test_a_hot_reload_is_followed(taken: Any) -> None:
    taken.write(MODULE, HOST.replace("[1, 2]", "[3]"))
    importlib.reload(taken.module)
    taken.seam.apply()
    group = generate(taken.module, args_of(), make_group())
    assert taken.module.RUNS == ["what?"]
    assert group[0].tokens == [3]
    taken.seam.remove()
    assert taken.module.generate_and_rm_group.__module__ == MODULE
    assert not hasattr(taken.module.generate_and_rm_group, "__wrapped__")


def test_a_stranger_s_wrapper_stays_and_ours_is_not_put_twice(taken: Any) -> None:
    import functools

    ours = taken.module.generate_and_rm_group

    @functools.wraps(ours)
    async def stranger(*args: Any, **named: Any) -> Any:
        return await ours(*args, **named)

    taken.module.generate_and_rm_group = stranger
    taken.seam.apply()
    assert taken.module.generate_and_rm_group is stranger
    taken.seam.remove()
    assert taken.module.generate_and_rm_group is stranger


def test_removed_it_is_as_before(host: Any) -> None:
    module = importlib.import_module(MODULE)
    before = dict(vars(module))
    seam = RelaxRollout()
    seam.apply()
    assert module.generate_and_rm_group is not before["generate_and_rm_group"]
    seam.remove()
    assert dict(vars(module)) == before


def test_what_was_not_shared_is_said_once_and_counted(
    taken: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: Counter[str] = Counter()
    monkeypatch.setattr(notes, "_SAID", set())
    monkeypatch.setattr(coverage, "count", lambda what, times: counted.update({what: times}))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            generate(taken.module, args_of(), [*make_group(2), *make_group(2)])
            generate(taken.module, args_of(), make_group(1))
    assert [record.getMessage() for record in caplog.records] == [
        "the image processor runs once per sample, not per group: members hold different media objects"
    ]
    assert counted == {"image processor runs of one sample (members hold different media objects)": 8}


def test_nobody_is_told_that_an_evaluation_shares_nothing(taken: Any, caplog: pytest.LogCaptureFixture) -> None:
    group = [*make_group(1), *make_group(1)]
    for call in (
        lambda generate: generate(args_of(), group, {}, True),
        lambda generate: generate(args_of(), group, sampling_params={}, evaluation=True),
    ):
        asyncio.run(call(taken.module.generate_and_rm_group))
    assert caplog.records == []
    assert taken.seam.counts.own == {"outside a group": 4}


def test_each_run_is_a_stage_of_the_accounting(taken: Any) -> None:
    accounting.configure("summary", job="test-relax-rollout", sink=lambda line: None)
    try:
        generate(taken.module, args_of(), make_group())
        ledger = accounting.ledger()
        assert ledger is not None
        assert ledger.totals().histograms[("dataplane_stage_seconds", ("image_processor",))].count == 1
        name = "dataplane_image_processor_calls_total"
        assert {key: n for key, n in ledger.totals().counters.items() if key[0] == name} == {
            (name, ("run",)): 1,
            (name, ("served",)): 7,
        }
    finally:
        accounting.configure("off")


# The check


def test_an_absent_host_is_said_without_importing_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    forget()
    monkeypatch.setitem(sys.modules, "relax", None)
    report = RelaxRollout().check()
    assert not report.ok
    assert report.found == "not installed"


def test_the_check_reads_the_source_and_does_not_run_it(host: Any) -> None:
    host(MODULE, "raise SystemError('no GPU here')\n" + HOST)
    assert RelaxRollout().check().ok
    assert MODULE not in sys.modules


@pytest.mark.parametrize("imported", [False, True])
@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("def generate_and_rm_group(", "def generate_group(", f"no {MODULE}.generate_and_rm_group"),
        (
            "(state, args, prompt, multimodal_inputs)",
            "(state, args, sample)",
            f"{MODULE}._run_image_processor without parameter prompt, multimodal_inputs",
        ),
        (
            "async def _run_image_processor(state, args, prompt, multimodal_inputs):\n",
            "def _run_image_processor(state, args, prompt, multimodal_inputs): ...\nasync def _other():\n",
            f"{MODULE}._run_image_processor is not a coroutine function",
        ),
    ],
    ids=["renamed", "re-signed", "synchronous"],
)
def test_drift_is_named(host: Any, imported: bool, old: str, new: str, found: str) -> None:
    assert old in HOST
    host(MODULE, HOST.replace(old, new))
    if imported:
        importlib.import_module(MODULE)
    report = RelaxRollout().check()
    assert (report.ok, report.found) == (False, found)
    assert report.text == (
        "seam R2 (the host's rollout) does not fit Relax of unknown version: expected _run_image_processor(state, "
        "args, prompt, multimodal_inputs) and generate_and_rm_group(args, group, sampling_params, evaluation), "
        f"found {found}; drop --rollout-group-share-processor with this version of the host"
    )


def test_a_host_that_shares_by_itself_is_left_alone(host: Any) -> None:
    host("relax.utils.data.group_processor", "")
    seam = RelaxRollout()
    assert seam.check().ok
    assert seam.check().text == (
        "seam R2 (the host's rollout) stands aside: the host shares the processor's output within a group by itself "
        "(Relax of unknown version)"
    )
    module = importlib.import_module(MODULE)
    before = module.generate_and_rm_group
    seam.apply()
    assert module.generate_and_rm_group is before


def test_apply_before_the_host_is_imported_does_nothing(host: Any) -> None:
    RelaxRollout().apply()
    assert relax_rollout.MODULE not in sys.modules
