import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_tq_rdma.transport.native import PeerResult, Ring
from relax_tq_rdma.transport.ring import difference, neighbours, pattern
from relax_tq_rdma.transport.verdict import edges, judge_ring
from relax_tq_rdma.transport.wire import WireProof

PROVEN = WireProof(proven=True, evidence="counted")
UNPROVEN = WireProof(proven=False, evidence="the counters stood still")


def names(size):
    return [f"node-{i}" for i in range(size)]


def ring(size, **changed):
    """Results of a ring in which all is well, but for the peers given as ``p0=...``."""
    return [changed.get(f"p{i}", PeerResult(endpoint=f"host{i}:1", wire=PROVEN)) for i in range(size)]


def judge(results, protocol="tcp", one_host=False):
    return judge_ring(names(len(results)), results, protocol, one_host)


@given(st.integers(2, 40))
def test_every_pair_of_neighbours_is_one_edge(size):
    pairs = edges(size)
    assert len(pairs) == len(set(pairs)) == (1 if size == 2 else size)
    assert {frozenset(pair) for pair in pairs} == {frozenset((i, j)) for i in range(size) for j in neighbours(i, size)}


@pytest.mark.parametrize(("size", "total"), [(2, 1), (3, 3), (8, 8)])
def test_all_well(size, total):
    found = judge(ring(size))
    assert (found.passed, found.total, found.wire, found.problems) == (total, total, "tcp", ())


def test_on_one_host_the_wire_is_local():
    assert judge(ring(2), one_host=True).wire == "local"


def test_a_read_that_fails_one_way_fails_the_round_trip():
    found = judge(ring(4, p1=PeerResult(endpoint="host1:1", unread={2: "bytes differ from offset 65536"})))
    assert (found.passed, found.total) == (3, 4)
    (problem,) = found.problems
    assert problem.node == "node-1"
    assert problem.reason == "reading from node-2: bytes differ from offset 65536"


def test_a_write_that_fails_one_way_fails_the_round_trip():
    found = judge(ring(4, p1=PeerResult(endpoint="host1:1", unacknowledged={2: "late"})))
    assert (found.passed, found.total) == (3, 4)
    assert found.problems[0].reason == "written to by node-2: late"


def test_a_peer_that_failed_is_the_cause_and_not_its_neighbours():
    missed = {1: "its pattern did not appear in time"}
    found = judge(
        ring(
            4,
            p1=PeerResult(reason="no answer", check="master"),
            p0=PeerResult(endpoint="host0:1", unread=missed, unacknowledged=missed),
            p2=PeerResult(endpoint="host2:1", unread=missed, unacknowledged=missed),
        )
    )
    assert (found.passed, found.total) == (2, 4)
    assert [(problem.node, problem.check) for problem in found.problems] == [("node-1", "master")]


def test_patterns_that_lay_in_one_segment_prove_nothing():
    found = judge(ring(3, p1=PeerResult(endpoint="host0:1")))
    assert "lay in one segment" in found.problems[0].reason


def test_rdma_is_claimed_when_every_reader_proves_it():
    assert judge(ring(3), "rdma").wire == "rdma"
    assert judge(ring(2), "rdma", one_host=True).wire == "rdma"


@pytest.mark.parametrize("proof", [None, UNPROVEN])
def test_one_reader_without_proof_is_a_problem_between_hosts(proof):
    found = judge(ring(3, p2=PeerResult(endpoint="host2:1", wire=proof)), "rdma")
    assert found.wire == "tcp"
    assert found.problems[0].node == "node-2"
    assert "RDMA is not proven" in found.problems[0].reason


def test_on_one_host_silent_counters_are_no_failure():
    found = judge(ring(2, p1=PeerResult(endpoint="host1:1", wire=UNPROVEN)), "rdma", one_host=True)
    assert (found.wire, found.problems) == ("local", ())


# --- what a peer compares ---------------------------------------------------------------------------------------------


def test_patterns_are_the_same_everywhere_and_different_for_each_peer():
    place = Ring(token="t", index=0, size=3)
    assert pattern(place, 1, 1000) == pattern(Ring(token="t", index=2, size=3), 1, 1000)
    assert len({pattern(place, i, 1000) for i in range(12)}) == 12
    assert pattern(Ring(token="u", index=0, size=3), 1, 1000) != pattern(place, 1, 1000)


def test_the_difference_is_told():
    want = pattern(Ring(token="t", index=0, size=2), 0, 200_000)
    assert difference(want, want) == ""
    assert difference(want[:100], want) == "100 bytes came instead of 200000"
    # What Mooncake's local memcpy path leaves of a read: zeros from a 64 KiB boundary on (FC-15).
    zeroed = want[:65536] + bytes(len(want) - 65536)
    assert difference(zeroed, want).startswith("bytes differ from offset 65")
    assert "all zeros from there on" in difference(zeroed, want)
    flipped = want[:5] + bytes([want[5] ^ 1]) + want[6:]
    assert difference(flipped, want) == "bytes differ from offset 5 of 200000"
