"""``bench soak``: its verdict, its order of things, its content; the run itself is in the integration tests."""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relax_tq_rdma.bench.soak import cli, sample, verdict
from relax_tq_rdma.bench.soak.content import KIB, MIB, Content, Mismatch, Payload, Shape, plan_step
from relax_tq_rdma.bench.soak.drive import Result, Totals
from relax_tq_rdma.bench.soak.ends import End, EndGone
from relax_tq_rdma.bench.soak.messages import Answer, Count, Counts, Failed
from relax_tq_rdma.bench.soak.options import parse
from relax_tq_rdma.bench.soak.page import page
from relax_tq_rdma.bench.soak.report import SCHEMA, document, environment, show
from relax_tq_rdma.bench.soak.sample import Sample, Store, Usage
from relax_tq_rdma.bench.soak.schedule import Disorder, Schedule
from relax_tq_rdma.errors import UsageError

SMALL = Shape(seed=7, max_row=64 * KIB, put_bytes=4 * MIB, oversized=20 * MIB)


# --- verdict ----------------------------------------------------------------------------------------------------------


def counts(**changed: Any) -> Counts:
    rungs = dict.fromkeys(verdict.RUNGS, (1, 1000))
    return msgspec.structs.replace(
        Counts(id=1, capacity=64 * MIB, held=40 * MIB, peak=48 * MIB, registrations=2, misses=1, rungs=rungs), **changed
    )


def moment(at: int, *, rss: int = 800, fds: int = 50, threads: int = 20, warm: bool = True, **changed: Any) -> Sample:
    """``rss`` (MiB), ``fds``, ``threads`` and what is changed are consumer0's."""
    usual = Usage(rss=500 * MIB, fds=30, threads=10, cpu_s=60.0 * at)
    own = Usage(rss=rss * MIB, fds=fds, threads=threads, cpu_s=60.0 * at)
    return Sample(
        at=60.0 * at,
        steps=at,
        warm=warm,
        processes={"producer": usual, "consumer0": own, "master": usual},
        ends={"producer": counts(held=0), "consumer0": counts(**changed)},
        store=Store(nbytes=10 * MIB, keys=100),
    )


def good(each: Callable[[int], Sample] = moment, **final: Any) -> Result:
    """A run of 30 samples in which all is as it should be, but for what is given."""
    last = moment(31, **{"held": 0, **final})
    return Result(
        totals=Totals(
            puts=5, gets=9, steps=3, rows_put=90, rows_read=90, bytes_put=77, bytes_checked=77, bytes_rechecked=70
        ),
        samples=[moment(0, warm=False, registrations=0, misses=0), *(each(at) for at in range(1, 31))],
        final=msgspec.structs.replace(last, store=Store(nbytes=64, keys=1)),
        seconds=31.0,
    )


def failed(result: Result) -> list[str]:
    return [check.name for check in verdict.verdict(result, pool_mib=64) if check.ok is not True]


def test_a_good_run_holds() -> None:
    checks = verdict.verdict(good(), pool_mib=64)
    assert [check.name for check in checks if not check.ok] == []
    assert verdict.holds(checks)
    assert len(checks) == 13


def test_an_error_fails_it() -> None:
    result = good()
    result.faults.append("consumer0: get: a row changed while it was held")
    assert failed(result) == ["errors"]
    assert "changed while it was held" in verdict.verdict(result, 64)[0].found


@pytest.mark.parametrize(
    ("what", "grow"),
    [
        ("rss", lambda at: moment(at, rss=800 + 10 * at)),
        ("rss", lambda at: moment(at, rss=800 if at <= 20 else 1000)),
        ("fds", lambda at: moment(at, fds=50 + at)),
        ("threads", lambda at: moment(at, threads=20 + at)),
    ],
)
def test_growth_fails_it(what: str, grow: Callable[[int], Sample]) -> None:
    assert failed(good(grow)) == [f"no growth of {what}"]


@pytest.mark.parametrize(
    "steady",
    [
        lambda at: moment(at, rss=800 + 200 * (at < 10)),
        lambda at: moment(at, rss=min(1200, 600 + 60 * at), threads=20 + 3 * (at % 2)),
        lambda at: moment(at, rss=3000 if at in (13, 25, 26) else 800),
        lambda at: moment(at, fds=50 + (at > 20)),
        lambda at: moment(at, rss=800 + 30 * at, kept_bytes=(40 + 30 * at) * MIB),
        lambda at: moment(at, rss=800 + 30 * at, spare=30 * at * MIB),
    ],
    ids=["shrinks", "warm-up only", "peaks", "one descriptor more", "holds more on purpose", "spare memory"],
)
def test_what_is_no_growth(steady: Callable[[int], Sample]) -> None:
    assert failed(good(steady)) == []


def test_more_growth_is_allowed_while_caches_fill() -> None:
    def quick(at: int) -> Sample:
        return msgspec.structs.replace(moment(at, rss=800 if at <= 20 else 900), at=float(at))

    assert failed(good(quick)) == []
    assert failed(good(lambda at: moment(at, rss=800 if at <= 20 else 900))) == ["no growth of rss"]


def test_memory_lent_by_the_pool_explains_no_growth() -> None:
    """It is resident from the beginning."""
    lent = good(lambda at: moment(at, rss=800 + 10 * at, kept_bytes=10 * at * MIB, held=10 * at * MIB))
    assert "no growth of rss" in failed(lent)


def test_a_lease_that_does_not_come_back_fails_it() -> None:
    assert failed(good(held=64)) == ["every lease back"]
    assert failed(good(kept=1)) == ["every lease back"]


def test_one_registration_or_miss_after_the_first_step_fails_it() -> None:
    assert failed(good(registrations=3)) == ["registrations after the first step"]
    assert failed(good(misses=2)) == ["pool misses after the first step"]
    assert failed(good(lambda at: moment(at, registrations=at, misses=at), registrations=31, misses=31)) == [
        "registrations after the first step",
        "pool misses after the first step",
    ]


def test_what_was_registered_in_the_first_step_is_warm_up() -> None:
    result = good()
    result.samples[0] = moment(0, warm=False, registrations=0)
    assert failed(result) == []
    cold = good(lambda at: moment(at, warm=False))
    assert {"registrations after the first step", "no growth of rss"} <= set(failed(cold))


def test_retired_memory_fails_it() -> None:
    assert failed(good(retired=MIB)) == ["memory retired"]


@pytest.mark.parametrize("rung", verdict.RUNGS)
def test_a_rung_that_was_not_used_fails_it(rung: str) -> None:
    result = good()
    assert result.final is not None
    for end in result.final.ends.values():
        del end.rungs[rung]
    assert failed(result) == ["all rungs used"]


def test_a_pool_that_was_never_full_fails_it() -> None:
    assert failed(good(lambda at: moment(at, peak=43 * MIB))) == ["pool at its cap"]


def test_rows_or_bytes_that_are_missing_fail_it() -> None:
    result = good()
    result.totals.rows_read = 89
    assert failed(result) == ["every row read once"]
    result.totals = Totals(rows_put=1, rows_read=1, bytes_put=5, bytes_checked=4, bytes_rechecked=4)
    assert failed(result) == ["every byte compared"]
    result.totals = Totals()
    assert failed(result) == ["every row read once", "every byte compared"]


@pytest.mark.parametrize("left", [Store(nbytes=64, keys=2), Store(nbytes=1 << 20, keys=1)])
def test_a_store_that_is_not_empty_fails_it(left: Store) -> None:
    result = good()
    assert result.final is not None
    result.final = msgspec.structs.replace(result.final, store=left)
    assert failed(result) == ["store empty after the last clear"]


def test_what_was_not_measured_does_not_hold() -> None:
    result = good()
    result.final = None
    checks = {check.name: check for check in verdict.verdict(result, 64)}
    for name in ("every row read once", "every byte compared", "every lease back", "store empty after the last clear"):
        assert checks[name].ok is None
        assert "did not come to its end" in checks[name].found
    assert not verdict.holds(checks.values())
    assert not verdict.holds(verdict.verdict(Result(), 64))
    few = good()
    del few.samples[verdict.FEWEST :]
    assert failed(few) == [f"no growth of {what}" for what in ("rss", "fds", "threads")]


# --- report -----------------------------------------------------------------------------------------------------------


def test_the_document_has_all_that_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    options = parse(["--seconds", "60", "--pool-mib", "64", "--max-row-kib", "4096"])
    whole = json.loads(json.dumps(document(options, good(), {"cpus": 2})))
    assert whole["schema"] == SCHEMA
    assert whole["verdict"]["ok"] is True
    assert whole["options"]["pool_mib"] == 64
    assert whole["cores_used"] == 3.0
    assert len(whole["samples"]) == 31
    assert [one["ok"] for one in whole["growth"]] == [True] * 9
    assert show(options, good()) is True
    shown = capsys.readouterr().out
    assert "verdict: ok" in shown
    assert "no growth of threads" in shown


def test_the_page_of_a_run() -> None:
    options = parse(["--seconds", "60", "--pool-mib", "64", "--max-row-kib", "4096"])
    text = page(json.loads(json.dumps(document(options, good(held=64), environment()))))
    assert "## Verdict: **failed**" in text
    assert "| every lease back | **failed** | producer 0 bytes lent, consumer0 64 bytes lent |" in text
    assert "| consumer0 | resident MiB | 800 | 800 | 64 | ok |" in text
    assert "| consumer0 | threads | 20 | 20 | 4 | ok |" in text
    assert "77 bytes compared on arrival" in text
    assert "put/copy 1 (0.00 GB)" in text
    widths = {
        line.count("|") for line in text.split("## Over time")[1].split("## Growth")[0].splitlines() if "|" in line
    }
    assert len(widths) == 1


def test_an_interrupted_run_shows_what_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    options = parse([])
    result = Result(interrupted=True)
    assert document(options, result, {})["verdict"]["ok"] is False
    assert show(options, result) is False
    assert "not measured" in capsys.readouterr().out


# --- schedule ---------------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**32), ahead=st.integers(1, 4))
def test_every_row_is_read_once_and_every_step_cleared(seed: int, ahead: int) -> None:
    dice = random.Random(seed)
    sizes = [[dice.randint(1, 5) for _ in range(dice.randint(1, 3))] for _ in range(6)]
    schedule = Schedule(lambda step: sizes[step], ahead)
    stored: dict[int, list[tuple[int, int]]] = {}
    puts: list[tuple[int, int]] = []
    gets: list[tuple[int, int]] = []
    begun: list[int] = []
    cleared: list[int] = []
    for turn in range(2000):
        if schedule.is_done:
            break
        if turn > 40 or len({step for step, _ in puts} | set(stored)) >= 5:
            schedule.stop()
        action = dice.randint(0, 4)
        if action == 0 and (put := schedule.put()):
            puts.append(put)
            begun = sorted({*begun, put[0]})
            assert len(begun) - len(cleared) <= ahead
        elif action == 1 and puts:
            step, part = puts.pop(dice.randrange(len(puts)))
            schedule.stored(step, part)
            stored.setdefault(step, []).extend((part, row) for row in range(sizes[step][part]))
        elif action == 2 and (get := schedule.get(dice.randint(1, 9))):
            assert get[1] <= len(stored[get[0]])
            gets.append(get)
        elif action == 3 and gets:
            step, rows = gets.pop(dice.randrange(len(gets)))
            schedule.arrived(step, [stored[step].pop(0) for _ in range(rows)])
        elif action == 4 and (step_ := schedule.clear()) is not None:
            assert not stored[step_]
            assert step_ not in cleared
            cleared.append(step_)
            schedule.cleared(step_)
    assert schedule.is_done
    assert sorted(cleared) == begun
    assert schedule.cleared_steps == len(begun)


def test_a_row_that_comes_twice_or_was_never_put_is_disorder() -> None:
    schedule = Schedule(lambda step: [2])
    assert schedule.put() == (0, 0)
    assert schedule.get(64) is None
    schedule.stored(0, 0)
    assert schedule.get(64) == (0, 2)
    assert schedule.get(64) is None
    schedule.arrived(0, [(0, 1)])
    for row in ((0, 1), (0, 2), (1, 0)):
        with pytest.raises(Disorder, match=f"row {row[1]} of put {row[0]} of step 0"):
            schedule.arrived(0, [row])
    assert schedule.clear() is None
    schedule.arrived(0, [(0, 0)])
    assert not schedule.first_is_gone
    assert schedule.clear() == 0
    assert schedule.clear() is None
    schedule.cleared(0)
    assert schedule.first_is_gone


# --- content ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def content() -> Content:
    return Content(SMALL)


def payloads(steps: int = 40) -> list[Payload]:
    return [row.payload for step in range(steps) for rows in plan_step(SMALL, step) for row in rows]


def test_both_ends_make_the_same_plan() -> None:
    assert plan_step(SMALL, 3) == plan_step(SMALL, 3)
    assert plan_step(SMALL, 3) != plan_step(SMALL, 4)
    assert plan_step(SMALL, 3) != plan_step(msgspec.structs.replace(SMALL, seed=8), 3)


def test_the_rows_are_as_mixed_as_they_should_be() -> None:
    every = payloads()
    assert {payload.kind for payload in every} == {"tensors", "text", "raw", "none"}
    leaves = [leaf for payload in every for leaf in payload.leaves]
    assert {leaf.kind for leaf in leaves} == {"tensor", "array", "list"}
    assert {leaf.dtype for leaf in leaves} == {"float32", "bfloat16", "float16", "float64", "uint8", "int64", "int32"}
    assert {len(payload.leaves) for payload in every if payload.kind == "tensors"} >= {1, 2, 3, 4}
    puts = [rows for step in range(40) for rows in plan_step(SMALL, step)]
    sizes = [len(rows) for rows in puts]
    assert min(sizes) <= 3
    assert max(sizes) > 60
    copies = [sum(row.payload is other.payload for other in rows) for rows in puts for row in rows]
    assert max(copies) == 8
    assert len({row.start for rows in puts for row in rows}) > 0.99 * sum(sizes), "each row has tokens of its own"


def test_one_row_of_the_first_step_is_oversized(content: Content) -> None:
    [row] = plan_step(SMALL, 0)[-1]
    [value] = content.values([row.payload])
    assert sum(tensor.nbytes for tensor in value.values()) >= SMALL.oversized
    assert content.check(row.payload, value) >= SMALL.oversized
    without = plan_step(msgspec.structs.replace(SMALL, oversized=0), 0)
    assert without == plan_step(SMALL, 0)[:-1]


def test_a_put_keeps_to_its_bytes() -> None:
    tight = Shape(seed=1, max_row=4 * MIB, put_bytes=MIB)
    for step in range(30):
        for rows in plan_step(tight, step):
            unique = {id(row.payload): row.payload for row in rows}.values()
            leaves = [leaf for payload in unique for leaf in payload.leaves]
            nbytes = sum(math.prod(leaf.shape) * getattr(torch, leaf.dtype).itemsize for leaf in leaves)
            assert nbytes <= MIB + 64 * 4 * KIB


def test_what_is_made_passes_its_own_check(content: Content) -> None:
    some = payloads(12)
    values = content.values(some)
    total = sum(content.check(payload, value) for payload, value in zip(some, values, strict=True))
    assert total > MIB
    tensors = [payload for payload in some if payload.kind == "tensors"]
    shared = next(payload for payload in tensors if payload.shared)
    one, two = content.values([shared, shared])
    assert one is not two
    assert all(one[leaf.key] is two[leaf.key] for leaf in shared.leaves)
    own = next(payload for payload in tensors if not payload.shared and payload.leaves[0].kind == "tensor")
    one, two = content.values([own, own])
    assert one[own.leaves[0].key].data_ptr() != two[own.leaves[0].key].data_ptr()


@pytest.mark.parametrize("kind", ["tensor", "array", "list"])
def test_any_changed_byte_is_found(content: Content, kind: str) -> None:
    payload = next(one for one in payloads() if one.leaves and one.leaves[-1].kind == kind)
    [value] = content.values([payload])
    last = value[payload.leaves[-1].key]
    tensor = last[-1] if kind == "list" else torch.from_numpy(last) if kind == "array" else last
    flat = tensor.view(-1).view(torch.uint8)
    for at in {0, len(flat) // 2, len(flat) - 1}:
        flat[at] ^= 1
        with pytest.raises(Mismatch, match=f"1 of {len(flat)} bytes differ, first byte {at}"):
            content.check(payload, value)
        flat[at] ^= 1
    assert content.check(payload, value) > 0


def test_another_shape_dtype_key_or_type_is_found(content: Content) -> None:
    tensors = [one for one in payloads() if one.kind == "tensors" and one.leaves[0].kind == "tensor"]
    payload = next(one for one in tensors if one.leaves[0].dtype == "float32")
    [value] = content.values([payload])
    key, *others = value
    tensor = value[key]
    changed: list[Any] = [
        None,
        list(value),
        {**{other: value[other] for other in others}, "new": tensor},
        {**value, "more": 1},
        {**value, key: tensor.view(torch.uint8)},
        {**value, key: tensor.reshape(1, *tensor.shape)},
        {**value, key: torch.nn.Parameter(tensor, requires_grad=False)},
        {**value, key: tensor.tolist()},
    ]
    for other in changed:
        with pytest.raises(Mismatch):
            content.check(payload, other)


def test_none_text_and_raw_rows_are_compared_too(content: Content) -> None:
    with pytest.raises(Mismatch, match="a dict instead of None"):
        content.check(Payload(kind="none"), {})
    text = Payload(kind="text", text="seven")
    [value] = content.values([text])
    assert content.check(text, value) == 5
    with pytest.raises(Mismatch, match="instead of 'seven'"):
        content.check(text, {**value, "text": "eight"})
    raw = next(one for one in payloads() if one.kind == "raw")
    [value] = content.values([raw])
    with pytest.raises(Mismatch, match="under 'odd'"):
        content.check(raw, {**value, "odd": complex(-1, 1)})


def test_tokens_are_compared(content: Content) -> None:
    row = plan_step(SMALL, 1)[0][0]
    tokens = content.tokens(row)
    assert content.check_tokens(row, tokens) == row.tokens * 8
    tokens[-1] += 1
    with pytest.raises(Mismatch, match="tokens"):
        content.check_tokens(row, tokens)
    with pytest.raises(Mismatch, match="tokens"):
        content.check_tokens(row, tokens[:-1])


def test_the_noise_does_not_repeat_itself(content: Content) -> None:
    words = content._noise.numpy().view(np.uint64)[: 1 << 20]
    assert len(np.unique(words)) == len(words)


# --- options, samples, processes --------------------------------------------------------------------------------------


def test_defaults() -> None:
    options = parse([])
    assert (options.seconds, options.consumers, options.pool_mib, options.segment_mib) == (1800, 2, 512, 1024)
    assert options.interval == 5
    assert options.shape == Shape(seed=1, max_row=16 * MIB, put_bytes=128 * MIB, oversized=385 * MIB)
    assert parse(["--minutes", "2"]).seconds == 120
    assert parse(["--seconds", "30"]).interval == 0.5


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--minutes", "0"], "--minutes.*from 1 to 1440"),
        (["--seconds", "1", "--minutes", "1"], "seconds"),
        (["--pool-mib", "64"], "--max-row-kib 16384 is more than a sixteenth of --pool-mib 64"),
        (["--consumers", "3"], "--consumers"),
        (["-o", "/no/such/folder/out.json"], "there is no folder /no/such/folder"),
        (["-o", "/"], "-o /: a folder, not a file"),
        (["--case", "x"], "unknown flag --case .see relax-tq-rdma bench soak --help"),
    ],
)
def test_wrong_usage_is_named(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse(argv)


def test_the_memory_that_is_needed_covers_what_was_seen() -> None:
    """With these options 6.5 GiB were resident at most (measured)."""
    assert cli.need_mib(parse([])) > 7 * 1024


def test_counters_of_a_page() -> None:
    page = '# HELP a b\na 12\nb{c="d"} 3\nmaster_key_count 7.0\n\nodd line here\n'
    assert sample.counters(page) == {"a": 12.0, "master_key_count": 7.0}


def test_usage_of_this_process() -> None:
    found = sample.usage(os.getpid())
    assert found.rss > 10 * MIB
    assert found.fds > 2
    assert found.threads >= 1
    assert found.cpu_s > 0


def hear(end: End, seconds: float = 30) -> list[Answer]:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if answers := end.hear():
            return answers
    raise AssertionError("no answer")


def test_an_end_answers_by_number_and_its_end_is_noticed(tmp_path: Path) -> None:
    end = End("consumer0", "consumer0", tmp_path / "log", {})
    try:
        end.tell(Count(id=41))  # before it has joined anything
        [answer] = hear(end)
        assert isinstance(answer, Failed)
        assert answer.id == 41
        end.dismiss()
        with pytest.raises(EndGone, match="consumer0 ended with exit status 0; its last words: AssertionError"):
            hear(end)
        (tmp_path / "log").unlink()
        assert end.last_words().startswith("its log is gone")
    finally:
        end.close()
