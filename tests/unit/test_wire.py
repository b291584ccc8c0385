import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_tq_rdma.transport.sysfs import Tree
from relax_tq_rdma.transport.wire import MTU_BYTES, Counter, growth_of, judge, read_counters

MIB = 2**20


def port(tmp_path, device, number, **files):
    base = tmp_path / "sys/class/infiniband" / device / "ports" / str(number)
    for name, value in files.items():
        path = base / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    return Tree(tmp_path)


def words(received, device="mlx5_0"):
    return [Counter(device=device, port=1, unit="word", received=received)]


def packets(received, device="rxe0"):
    return [Counter(device=device, port=1, unit="packet", received=received)]


def test_port_data_is_preferred_and_packets_stand_in(tmp_path):
    port(tmp_path, "mlx5_0", 1, counters__port_rcv_data=100, counters__port_xmit_data=7, hw_counters__rcvd_pkts=3)
    port(tmp_path, "mlx5_10", 2, hw_counters__rcvd_pkts=5)
    tree = port(tmp_path, "mlx5_2", 1, counters__port_rcv_data="garbage")
    assert read_counters(tree) == (
        Counter(device="mlx5_0", port=1, unit="word", received=100),
        Counter(device="mlx5_10", port=2, unit="packet", received=5),
    )


def test_only_the_named_devices_are_read(tmp_path):
    port(tmp_path, "mlx5_0", 1, counters__port_rcv_data=1)
    tree = port(tmp_path, "mlx5_1", 1, counters__port_rcv_data=2)
    assert [counter.device for counter in read_counters(tree, ["mlx5_1", "absent"])] == ["mlx5_1"]


def test_a_tree_without_hcas_has_no_counters(tmp_path):
    assert read_counters(Tree(tmp_path)) == ()


def test_growth_that_accounts_for_the_bytes_proves_rdma():
    proof = judge(words(1000), words(1000 + MIB // 4), MIB)
    assert proof.proven
    assert f"{MIB} bytes were fetched" in proof.evidence


def test_growth_that_is_one_word_short_proves_nothing():
    assert not judge(words(1000), words(1000 + MIB // 4 - 1), MIB).proven


def test_packets_count_at_most_the_largest_mtu():
    needed = MIB // MTU_BYTES
    assert judge(packets(0), packets(needed), MIB).proven
    assert not judge(packets(0), packets(needed - 1), MIB).proven


def test_bytes_over_two_rails_are_added_up():
    before = words(0) + words(0, "mlx5_1")
    after = words(MIB // 8) + words(MIB // 8, "mlx5_1")
    assert judge(before, after, MIB).proven


def test_a_counter_that_stands_still_proves_nothing():
    assert not judge(words(5), words(5), MIB).proven


@pytest.mark.parametrize("limit", [2**32 - 1, 2**64 - 1])
def test_a_counter_at_its_limit_is_named(limit):
    proof = judge(words(limit), words(limit), MIB)
    assert not proof.proven
    assert "mlx5_0 stands at its limit" in proof.evidence


def test_no_counters_prove_nothing():
    assert "nothing proves RDMA" in judge([], [], MIB).evidence
    assert not judge(words(0), packets(10**9), MIB).proven


def test_what_others_receive_is_not_counted_as_ours():
    # Others received as much per second as we claim to have fetched in one second.
    before, after = words(MIB // 4), words(MIB // 2)
    quiet = words(0), words(MIB // 4)
    assert judge(before, after, MIB).proven
    assert not judge(before, after, MIB, quiet=quiet, quiet_seconds=1.0, transfer_seconds=1.0).proven
    ours_too = words(MIB // 4 + MIB // 2)
    assert judge(before, ours_too, MIB, quiet=quiet, quiet_seconds=1.0, transfer_seconds=1.0).proven


@given(st.sampled_from([32, 64]), st.data())
def test_growth_survives_one_wrap(bits, data):
    # Below 2**32 a 64-bit counter that wraps cannot be told from a 32-bit one; it has 500 years for that.
    low = 0 if bits == 32 else 2**32
    before = data.draw(st.integers(low, 2**bits - 1))
    grown = data.draw(st.integers(0, 2**31))
    assert growth_of(before, (before + grown) % 2**bits) == grown
