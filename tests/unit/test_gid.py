"""The GID choice (FC-01): pure tables, each one a case people lost days on."""

from __future__ import annotations

from ipaddress import IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_tq_rdma.transport.gid import GidEntry, choose, refusal

V1, V2 = "IB/RoCE v1", "RoCE v2"


def entry(index: int, text: str, kind: str = V2, netdev: str = "eth0", here: bool | None = True) -> GidEntry:
    return GidEntry(index, IPv6Address(text), text, kind, netdev, here)


def pick(*entries: GidEntry, layer: str = "Ethernet", forced: int | None = None) -> int | None:
    chosen = choose(entries, layer, forced).entry
    return None if chosen is None else chosen.index


def test_routable_ipv4_v2_wins_over_link_local_and_v1() -> None:
    table = [
        entry(0, "fe80::1", V1),
        entry(1, "fe80::1"),
        entry(2, "::ffff:10.77.3.20", V1),
        entry(3, "::ffff:10.77.3.20"),
    ]
    assert pick(*table) == 3


def test_ipv6_only_port_takes_the_unique_local_address() -> None:
    assert pick(entry(0, "fe80::1"), entry(1, "fdcc::1")) == 1


def test_an_interface_of_this_namespace_wins_whatever_the_order() -> None:
    table = [entry(3, "::ffff:10.0.0.3", here=False), entry(7, "::ffff:10.0.0.7", here=True)]
    assert pick(*table) == 7
    assert pick(*reversed(table)) == 7


def test_an_interface_elsewhere_is_better_than_nothing() -> None:
    assert pick(entry(3, "::ffff:10.0.0.3", here=False)) == 3


def test_ipv4_goes_before_ipv6_and_low_before_high() -> None:
    assert pick(entry(1, "fdcc::1"), entry(4, "::ffff:10.0.0.1"), entry(6, "::ffff:10.0.0.2")) == 4


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("::ffff:169.254.1.2", "link-local"),
        ("fe80::1", "link-local"),
        ("::ffff:127.0.0.1", "loopback"),
        ("::1", "loopback"),
        ("::ffff:0.0.0.0", "empty address"),
        ("ff02::1", "multicast"),
        ("::ffff:224.0.0.1", "multicast"),
    ],
)
def test_what_no_peer_can_route_to_is_a_reason_not_a_pick(text: str, why: str) -> None:
    choice = choose([entry(0, text)], "Ethernet")
    assert choice.entry is None
    assert choice.reason.startswith("no routable RoCE v2 GID")
    assert why in choice.reason


def test_reasons_tell_empty_zero_and_v1_tables_apart() -> None:
    assert "empty or unreadable" in choose([], "Ethernet").reason
    assert "all 2 GIDs are zero" in choose([entry(0, "::", ""), entry(1, "::", "")], "Ethernet").reason
    assert "IB/RoCE v1, not RoCE v2" in choose([entry(0, "::ffff:10.0.0.1", V1)], "Ethernet").reason
    assert "type unreadable" in choose([entry(0, "::ffff:10.0.0.1", "")], "Ethernet").reason
    assert "not a GID ('rubbish')" in choose([GidEntry(0, None, "rubbish")], "Ethernet").reason


def test_native_infiniband_goes_by_the_port_guid_without_a_roce_type() -> None:
    default_prefix = entry(0, "fe80::0002:c903:00a1:b2c3", V1, netdev="")
    assert pick(default_prefix, layer="InfiniBand") == 0
    assert pick(entry(0, "fec0:0:0:1::b2c3", "", netdev=""), layer="InfiniBand") == 0
    no_guid = choose([entry(0, "fe80::", V1)], "InfiniBand")
    assert no_guid.entry is None
    assert "port GUID is zero" in no_guid.reason


def test_an_index_forced_by_the_environment_is_judged_not_replaced() -> None:
    table = [entry(0, "fe80::1"), entry(1, "fdcc::1"), entry(3, "::ffff:10.0.0.1")]
    assert pick(*table, forced=1) == 1
    bad = choose(table, "Ethernet", forced=0)
    assert bad.entry is None
    assert "forces GID index 0 (fe80::1, link-local); index 3 would be right" in bad.reason
    assert "no such entry" in choose(table, "Ethernet", forced=9).reason


gids = st.builds(
    lambda index, raw, kind, here: GidEntry(index, IPv6Address(raw), "x", kind, "eth0", here),
    st.integers(0, 255),
    st.one_of(
        st.integers(0, 2**128 - 1),
        st.integers(0, 2**32 - 1).map(lambda v4: 0xFFFF << 32 | v4),
        st.integers(0, 2**64 - 1).map(lambda low: 0xFE80 << 112 | low),
    ),
    st.sampled_from([V1, V2, "", "junk"]),
    st.sampled_from([True, False, None]),
)


@given(st.lists(gids, max_size=20, unique_by=lambda e: e.index), st.sampled_from(["Ethernet", "InfiniBand"]))
def test_a_pick_is_always_an_entry_without_refusal_and_its_order_does_not_matter(
    table: list[GidEntry], layer: str
) -> None:
    choice = choose(table, layer)
    usable = [e for e in table if not refusal(e, layer)]
    assert (choice.entry in usable) if usable else (choice.entry is None and choice.reason)
    assert choose(table[::-1], layer).entry == choice.entry
    if choice.entry is not None and layer == "Ethernet":
        assert choice.entry.type == V2
        assert choice.entry.address is not None
        assert not choice.entry.address.is_link_local
