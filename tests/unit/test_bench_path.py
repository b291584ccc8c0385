"""``bench path``: what is computed, what is compared, what is refused; the run itself is in the integration tests."""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from relax_tq_rdma.bench.path import payload, proof, report
from relax_tq_rdma.bench.path.cases import CASES, Case, chosen
from relax_tq_rdma.bench.path.child import Child, ChildError, Refused
from relax_tq_rdma.bench.path.copies import watching
from relax_tq_rdma.bench.path.counters import ENGINE, counted, reading
from relax_tq_rdma.bench.path.environment import check_memory, describe, estimate, warnings
from relax_tq_rdma.bench.path.figures import (
    CaseFigures,
    Side,
    Spread,
    TierLimits,
    document,
    headline_tier,
    limits,
    ratios,
    side,
)
from relax_tq_rdma.bench.path.limits import LIMITS, measure_limits
from relax_tq_rdma.bench.path.measure import Result, Tier
from relax_tq_rdma.bench.path.messages import Clear, Counters, Get, Limits, Measured, Moved, Put, Ready, Watched
from relax_tq_rdma.bench.path.options import TIERS, parse
from relax_tq_rdma.bench.path.payload import GRID, MIB, PIXELS, Shape
from relax_tq_rdma.bench.path.stage import Stage
from relax_tq_rdma.errors import StartError, UsageError

SHAPE = Shape(tier=1, rows=16, copies=4)


def by_name(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


# --- options ----------------------------------------------------------------------------------------------------------


def test_defaults() -> None:
    options = parse([])
    assert tuple(options.tiers) == TIERS
    assert (options.rows, options.copies, options.repeats, options.keep, options.memcpy) == (64, 1, 7, 1, False)
    assert [case.name for case in options.cases] == [case.name for case in CASES if not case.needs_copies]
    assert len(parse(["--dup", "8"]).cases) == len(CASES)


def test_tiers_may_be_given_again() -> None:
    assert parse(["--tier", "4", "--tier", "1", "--tier", "4"]).tiers == [1, 4]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--tier", "0"], "--tier: expected a whole number from 1 to 4096, got '0'"),
        (["--repeats", "many"], "--repeats: expected a whole number"),
        (["--case", "fastest"], "--case: invalid choice: 'fastest'"),
        (["--rows", "10", "--dup", "4"], "--rows 10 cannot be cut into groups of --dup 4"),
        (["--case", "engine", "--backend", "simple"], "no case is left to measure"),
        (["--case", "simple_l2_l3b"], "or --dup 8"),
        (["--dup-shared"], "--dup-shared needs copies: add --dup 8"),
        (["-o", "/nowhere/at/all.json"], "there is no folder /nowhere/at"),
        (["-o", "/"], "-o /: a folder, not a file"),
        (["--tire", "1"], "unknown flag --tire: did you mean --tier?"),
        (["--memcpy", "2"], "--memcpy"),
    ],
)
def test_a_wrong_option_is_named(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse(argv)
    assert message in str(raised.value)


def test_cases_by_backend_and_name() -> None:
    assert {case.backend for case in chosen([], ["simple"], 8)} == {"simple"}
    assert [case.name for case in chosen(["simple_dict", "engine"], [], 1)] == ["engine", "simple_dict"]


def test_too_much_memory_is_refused_in_words() -> None:
    with pytest.raises(StartError, match=r"may need \d+.* GiB of memory and .*smaller --tier than 4096"):
        check_memory(parse(["--tier", "4096", "--retain", "64"]))


def test_how_long_it_takes_is_announced_with_the_start() -> None:
    assert re.fullmatch(
        r"7 cases, 9 rounds of each on 1, .* MiB: about \d+ s to start, then about .*min.* on an idle machine",
        estimate(parse([])),
    )
    short = estimate(parse(["--tier", "1", "--case", "engine", "--repeats", "1", "--retain", "0"]))
    assert re.fullmatch(
        r"1 case, 2 rounds of each on 1 MiB: about \d+ s to start, then about 0 s on an idle machine", short
    )


@pytest.mark.parametrize(("repeats", "told"), [(1, ["1 repeat: "]), (2, ["2 repeats: "]), (3, []), (7, [])])
def test_medians_of_one_or_two_are_called_what_they_are(repeats: int, told: list[str]) -> None:
    options = parse(["--repeats", str(repeats)])
    assert [text.partition("a median")[0] for text in warnings(options)] == told
    shown = report._header({**describe(options), "controller": "c"})
    assert ("WARNING" in shown) == bool(told)
    assert "retains 1 batch, " in shown


# --- payload ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", [1, 4, 64])
@pytest.mark.parametrize(("rows", "copies"), [(64, 1), (64, 8), (1, 1), (1024, 1)])
def test_a_batch_is_as_large_as_its_tier(tier: int, rows: int, copies: int) -> None:
    shape = Shape(tier=tier, rows=rows, copies=copies)
    assert shape.nbytes == pytest.approx(tier * MIB, rel=0.05)
    assert len(shape.row_bytes) == rows


def test_rows_are_what_the_shape_says_and_a_group_is_equal_but_not_the_same() -> None:
    rows = payload.make_rows(SHAPE)
    assert [sum(value.nbytes for value in row.values()) for row in rows] == SHAPE.row_bytes
    assert torch.equal(rows[0][PIXELS], rows[3][PIXELS])
    assert not torch.equal(rows[3][PIXELS], rows[4][PIXELS])
    assert len({row[PIXELS].data_ptr() for row in rows}) == SHAPE.rows


def test_every_page_of_every_put_is_different() -> None:
    rows = payload.make_rows(SHAPE)
    payload.stamp(rows, SHAPE, 1)
    before = [row[PIXELS].clone() for row in rows]
    payload.stamp(rows, SHAPE, 2)
    for old, row in zip(before, rows, strict=True):
        pages = (old != row[PIXELS]).view(-1).split(1024)
        assert all(page.any() for page in pages)


def test_shared_copies_are_the_same_tensors_and_separate_ones_are_not() -> None:
    shared = payload.make_rows(Shape(tier=1, rows=16, copies=4, shared=True))
    separate = payload.make_rows(SHAPE)
    payload.stamp(shared, SHAPE, 3)
    payload.stamp(separate, SHAPE, 3)
    assert payload.digests(shared) == payload.digests(separate)
    assert [len({row[PIXELS].data_ptr() for row in rows}) for rows in (shared, separate)] == [4, 16]


def arrived(number: int = 1) -> tuple[list[dict[str, Any]], list[int]]:
    rows = payload.make_rows(SHAPE)
    payload.stamp(rows, SHAPE, number)
    return rows, payload.digests(rows)


def test_what_was_sent_passes_the_check() -> None:
    rows, sent = arrived()
    payload.check(rows, SHAPE, sent)


def flip_last_byte(rows: list[dict[str, Any]]) -> None:
    rows[7][PIXELS].view(torch.uint8).view(-1)[-1] ^= 1


def change_grid(rows: list[dict[str, Any]]) -> None:
    rows[2][GRID][0, 0] = 9


def lose_key(rows: list[dict[str, Any]]) -> None:
    del rows[3][GRID]


def change_dtype(rows: list[dict[str, Any]]) -> None:
    rows[1][PIXELS] = rows[1][PIXELS].view(torch.int32)


def swap_groups(rows: list[dict[str, Any]]) -> None:
    rows[0], rows[4] = rows[4], rows[0]


def lose_row(rows: list[dict[str, Any]]) -> None:
    rows.pop()


@pytest.mark.parametrize("spoil", [flip_last_byte, change_grid, lose_key, change_dtype, swap_groups, lose_row])
def test_any_difference_fails_the_check(spoil: Any) -> None:
    rows, sent = arrived()
    spoil(rows)
    with pytest.raises(ValueError, match=r"row|bytes"):
        payload.check(rows, SHAPE, sent)


def test_an_older_batch_fails_the_check() -> None:
    with pytest.raises(ValueError, match="16 of 16 rows differ"):
        payload.check(arrived(1)[0], SHAPE, arrived(2)[1])


# --- counting ---------------------------------------------------------------------------------------------------------


class Message:
    def serialize(self) -> list[bytes]:
        return [b"x" * 1000, b"y" * 24]

    @classmethod
    def deserialize(cls, frames: list[bytes]) -> str:
        return "read"


class Packer:
    @staticmethod
    def pack_into(target: Any, items: list[bytes]) -> None:
        pass


def test_every_kind_of_copy_is_counted() -> None:
    source, target = torch.rand(1024), torch.zeros(1024)
    copies = [
        lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), 4096),
        lambda: np.copyto(target.numpy(), source.numpy()),
        lambda: target.copy_(source),
        lambda: source.clone(),
        lambda: source.view(32, 32).t().contiguous(),
        lambda: torch.cat([source[:512], source[512:]]),
        lambda: torch.nested.as_nested_tensor([source[:512], source[512:]], layout=torch.jagged),
        lambda: Packer.pack_into(None, [bytes(4000), bytes(96)]),
    ]
    for copy in copies:
        with watching([(Packer, "pack_into")], Message) as seen:
            copy()
        assert seen.copied == 4096
    with watching([(Packer, "pack_into")], Message) as seen:
        source.contiguous()
        source.view(32, 32)[3].cpu()
        source[:8].clone()
        assert Message().serialize()
        assert Message.deserialize([b"z" * 10]) == "read"
    assert (seen.copied, seen.messages) == (0, 1034)


def test_the_engines_calls_are_counted_and_passed_on() -> None:
    class Native:
        def register_buffer(self, buffer_ptr: int, size: int) -> int:
            return 7

        def batch_upsert_from(self, keys: Any, pointers: Any, sizes: Any, config: Any = None) -> Any:
            return [config]

        def batch_get_into(self, keys: Any, pointers: Any, sizes: Any) -> Any:
            return sizes

    store = counted(Native)()
    with reading() as cost:
        assert store.register_buffer(1, 100) == 7
        assert store.batch_upsert_from(["a"], [1], [30], config="c") == ["c"]
        assert store.batch_get_into(["a", "b"], [1, 2], [3, 4]) == [3, 4]
    assert (cost.found.registrations, cost.found.registered_bytes, cost.found.moved_bytes) == (1, 100, 37)
    assert isinstance(store, Native)
    assert ENGINE.registrations >= 1


def test_fresh_memory_and_its_peak_are_seen() -> None:
    """In a process of its own: threads that other tests left give and take memory meanwhile."""
    script = """
import mmap
from relax_tq_rdma.bench.path.counters import reading
with reading() as cost:
    memory = mmap.mmap(-1, 64 << 20)
    for page in range(0, 64 << 20, 4096):
        memory[page] = 1
    memory.close()
print(cost.found.fresh_bytes, cost.found.rss_peak - cost.found.rss_before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert [int(word) for word in done.stdout.split()] == [pytest.approx(64 * MIB, rel=0.1)] * 2


def test_limits_are_measured() -> None:
    seconds = measure_limits([MIB, 3 * MIB])
    assert tuple(seconds) == LIMITS
    assert all(0 < value < 10 for value in seconds.values())


# --- figures ----------------------------------------------------------------------------------------------------------


def moved(seconds: float, *, registrations: int = 0, peak: int = 0, watched: Watched | None = None) -> Moved:
    counters = Counters(
        registrations=registrations,
        registered_bytes=0,
        moved_bytes=0,
        fresh_bytes=500,
        rss_before=100,
        rss_peak=100 + peak,
        cpu_s=0.1,
    )
    return Moved(seconds=seconds, counters=counters, watched=watched)


def test_one_direction() -> None:
    watched = moved(9.0, watched=Watched(copied_bytes=2000, message_bytes=1100))
    found = side([moved(0.2, peak=5), moved(0.1, peak=70, registrations=2), moved(0.4)], watched, 1000)
    assert found.seconds == Spread(median=0.2, min=0.1, max=0.4)
    assert found.gbs == pytest.approx(1000 / 0.2 / 1e9)
    assert (found.copies, found.fresh, found.registrations, found.moved_bytes) == (2.0, 0.5, 0, 1100)
    assert found.peak_rss_bytes == 70
    assert found.all_seconds == [0.2, 0.1, 0.4]


def figures(case: str, put: float = 0.0, get: float = 0.0, *, tier: int = 256) -> CaseFigures:
    """A case that took so many seconds for 1e9 bytes; 0 means it was not measured."""

    def made(seconds: float) -> Side:
        return Side(
            seconds=Spread(median=seconds, min=seconds, max=seconds),
            gbs=1 / seconds,
            copies=0,
            fresh=0,
            registrations=0,
            registered_bytes=0,
            moved_bytes=0,
            rungs={},
            peak_rss_bytes=0,
            cpu_s=0,
            all_seconds=[seconds],
        )

    return CaseFigures(
        case=case,
        backend=by_name(case).backend,
        tier_mib=tier,
        payload_bytes=10**9,
        rows=64,
        dup=1,
        dup_shared=False,
        put=made(put) if put else None,
        get=made(get) if get else None,
        not_measured="" if put else "why",
    )


def test_limits_of_a_tier() -> None:
    found = limits(10**9, {"memcpy": [0.1, 0.3, 0.2], "loopback": [0.5]}, figures("engine", 0.5, 0.8))
    assert found.memcpy == Spread(median=0.2, min=0.1, max=0.3)
    assert found.gbs() == {
        "memcpy": pytest.approx(5.0),
        "memcpy_rows": None,
        "loopback": pytest.approx(2.0),
        "engine_put": pytest.approx(2.0),
        "engine_get": pytest.approx(1.25),
        "put_copy": pytest.approx(1 / (1 / 2.0 + 1 / 5.0)),
    }
    assert set(limits(10**9, {"memcpy": [], "loopback": []}, None).gbs().values()) == {None}


def test_ratios_are_above_one_where_the_plugin_is_faster() -> None:
    cases = [
        figures("engine", 0.5, 0.8),
        figures("mooncake_dict", 8.0, 2.0),
        figures("mooncake_jagged", 1.0, 4.0),
        figures("mooncake_l2_l5", 1.0, 1.0),
        figures("mooncake_l2_l3b_share_l5", 0.5, 0.5),
        figures("simple_dict", 1.0, 1.0),
        figures("simple_l2", 0.5, 0.8),
        figures("simple_l2_l3b"),
    ]
    found = ratios(cases, limits(10**9, {"memcpy": [0.5]}, cases[0]))
    assert found == {
        "mooncake_get_vs_engine": pytest.approx(0.8),
        "mooncake_put_vs_copy_limit": pytest.approx(1.0),
        "mooncake_get_vs_upstream_dict": pytest.approx(2.0),
        "mooncake_put_vs_upstream_dict": pytest.approx(8.0),
        "mooncake_get_vs_upstream_jagged": pytest.approx(4.0),
        "mooncake_put_vs_upstream_jagged": pytest.approx(1.0),
        "simple_get_vs_upstream_dict": pytest.approx(1.25),
        "simple_put_vs_upstream_dict": pytest.approx(2.0),
        "mooncake_effective_copies": None,
        "mooncake_effective_share": pytest.approx(10.0),
        "simple_effective_copies": None,
        "simple_effective_share": None,
    }


def test_ratios_of_the_best_repeats() -> None:
    fast = figures("simple_l2", 1.0, 1.0)
    assert fast.put is not None
    lucky = msgspec.structs.replace(fast.put, seconds=Spread(median=1.0, min=0.5, max=2.0))
    cases = [figures("simple_dict", 1.0, 1.0), msgspec.structs.replace(fast, put=lucky)]
    assert ratios(cases, TierLimits())["simple_put_vs_upstream_dict"] == pytest.approx(1.0)
    assert ratios(cases, TierLimits(), "min")["simple_put_vs_upstream_dict"] == pytest.approx(2.0)


def test_the_headline_is_256_mib_or_the_largest() -> None:
    assert headline_tier([512, 256, 1]) == 256
    assert headline_tier([1, 64]) == 64


def test_the_document_is_json_with_the_promised_keys() -> None:
    cases = [figures("engine", 0.5, 0.8, tier=1), figures("simple_l2", tier=1)]
    bounds = {1: TierLimits(payload_bytes=3 * 10**9, memcpy=Spread(median=1.0, min=1.0, max=1.0))}
    whole = json.loads(json.dumps(document({"cpus": 2}, cases, bounds)))
    assert whole["schema"] == "relax-tq-rdma/bench-path/1"
    assert whole["limits"]["memcpy"] == 3.0
    assert whole["limits"] == whole["limits_by_tier"]["1"]
    assert whole["ratios"] == whole["ratios_by_tier"]["1"]
    assert whole["tier_mib"] == 1
    engine, simple = whole["cases"]
    assert engine["put"]["seconds"] == {"median": 0.5, "min": 0.5, "max": 0.5}
    assert (simple["put"], simple["not_measured"]) == (None, "why")


# --- proof ------------------------------------------------------------------------------------------------------------


def seen(**more: int) -> Watched:
    return Watched(copied_bytes=0, message_bytes=0, **more)


def test_a_layer_without_effect_is_a_problem() -> None:
    unique = SHAPE.nbytes // SHAPE.copies
    all_rows = SHAPE.rows
    assert "no effect: 3 of 16" in proof.problem(by_name("simple_l2"), SHAPE, seen(encoded_rows=3))
    assert "although nothing asked" in proof.problem(by_name("mooncake_dict"), SHAPE, seen(encoded_rows=1))
    stored_all = seen(encoded_rows=all_rows, stored_bytes=SHAPE.nbytes)
    assert "dedup_multimodal had no effect" in proof.problem(by_name("simple_l2_l3b"), SHAPE, stored_all)
    assert proof.problem(by_name("simple_l2"), SHAPE, stored_all) == ""
    assert proof.problem(by_name("simple_l2_l3b"), SHAPE, seen(encoded_rows=all_rows, stored_bytes=unique + 4000)) == ""
    steps = [moved(0.1), moved(0.1, registrations=2)]
    assert "2 registrations in 2 steps" in proof.staging_problem(by_name("mooncake_l2_l5"), steps)
    staged = msgspec.structs.replace(steps[0], rungs={"lend": 5, "copy": 0})
    assert proof.staging_problem(by_name("mooncake_l2_l5"), [staged]) == ""
    assert "passed the pool in 1 of 2" in proof.staging_problem(by_name("mooncake_l2_l5"), [staged, steps[0]])
    assert proof.staging_problem(by_name("mooncake_l2"), steps) == ""


# --- children ---------------------------------------------------------------------------------------------------------


def test_a_child_that_cannot_answers_in_words_and_stays(tmp_path: Path) -> None:
    child = Child("consumer", tmp_path / "log", {})
    try:
        for _ in range(2):
            with pytest.raises(Refused, match="KeyError: 'nobody'"):
                child.ask(Clear(case="nobody", partition="p"), 60)
    finally:
        child.close()
        child.close()


def test_a_child_that_ends_is_noticed_with_its_last_words(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = Child("nonsense", log, {})
    try:
        with pytest.raises(
            ChildError, match=r"nonsense ended with exit status 1; its last words: KeyError: 'nonsense'"
        ):
            child.ask(Clear(case="x", partition="p"), 60)
    finally:
        child.close()


def test_a_child_that_says_nothing_has_a_deadline(tmp_path: Path) -> None:
    child = Child("controller", tmp_path / "log", {})
    try:
        with pytest.raises(ChildError, match="controller did not answer within 0 s"):
            child.hear(0.2)
    finally:
        child.close()


# --- the run ----------------------------------------------------------------------------------------------------------


class FakeEnd:
    """An end that answers each command at once; ``fails(command)`` may raise."""

    def __init__(self, fails: Callable[[Any], None] = lambda command: None) -> None:
        self.asked: list[Any] = []
        self._fails = fails

    def ask(self, command: Any, seconds: float) -> Any:
        self.asked.append(command)
        self._fails(command)
        if isinstance(command, Limits):
            return Measured(seconds={"memcpy": 0.1, "memcpy_rows": 0.15, "loopback": 0.2})
        if not isinstance(command, (Put, Get)):
            return Ready()
        encoded = SHAPE.rows if "l2" in command.case else 0
        watched = seen(encoded_rows=encoded, stored_bytes=SHAPE.nbytes) if command.watch else None
        return moved(0.5, watched=watched)

    def cases(self, kind: type) -> list[str]:
        return [command.case for command in self.asked if isinstance(command, kind)]


def run_tier(names: list[str], producer: FakeEnd, consumer: FakeEnd) -> tuple[Result, Stage]:
    options = parse(["--tier", "1", "--rows", "16", "--dup", "4", "--repeats", "3", *with_cases(names)])
    stage = Stage(producer, consumer)  # type: ignore[arg-type]
    stage.cases = options.cases
    result = Result()
    Tier(stage, options, SHAPE, lambda text: None).run(result)
    return result, stage


def with_cases(names: list[str]) -> list[str]:
    return [word for name in names for word in ("--case", name)]


def test_cases_take_turns_in_every_order_and_warm_ups_do_not_count() -> None:
    producer, consumer = FakeEnd(), FakeEnd()
    result, _ = run_tier(["engine", "simple_dict", "simple_l2"], producer, consumer)
    rounds = [producer.cases(Put)[at : at + 3] for at in range(0, 15, 3)]
    assert all(sorted(one) == ["engine", "simple_dict", "simple_l2"] for one in rounds)
    assert {one[0] for one in rounds[2:]} == {"engine", "simple_dict", "simple_l2"}
    assert [len(case.put.all_seconds) for case in result.cases if case.put] == [3, 3, 3]
    assert len({command.stamp for command in producer.asked if isinstance(command, Put)}) == 5
    assert result.limits[1].gbs()["memcpy"] == pytest.approx(SHAPE.nbytes / 0.1 / 1e9)
    assert producer.cases(Clear) == producer.cases(Put)


def test_a_case_that_fails_is_not_measured_and_its_batch_is_removed() -> None:
    def refuse(command: Any) -> None:
        if isinstance(command, Get) and command.case == "simple_dict":
            raise Refused("row 3 differs")

    producer = FakeEnd()
    result, _ = run_tier(["engine", "simple_dict"], producer, FakeEnd(refuse))
    assert [(case.case, case.not_measured) for case in result.cases] == [
        ("engine", ""),
        ("simple_dict", "row 3 differs"),
    ]
    assert producer.cases(Clear).count("simple_dict") == 1


def test_a_case_whose_layer_had_no_effect_is_not_measured() -> None:
    result, _ = run_tier(["simple_l2", "simple_l2_l3b"], FakeEnd(), FakeEnd())
    l2, l3b = result.cases
    assert l2.put is not None
    assert (l3b.put, l3b.not_measured[:30]) == (None, "dedup_multimodal had no effect")


def test_a_lost_end_leaves_what_was_measured_and_says_why_there_is_no_more() -> None:
    puts: list[str] = []

    def vanish(command: Any) -> None:
        if isinstance(command, Put):
            puts.append(command.case)
            if puts.count("engine") == 5:
                raise ChildError("the producer ended with exit status -11")

    result, stage = run_tier(["engine", "simple_dict"], FakeEnd(vanish), FakeEnd())
    assert stage.lost == "the producer ended with exit status -11"
    engine, simple = result.cases
    assert engine.not_measured == stage.lost
    # In the last round it was the turn of the engine first: the other case lacks a repeat, too.
    assert simple.not_measured == stage.lost
