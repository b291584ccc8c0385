"""Seam R3 on a host of a few lines: who fetches, on which path, with which client (L4)."""

from __future__ import annotations

import importlib
import inspect
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relax_tq_rdma import accounting
from relax_tq_rdma.fanout.client import FetchClient
from relax_tq_rdma.seams import relax_consumer
from relax_tq_rdma.seams.base import require
from relax_tq_rdma.seams.relax_consumer import BY_NAME, MODULE, RelaxConsumer
from tests.host_module import forget, modules_in

MM = "multimodal_train_inputs"
BATCH_FIELDS = ["tokens", MM]

HOST = """
from functools import partial

CALLS = []


def get_data_from_transfer_queue(
    args, tq_client, data_fields, batch_size, partition_id, task_name, sampling_config, batch_index,
    broadcast_pp=True, per_rank_fetch=False, token_budget=None, allow_underfill=True,
    post_process=True, synchronize_per_rank_fetch=True, prefetched_rollout_data=None,
):
    CALLS.append({"client": tq_client, "per_rank": per_rank_fetch, "broadcast_pp": broadcast_pp})
    meta = tq_client.get_meta(data_fields=data_fields, partition_id=partition_id)
    return (tq_client.get_data(meta), meta) if meta.size else (None, meta)


def stream(args, tq_client, data_fields):
    return partial(get_data_from_transfer_queue, args=args, broadcast_pp=not args.fully_async)(
        tq_client=tq_client, data_fields=data_fields, batch_size=2, partition_id="train_1", task_name="actor_train",
        sampling_config={}, batch_index=0,
    )
"""

IMPORTER = """
from relax.utils.data.stream_dataloader import get_data_from_transfer_queue


def batch(args, client, data_fields, per_rank_fetch=False, **more):
    return get_data_from_transfer_queue(
        args, client, data_fields, 2, "train_1", "actor_train", {}, 0,
        broadcast_pp=False, per_rank_fetch=per_rank_fetch, **more,
    )
"""


class Client:
    def __init__(self, size: int = 2) -> None:
        self.meta = SimpleNamespace(size=size, extra_info={}, global_indexes=list(range(size)))

    def get_meta(self, **asked: Any) -> Any:
        return self.meta

    def get_data(self, meta: Any) -> dict[str, int]:
        return {"rows": meta.size}


class Alone:
    """The only rank of its cohort."""

    def minimum(self, values: Any) -> list[int]:
        return [int(value) for value in values]

    def gather(self, text: str) -> list[str]:
        return [text]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    with modules_in(tmp_path, monkeypatch) as write:
        write(MODULE, HOST)
        write(BY_NAME, IMPORTER)
        yield write


@pytest.fixture
def taken(host: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The seam as it is taken in a rank: right after the module, before those that import from it by name."""
    cohorts: list[bool] = []

    def lockstep(with_pipeline: bool) -> Any:
        cohorts.append(with_pipeline)
        return relax_consumer.Lockstep(Alone(), 1.0)

    monkeypatch.setattr(relax_consumer, "_lockstep", lockstep)
    seam = RelaxConsumer()
    require([seam])
    module = importlib.import_module(MODULE)
    seam.apply()
    actor = importlib.import_module(BY_NAME)
    seam.apply()
    yield SimpleNamespace(seam=seam, module=module, actor=actor, cohorts=cohorts)
    seam.remove()


def args_of(fetch: str = "on", **more: Any) -> Namespace:
    return Namespace(tq_per_rank_fetch=fetch, fully_async=True, **more)


def test_on_reaches_the_batch_path_and_the_stream(taken: Any) -> None:
    client = Client()
    assert taken.actor.batch(args_of(), client, BATCH_FIELDS) == ({"rows": 2}, client.meta)
    assert taken.module.stream(args_of(), client, BATCH_FIELDS)[0] == {"rows": 2}
    assert [call["per_rank"] for call in taken.module.CALLS] == [True, True]
    assert all(isinstance(call["client"], FetchClient) for call in taken.module.CALLS)


def test_the_cohort_is_the_ranks_that_the_host_keeps_together(taken: Any) -> None:
    args = args_of()
    taken.module.stream(args, Client(), BATCH_FIELDS)
    args.fully_async = False
    taken.module.stream(args, Client(), BATCH_FIELDS)
    assert taken.cohorts == [False, True]


def test_off_wins_over_the_host_s_switch(taken: Any) -> None:
    taken.actor.batch(args_of("off", dataplane_accounting="summary"), Client(), BATCH_FIELDS, per_rank_fetch=True)
    assert not taken.module.CALLS[0]["per_rank"]
    assert taken.cohorts == []


def test_routed_experts_are_never_fetched_per_rank(taken: Any) -> None:
    taken.actor.batch(args_of(), Client(), [*BATCH_FIELDS, "rollout_routed_experts"])
    assert not taken.module.CALLS[0]["per_rank"]


def test_auto_on_simple_storage_is_what_the_host_asked_for_on_each_path(taken: Any) -> None:
    args = args_of("auto", dataplane_accounting="summary", per_rank_fetch=True)
    taken.actor.batch(args, Client(), BATCH_FIELDS, per_rank_fetch=True)
    taken.module.stream(args, Client(), BATCH_FIELDS)
    assert [call["per_rank"] for call in taken.module.CALLS] == [True, False]


def test_a_job_without_the_plugin_calls_straight_through(taken: Any) -> None:
    client = Client()
    for switch in (False, True):
        taken.actor.batch(Namespace(), client, BATCH_FIELDS, per_rank_fetch=switch)
    assert [(call["client"], call["per_rank"]) for call in taken.module.CALLS] == [(client, False), (client, True)]


@pytest.mark.parametrize("how", [{"synchronize_per_rank_fetch": False}, {"prefetched_rollout_data": [None, None]}])
def test_what_the_host_fetches_ahead_in_a_thread_is_left_to_it(taken: Any, how: dict[str, Any]) -> None:
    client = Client()
    taken.actor.batch(args_of("off", dataplane_accounting="summary"), client, BATCH_FIELDS, per_rank_fetch=True, **how)
    assert taken.module.CALLS[0]["client"] is client
    assert taken.module.CALLS[0]["per_rank"]


def test_both_modes_are_timed_when_there_are_rows_and_only_then(taken: Any) -> None:
    accounting.configure("summary", job="test-relax-consumer", sink=lambda line: None)
    try:
        for fetch, fields in (("on", BATCH_FIELDS), ("off", ["tokens"]), ("on", BATCH_FIELDS)):
            taken.actor.batch(args_of(fetch, dataplane_accounting="summary"), Client(), fields)
        taken.actor.batch(args_of(), Client(0), BATCH_FIELDS)
        client = Client()
        client.get_data = lambda meta: 1 / 0  # type: ignore[method-assign]
        with pytest.raises(ZeroDivisionError):
            taken.actor.batch(args_of(), client, BATCH_FIELDS)
        ledger = accounting.ledger()
        assert ledger is not None
        timed = {labels: h.count for (name, labels), h in ledger.totals().histograms.items() if "fanout" in name}
        assert timed == {("per_rank",): 2, ("rank0",): 1}
    finally:
        accounting.configure("off")


def test_a_changed_job_is_seen(taken: Any) -> None:
    """The settings are read once per args and config, not once per process."""
    args = args_of("on")
    taken.actor.batch(args, Client(), BATCH_FIELDS)
    taken.actor.batch(args_of("off", dataplane_accounting="summary"), Client(), BATCH_FIELDS)
    args.tq_config = {"backend": {"SimpleStorage": {}}}
    args.tq_per_rank_fetch = "auto"
    taken.actor.batch(args, Client(), BATCH_FIELDS)
    assert [call["per_rank"] for call in taken.module.CALLS] == [True, False, False]


def test_the_signature_stays_the_host_s(taken: Any) -> None:
    now = taken.module.get_data_from_transfer_queue
    assert str(inspect.signature(now)) == str(inspect.signature(now.__wrapped__))
    assert taken.actor.get_data_from_transfer_queue is now


def test_an_importer_that_came_first_is_followed_and_given_back(host: Any) -> None:
    actor = importlib.import_module(BY_NAME)
    module = sys.modules[MODULE]
    before = module.get_data_from_transfer_queue
    seam = RelaxConsumer()
    seam.apply()
    assert actor.get_data_from_transfer_queue is module.get_data_from_transfer_queue is not before
    seam.remove()
    assert actor.get_data_from_transfer_queue is module.get_data_from_transfer_queue is before


def test_somebody_else_s_function_in_the_importer_is_left_alone(host: Any) -> None:
    host(BY_NAME, IMPORTER + "\n\ndef get_data_from_transfer_queue(*args, **named):\n    return None, None\n")
    actor = importlib.import_module(BY_NAME)
    theirs = actor.get_data_from_transfer_queue
    seam = RelaxConsumer()
    seam.apply()
    assert actor.get_data_from_transfer_queue is theirs
    seam.remove()
    assert actor.get_data_from_transfer_queue is theirs


def test_a_host_with_its_own_data_plane_fetches_by_itself(host: Any) -> None:
    host("relax.utils.tq_config", "")
    importlib.import_module(BY_NAME)
    before = sys.modules[MODULE].get_data_from_transfer_queue
    RelaxConsumer().apply()
    assert sys.modules[MODULE].get_data_from_transfer_queue is before
    report = RelaxConsumer().check()
    assert (report.ok, report.aside) == (True, "the host brings an RDMA data plane of its own (relax.utils.tq_config)")


# The check


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("def get_data_from_transfer_queue(", "def fetch(", f"no {MODULE}.get_data_from_transfer_queue"),
        (
            "per_rank_fetch=False, token",
            "fetch_mode='rank0', token",
            f"{MODULE}.get_data_from_transfer_queue without parameter per_rank_fetch",
        ),
        (
            "def get_data_from_transfer_queue(",
            "async def get_data_from_transfer_queue(",
            f"{MODULE}.get_data_from_transfer_queue is a coroutine function",
        ),
    ],
    ids=["renamed", "re-signed", "asynchronous"],
)
def test_drift_is_named(host: Any, old: str, new: str, found: str) -> None:
    assert old in HOST
    host(MODULE, HOST.replace(old, new))
    report = RelaxConsumer().check()
    assert MODULE not in sys.modules
    assert (report.ok, report.found) == (False, found)
    assert report.text == (
        "seam R3 (the host's fetch) does not fit Relax of unknown version: expected get_data_from_transfer_queue with "
        "parameters args, tq_client, data_fields, partition_id, broadcast_pp, per_rank_fetch, and "
        "get_tensor_and_context_parallel_group and get_pipeline_model_parallel_group of megatron.core.parallel_state, "
        f"found {found}; run this version of the host without flags of relax-tq-rdma"
    )


MEGATRON = "megatron.core.parallel_state"
GROUPS = "def get_tensor_and_context_parallel_group(): pass\ndef get_pipeline_model_parallel_group(): pass\n"


@pytest.mark.parametrize("loaded", [False, True])
def test_the_groups_of_a_cohort_are_looked_for_in_megatron(host: Any, loaded: bool) -> None:
    """Which is read and not run, unless it is loaded already."""
    host(MEGATRON, GROUPS)
    assert RelaxConsumer().check().ok
    host(MEGATRON, GROUPS.replace("get_pipeline_model_parallel_group", "get_pipeline_group"))
    host("megatron.core.__init__", "" if loaded else "raise ImportError('no GPU')")
    if loaded:
        importlib.import_module(MEGATRON)
    report = RelaxConsumer().check()
    assert (MEGATRON in sys.modules) == loaded
    assert (report.ok, report.found) == (False, f"no {MEGATRON}.get_pipeline_model_parallel_group")


def test_a_node_without_megatron_is_asked_no_more(host: Any) -> None:
    assert RelaxConsumer().check().ok
    host("megatron.energon", "")  # a neighbour in the same namespace
    assert RelaxConsumer().check().ok


def test_an_absent_host_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    forget()
    monkeypatch.setitem(sys.modules, "relax", None)
    assert (RelaxConsumer().check().ok, RelaxConsumer().check().found) == (False, "not installed")
