import socket
import threading

import pytest

from relax_tq_rdma.transport import reach
from relax_tq_rdma.transport.reach import Listener, Listening, dial, judge, partners

FOUR = {"a": "node-a", "b": "node-b", "c": "node-c", "d": "node-d"}


def everybody(names, *failing):
    """Dials of all pairs; ``failing`` are (caller, target)."""
    return {a: {b: "timed out" if (a, b) in failing else "" for b in names if b != a} for a in names}


def test_a_listener_is_reached_and_known():
    listener = Listener("127.0.0.1")
    try:
        assert dial({"x": listener.listening}, 2.0) == {"x": ""}
    finally:
        listener.close()
    assert dial({"x": listener.listening}, 2.0) == {"x": "Connection refused"}


def test_something_else_that_answers_is_not_a_peer():
    listener = Listener("127.0.0.1")
    try:
        other = Listening(host="127.0.0.1", port=listener.listening.port, token="other")
        assert dial({"x": other}, 2.0) == {"x": "something else answers there"}
    finally:
        listener.close()


def test_a_listener_that_accepts_and_says_nothing_times_out():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        target = Listening(host="127.0.0.1", port=silent.getsockname()[1], token="t")
        assert dial({"x": target}, 0.3) == {"x": "timed out"}


def test_an_announced_address_that_is_not_local_is_still_served():
    # Behind address translation the node cannot bind what it announces; only a dial can tell whether that works.
    listener = Listener("198.51.100.7")
    try:
        assert listener.listening.host == "198.51.100.7"
        here = Listening(host="127.0.0.1", port=listener.listening.port, token=listener.listening.token)
        assert dial({"x": here}, 2.0) == {"x": ""}
    finally:
        listener.close()


def test_a_closed_listener_leaves_no_thread():
    listener = Listener("127.0.0.1")
    listener.close()
    for thread in threading.enumerate():
        if thread.name == "reachability":
            thread.join(2.0)
            assert not thread.is_alive()


@pytest.mark.parametrize("size", [1, 2, 3, 17, 18, 100, 1000])
def test_partners_know_no_favourites_and_stay_few(size):
    dialled = [partners(i, size) for i in range(size)]
    assert all(i not in found and len(set(found)) == len(found) for i, found in enumerate(dialled))
    inward = [sum(i in found for found in dialled) for i in range(min(size, 20))]
    assert set(inward) == {len(dialled[0])}
    assert len(dialled[0]) <= max(reach._ALL_PAIRS, 2 * size.bit_length())
    if size <= reach._ALL_PAIRS:
        assert all(len(found) == size - 1 for found in dialled)


def test_all_reached():
    checks = judge(FOUR, everybody(FOUR))
    assert {check.status for check in checks.values()} == {"ok"}
    assert checks["a"].evidence == "reaches 3 peers and is reached by 3"


def test_a_node_nobody_reaches_is_the_one_to_blame():
    checks = judge(FOUR, everybody(FOUR, ("a", "c"), ("b", "c"), ("d", "c")))
    assert [node for node, check in checks.items() if check.status == "missing"] == ["c"]
    assert checks["c"].evidence == "node-a, node-b, node-d cannot reach it (timed out)"
    assert "RTQ_LOCAL_HOSTNAME" in checks["c"].fix


def test_a_node_that_reaches_nobody_is_the_one_to_blame():
    checks = judge(FOUR, everybody(FOUR, ("c", "a"), ("c", "b"), ("c", "d")))
    assert [node for node, check in checks.items() if check.status == "missing"] == ["c"]
    assert checks["c"].evidence == "it cannot reach node-a, node-b, node-d (timed out)"


def test_one_broken_path_is_laid_at_both_ends():
    checks = judge(FOUR, everybody(FOUR, ("a", "c")))
    assert sorted(node for node, check in checks.items() if check.status == "missing") == ["a", "c"]
    assert checks["a"].evidence == "it cannot reach node-c (timed out)"
    assert checks["c"].evidence == "node-a cannot reach it (timed out)"


def test_two_nodes_one_way():
    two = {"a": "node-a", "b": "node-b"}
    checks = judge(two, everybody(two, ("a", "b")))
    assert {node: check.status for node, check in checks.items()} == {"a": "missing", "b": "missing"}


def test_a_node_whose_dials_never_came_is_judged_by_the_others():
    dialled = everybody(FOUR)
    del dialled["d"]
    checks = judge(FOUR, dialled)
    assert checks["d"].evidence == "reaches 0 peers and is reached by 3"
