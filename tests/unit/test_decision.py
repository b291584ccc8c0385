"""The decision: AND over nodes, one record a step, any doubt is a "no", the order of reports is irrelevant (FC-09)."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from node_reports import good, names

from relax_tq_rdma.settings import Settings
from relax_tq_rdma.transport.decision import LADDER, Refusal, decide, next_rung, nodes_ok
from relax_tq_rdma.transport.port import Problem
from relax_tq_rdma.transport.report import CHECKS, DERIVED_CHECKS, Check, Decision, NodeReport

RUNGS = ["MooncakeStore/rdma+gdr", "MooncakeStore/rdma", "MooncakeStore/tcp", "SimpleStorage/zmq"]
ASKED = {"storage_backend": "mooncake", "transport": "rdma", "rdma_mode": "auto", "mooncake_auto_init": "job-owned"}


def asked(**changes: Any) -> Settings:
    return Settings(**{**ASKED, **changes})


def decided(settings: Settings, reports: Any, count: int = 4) -> Decision:
    outcome = decide(settings, reports, names(count))
    assert isinstance(outcome, Decision), outcome
    return outcome


def refused(settings: Settings, reports: Any, count: int = 4) -> Refusal:
    outcome = decide(settings, reports, names(count))
    assert isinstance(outcome, Refusal), outcome
    return outcome


def steps(decision: Decision | Refusal) -> list[tuple[str, str, str, str]]:
    return [(f.from_, f.to, f.node, f.check) for f in decision.fallbacks]


def test_every_check_of_the_probe_gates_exactly_one_rung() -> None:
    gates = [check for rung in LADDER for check in rung.checks]
    assert sorted(gates) == sorted((*CHECKS, *DERIVED_CHECKS))


@pytest.mark.parametrize(
    ("changes", "rung", "device"),
    [
        ({}, "MooncakeStore/rdma", ""),
        ({"use_gdr": True}, "MooncakeStore/rdma+gdr", ""),
        ({"rdma_mode": "required", "use_gdr": True}, "MooncakeStore/rdma+gdr", ""),
        ({"rdma_device": " mlx5_0 ,mlx5_0,"}, "MooncakeStore/rdma", "mlx5_0"),
        ({"rdma_device": "mlx5_0:1"}, "MooncakeStore/rdma", "mlx5_0"),
        ({"transport": "tcp", "rdma_mode": "off", "rdma_device": "mlx5_0"}, "MooncakeStore/tcp", ""),
        ({"rdma_mode": "off"}, "MooncakeStore/tcp", ""),
        ({"storage_backend": "simple", "transport": "tcp", "rdma_mode": "off"}, "SimpleStorage/zmq", ""),
    ],
)
def test_a_cluster_in_order_gets_what_is_asked_for(changes: dict[str, Any], rung: str, device: str) -> None:
    decision = decided(asked(**changes), [good(i) for i in range(4)])
    assert (decision.rung, decision.device, decision.fallbacks) == (rung, device, ())


def test_simple_storage_needs_no_report() -> None:
    assert decide(Settings(), [], {}) == Decision(backend="SimpleStorage", protocol="zmq")


@pytest.mark.parametrize("check", CHECKS)
def test_one_failing_check_on_one_node_moves_the_whole_job(check: str) -> None:
    reports = [good(0), good(1), good(2, {check: "broken"}), good(3)]
    decision = decided(asked(use_gdr=True), reports)
    own = next(i for i, rung in enumerate(LADDER) if check in rung.checks)
    assert decision.rung == RUNGS[own + 1]
    assert steps(decision) == [(RUNGS[0], RUNGS[own + 1], "node-2", check)]
    assert decision.fallbacks[0].reason == f"broken: mend {check}"


def test_each_rung_that_fails_for_a_reason_of_its_own_leaves_a_record() -> None:
    reports = [
        good(0, {"gdr": "no GPU"}),
        good(1, {"rdma_port": "port 1 is DOWN"}),
        good(2, {"mooncake": "libibverbs.so.1 missing"}),
        good(3),
    ]
    decision = decided(asked(use_gdr=True), reports)
    assert steps(decision) == [
        (RUNGS[0], RUNGS[1], "node-0", "gdr"),
        (RUNGS[1], RUNGS[2], "node-1", "rdma_port"),
        (RUNGS[2], RUNGS[3], "node-2", "mooncake"),
    ]


def test_record_names_the_first_node_in_natural_order_and_counts_the_others() -> None:
    reports = [good(i, {"memlock": f"limit 64 KiB on {i}"} if i in (2, 10, 11) else None) for i in range(12)]
    reports[4] = good(4, {"rdma_port": "port 1 is DOWN"})
    (fallback,) = decided(asked(), reports, 12).fallbacks
    assert (fallback.node, fallback.check) == ("node-2", "memlock")
    assert fallback.reason == "limit 64 KiB on 2: mend memlock (and 2 more nodes); also rdma_port on node-4"


def test_nodes_that_share_a_name_stay_apart() -> None:
    nodes = {"aaaa1": "host", "bbbb2": "host"}
    reports = [good(0, node="host", node_id="aaaa1"), good(1, {"rdma_gid": "all zero"}, node="host", node_id="bbbb2")]
    decision = decide(asked(), reports, nodes)
    assert decision.fallbacks[0].node == "host/bbbb2"
    assert nodes_ok(decide(asked(rdma_mode="off"), reports, nodes), asked(), reports, nodes) == (2, 2)


def test_degraded_is_usable_and_skipped_is_not() -> None:
    def with_status(status: Any) -> NodeReport:
        check = Check(name="memlock", status=status, evidence="holds one process")
        return good(1, checks=(*(c for c in good(1).checks if c.name != "memlock"), check))

    assert decided(asked(), [good(0), with_status("degraded")], 2).rung == "MooncakeStore/rdma"
    skipped = decided(asked(), [good(0), with_status("skipped")], 2)
    assert skipped.rung == "MooncakeStore/tcp"
    assert skipped.fallbacks[0].reason == "was skipped (holds one process)"


def malformed(value: Any) -> dict[str, Any]:
    return {**msgspec.to_builtins(good(3)), "checks": value}


def twice(i: int) -> NodeReport:
    report = good(i)
    return good(i, checks=(*report.checks, report.checks[0]))


@pytest.mark.parametrize(
    ("last", "node", "check", "reason"),
    [
        ([], "node-3", "report", "no report in time"),
        ([good(3), good(3)], "node-3", "report", "2 reports for one node id"),
        ([malformed("all fine")], "node-3", "report", "cannot be read (Expected `array`, got `str`"),
        ([malformed([{"name": "shm"}])], "node-3", "report", "cannot be read (Object missing required field"),
        ([good(3, checks=None)], "node-3", "report", "cannot be read"),
        ([good(3, checks=good(3).checks[:-1])], "node-3", "memory", "was not checked"),
        ([twice(3)], "node-3", "report", "a check is reported twice"),
        ([good(3), good(7)], "", "report", "1 report(s) of unknown node id-7"),
        ([good(3), "garbage"], "", "report", "1 report(s) without a node id"),
        ([good(3, mooncake_version="0.3.10")], "node-3", "mooncake", "Mooncake 0.3.10 here, while 3 nodes have 0.3.13"),
        ([good(3, mooncake_version="")], "node-3", "mooncake", "Mooncake of unknown version here"),
        ([good(3, plugin_version="0.2.0")], "node-3", "plugin", "relax-tq-rdma 0.2.0 here, while 3 nodes have 0.1.0"),
    ],
)
def test_any_doubt_about_a_node_means_no_mooncake(last: list[Any], node: str, check: str, reason: str) -> None:
    reports = [good(0), good(1), good(2), *last]
    decision = decided(asked(), reports)
    assert steps(decision) == [("MooncakeStore/rdma", "SimpleStorage/zmq", node, check)]
    assert reason in decision.fallbacks[0].reason
    assert (node or check) in refused(asked(rdma_mode="required"), reports).message


def test_no_node_at_all_is_a_doubt_too() -> None:
    assert refused(asked(fallback_backend="none"), [], 0).message.count("no alive node was found") == 1


def test_versions_no_node_tells_are_a_doubt() -> None:
    decision = decided(asked(), [good(0, mooncake_version=""), good(1, mooncake_version="")], 2)
    assert steps(decision) == [("MooncakeStore/rdma", "SimpleStorage/zmq", "node-0", "mooncake")]
    assert decided(asked(), [good(0, mooncake_version="")], 1).fallbacks == ()  # nothing to compare it with


def test_of_two_versions_that_are_as_common_the_first_node_decides() -> None:
    reports = [good(10, mooncake_version="0.3.13"), good(2, mooncake_version="0.3.10")]
    outcome = decide(asked(), reports, {"id-10": "node-10", "id-2": "node-2"})
    assert steps(outcome) == [("MooncakeStore/rdma", "SimpleStorage/zmq", "node-10", "mooncake")]
    assert "Mooncake 0.3.13 here, while node-2 has 0.3.10" in outcome.fallbacks[0].reason


def test_a_node_without_mooncake_is_not_blamed_twice() -> None:
    decision = decided(asked(), [good(0), good(1, {"mooncake": "not installed"}, mooncake_version="")], 2)
    assert decision.fallbacks[0].reason == "not installed: mend mooncake"


@pytest.mark.parametrize(
    ("devices", "requested", "reason"),
    [
        (("mlx5_1",), "mlx5_0", "mlx5_0 is not usable here (usable: mlx5_1)"),
        (("mlx5_10", "mlx5_2"), "mlx5_2,mlx5_3", "mlx5_3 is not usable here (usable: mlx5_2, mlx5_10)"),
        ((), "", "no usable device is listed"),
    ],
)
def test_a_device_that_one_node_lacks_rules_rdma_out(devices: tuple[str, ...], requested: str, reason: str) -> None:
    one = good(0).devices[0]
    wanted = [msgspec.structs.replace(one, name=name) for name in ("mlx5_0", "mlx5_2", "mlx5_3")]
    had = tuple(msgspec.structs.replace(one, name=name) for name in devices)
    decision = decided(asked(rdma_device=requested), [good(0, devices=tuple(wanted)), good(1, devices=had)], 2)
    assert steps(decision) == [("MooncakeStore/rdma", "MooncakeStore/tcp", "node-1", "rdma_device")]
    assert reason in decision.fallbacks[0].reason


def test_required_names_every_node_and_check() -> None:
    reports = [good(0, {"memlock": "limit 64 KiB"}), good(1, {"rdma_port": "port 1 is DOWN"}), good(2)]
    refusal = refused(asked(rdma_mode="required"), reports)
    for part in ("memlock on node-0 (limit 64 KiB: mend memlock)", "rdma_port on node-1", "report on node-3"):
        assert part in refusal.message
    assert refusal.fallbacks == ()


@pytest.mark.parametrize("missing", ["gdr", "rdma_port", "mooncake"])
def test_required_does_not_degrade_by_one_step_even(missing: str) -> None:
    settings = asked(rdma_mode="required", use_gdr=True)
    assert isinstance(decide(settings, [good(0, {missing: "no"})], names(1)), Refusal)


def test_without_a_fallback_backend_the_ladder_ends_at_tcp() -> None:
    settings = asked(fallback_backend="none")
    assert decided(settings, [good(0, {"rdma_gid": "all zero"})], 1).rung == "MooncakeStore/tcp"
    refusal = refused(settings, [good(0, {"rdma_gid": "all zero", "mooncake": "not installed"})], 1)
    assert "MooncakeStore/tcp cannot be used" in refusal.message
    assert "mooncake on node-0 (not installed: mend mooncake)" in refusal.message
    assert "--tq-fallback-backend simple" in refusal.message
    assert steps(refusal) == [("MooncakeStore/rdma", "MooncakeStore/tcp", "node-0", "rdma_gid")]


def test_off_mode_checks_mooncake_but_not_rdma() -> None:
    settings = asked(rdma_mode="off")
    rdma = dict.fromkeys(("rdma_device", "rdma_port", "rdma_gid", "memlock", "gdr"), "no")
    assert decided(settings, [good(0, rdma)], 1).fallbacks == ()
    assert steps(decided(settings, [good(0, {"reachability": "one way only"})], 1)) == [
        ("MooncakeStore/tcp", "SimpleStorage/zmq", "node-0", "reachability")
    ]


def test_a_thousand_broken_nodes_give_a_message_one_can_read() -> None:
    everything = dict.fromkeys(CHECKS, "x" * 5000 + "\nsecond line")
    nodes = {f"id-{i}": f"{'n' * 300}-{i}" for i in range(1000)}
    reports = [good(i, everything, mooncake_version=f"0.{i}") for i in range(1000)]
    refusal = decide(asked(rdma_mode="required", use_gdr=True), reports, nodes)
    assert isinstance(refusal, Refusal)
    assert "and 992 more" in refusal.message
    assert len(refusal.message) < 12_000
    assert "\n" not in refusal.message
    decision = decide(asked(use_gdr=True), reports, nodes)
    assert all(len(f.reason) < 1000 for f in decision.fallbacks)


def test_nodes_ok_counts_what_the_decision_relies_on() -> None:
    reports = [good(0), good(1, {"rdma_port": "DOWN"}), good(2, {"gdr": "no GPU"}), good(3, {"memory": "full"})]
    on = {
        rung: Decision(backend=r.backend, protocol=r.protocol, gdr=r.gdr) for rung, r in zip(RUNGS, LADDER, strict=True)
    }
    counts = [nodes_ok(on[rung], asked(), reports, names(4)) for rung in RUNGS]
    assert counts == [(1, 4), (2, 4), (3, 4), (3, 4)]


# --- after the probe --------------------------------------------------------------------------------------------------


def test_next_rung_goes_down_one_step_at_a_time() -> None:
    settings, problem = asked(use_gdr=True), Problem(reason="set-up failed with -1", node="node-1", check="preflight")
    decision, seen = decided(settings, [good(0)], 1), []
    while isinstance(decision, Decision):
        seen.append(decision.rung)
        decision = next_rung(decision, settings, problem)
    assert seen == RUNGS
    assert "SimpleStorage could not be started" in decision.message
    assert [f.to for f in decision.fallbacks] == RUNGS[1:]
    assert decision.fallbacks[0].reason == "set-up failed with -1"


def test_without_a_master_no_mooncake_rung_is_tried() -> None:
    settings = asked(use_gdr=True)
    outcome = next_rung(decided(settings, [good(0)], 1), settings, Problem(reason="refused", check="master"))
    assert steps(outcome) == [(RUNGS[0], RUNGS[3], "", "master")]
    strict = asked(fallback_backend="none")
    outcome = next_rung(decided(strict, [good(0)], 1), strict, Problem(reason="refused", check="master"))
    assert isinstance(outcome, Refusal)
    assert "master (refused)" in outcome.message


def test_next_rung_refuses_in_required() -> None:
    settings = asked(rdma_mode="required")
    outcome = next_rung(decided(settings, [good(0)], 1), settings, Problem(reason="wire=tcp", check="verify"))
    assert isinstance(outcome, Refusal)
    assert "verify (wire=tcp)" in outcome.message
    assert "--tq-rdma-mode auto" in outcome.message


def test_simple_storage_that_fails_names_no_flag_of_mooncake() -> None:
    outcome = next_rung(Decision(backend="SimpleStorage", protocol="zmq"), Settings(), Problem(reason="no CPU left"))
    assert isinstance(outcome, Refusal)
    assert "no CPU left" in outcome.message
    assert "fallback" not in outcome.message


# --- properties -------------------------------------------------------------------------------------------------------

node_states = st.lists(
    st.one_of(
        st.none(),
        st.sets(st.sampled_from(CHECKS), max_size=3),
        st.sampled_from(["silent", "double", "garbled", "old"]),
    ),
    min_size=1,
    max_size=6,
)
settings_drawn = st.builds(
    asked,
    use_gdr=st.booleans(),
    rdma_mode=st.sampled_from(["off", "auto", "required"]),
    fallback_backend=st.sampled_from(["simple", "none"]),
    rdma_device=st.sampled_from(["", "mlx5_0", "mlx5_7"]),
).map(lambda s: msgspec.structs.replace(s, use_gdr=s.use_gdr and s.rdma_mode != "off"))


def reports_of(states: list[Any]) -> list[object]:
    reports: list[object] = []
    for i, state in enumerate(states):
        if isinstance(state, set):
            reports.append(good(i, {check: f"broken {check}" for check in state}))
        elif state == "double":
            reports += [good(i), good(i)]
        elif state == "garbled":
            reports.append({"node_id": f"id-{i}", "checks": 7})
        elif state != "silent":
            reports.append(good(i, plugin_version="0.0.1") if state == "old" else good(i))
    return reports


@given(node_states, settings_drawn, st.randoms(use_true_random=False))
def test_order_of_reports_and_nodes_does_not_matter(states: list[Any], settings: Settings, rng: random.Random) -> None:
    reports, nodes = reports_of(states), list(names(len(states)).items())
    first = decide(settings, reports, dict(nodes))
    rng.shuffle(reports)
    rng.shuffle(nodes)
    assert decide(settings, reports, dict(nodes)) == first


@given(node_states, settings_drawn)
def test_what_is_decided_every_node_can_do(states: list[Any], settings: Settings) -> None:
    outcome = decide(settings, reports_of(states), names(len(states)))
    start = RUNGS[2 if settings.rdma_mode == "off" else 0 if settings.use_gdr else 1]
    if isinstance(outcome, Refusal):
        assert settings.rdma_mode == "required" or settings.fallback_backend == "none"
        return
    path = [start, *(f.to for f in outcome.fallbacks)]
    assert path[-1] == outcome.rung
    assert [f.from_ for f in outcome.fallbacks] == path[:-1]
    assert sorted(path, key=RUNGS.index) == path  # strictly down, and no rung twice
    assert len(set(path)) == len(path)
    assert settings.rdma_mode != "required" or len(path) == 1
    ok, total = nodes_ok(outcome, settings, reports_of(states), names(len(states)))
    assert outcome.backend == "SimpleStorage" or ok == total
    if outcome.backend == "SimpleStorage":
        assert ok < total
