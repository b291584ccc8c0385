"""Host names and addresses (FC-18)."""

from __future__ import annotations

import ipaddress
import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_tq_rdma import UsageError
from relax_tq_rdma.transport import address
from relax_tq_rdma.transport.address import HostPort


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.0.0.1:50051", "10.0.0.1", 50051),
        ("node-1.cluster.local:1", "node-1.cluster.local", 1),
        ("[::1]:51951", "::1", 51951),
        (" [fd00::2]:65535 ", "fd00::2", 65535),
        ("localhost:50051", "localhost", 50051),
    ],
)
def test_endpoints(text: str, host: str, port: int) -> None:
    endpoint = address.parse(text)
    assert endpoint == HostPort(host, port)
    assert address.parse(str(endpoint)) == endpoint


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not HOST:PORT"),
        ("node1", "not HOST:PORT"),
        (":50051", "not HOST:PORT"),
        ("::1", "ambiguous"),
        ("::1:50051", "ambiguous"),
        ("fe80::1:50051", "ambiguous"),
        ("[::1]", "not HOST:PORT"),
        ("[::1:50051", "not HOST:PORT"),
        ("node1:", "port must be a number"),
        ("node1:0", "port must be a number"),
        ("node1:65536", "port must be a number"),
        ("node1:http", "port must be a number"),
        ("node1:\u0661", "port must be a number"),
        ("no de:1", "not a host name"),
        ("10.0.1:1", "not a host name"),
        ("[node1]:1", "brackets are for IPv6"),
        ("-x:1", "not a host name"),
        ("http://node1:80", "ambiguous"),
    ],
)
def test_bad_endpoints_are_refused_with_the_right_form(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        address.parse(text)


@given(st.one_of(st.ip_addresses().map(str), st.from_regex(r"[a-z][a-z0-9]{0,20}(\.[a-z]{1,5})?", fullmatch=True)))
def test_join_and_parse_are_inverse(host: str) -> None:
    assert address.parse(address.join(host, 50051)) == HostPort(host, 50051)


@given(st.text(max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        endpoint = address.parse(text)
    except UsageError:
        return
    assert address.parse(str(endpoint)) == endpoint


def test_loopback() -> None:
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost", "LOCALHOST.", "a.localhost", "::ffff:127.0.0.1"):
        assert address.is_loopback(host), host
    for host in ("10.0.0.1", "fd00::1", "node1", "localhost.example.org"):
        assert not address.is_loopback(host), host


def test_resolving_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: time.sleep(30) or [])
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"did not answer within 0\.2 s"):
        address.resolve("slow.example", 0.2)
    assert time.monotonic() - start < 5
    assert [str(a) for a in address.resolve("10.0.0.1", 0.2)] == ["10.0.0.1"], "a literal asks nobody"


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("::1", "loopback"),
        ("[::1]", "loopback"),
        ("localhost", "loopback"),
        ("127.0.0.1", "loopback"),
        ("169.254.3.4", "link-local"),
        ("fe80::1", "link-local"),
        ("0.0.0.0", "not the address of a machine"),
        ("::", "not the address of a machine"),
        ("224.0.0.9", "not the address of a machine"),
        ("255.255.255.255", "not the address of a machine"),
        ("::ffff:255.255.255.255", "not the address of a machine"),
        ("no-such-host.invalid", "does not resolve"),
        ("not a host", "not a host name"),
        ("10.1", "not a host name"),
    ],
)
def test_addresses_no_peer_can_use(host: str, said: str) -> None:
    assert said in address.judge_announce(host, hosts=2, limit=10).problem


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1", "[::1]"])
def test_loopback_is_fine_on_one_host(host: str) -> None:
    assert address.judge_announce(host, hosts=1, limit=10) == address.Judgement()


def test_own_address_is_fine_unless_it_is_loopback() -> None:
    own = address.own_address()
    assert address.literal(own) is not None
    judged = address.judge_announce(own, hosts=2, limit=10)
    assert (judged.problem == "") == (not address.is_loopback(own))


def test_the_broadcast_address_of_an_own_network(monkeypatch: pytest.MonkeyPatch) -> None:
    lan = SimpleNamespace(family=socket.AF_INET, address="10.1.0.7", broadcast="10.1.255.255")
    alone = SimpleNamespace(family=socket.AF_INET, address="10.2.0.7", broadcast="10.2.0.7")  # a /32
    loopback = SimpleNamespace(family=socket.AF_INET, address="127.0.0.1", broadcast=None)
    monkeypatch.setattr(address, "_net_if_addrs", lambda: {"eth0": [lan], "eth1": [alone], "lo": [loopback]})
    said = address.judge_announce("10.1.255.255", hosts=1, limit=1).problem
    assert said == "10.1.255.255 is not the address of a machine"
    for host in ("10.1.0.7", "10.2.0.7"):
        assert address.judge_announce(host, hosts=2, limit=1) == address.Judgement()


@pytest.mark.parametrize("dead", ["127.0.0.2", "192.0.2.1"], ids=["refuses", "is silent"])
def test_every_address_of_a_name_is_dialled(monkeypatch: pytest.MonkeyPatch, dead: str) -> None:
    both = (ipaddress.ip_address(dead), ipaddress.ip_address("127.0.0.1"))
    monkeypatch.setattr(address, "resolve", lambda host, limit: both)
    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = HostPort("two-addresses", server.getsockname()[1])
        assert address.dial(endpoint, 1.0) == ""
    said = address.dial(endpoint, 1.0)
    assert said.startswith(f"two-addresses:{endpoint.port}")
    assert time.monotonic() - began < 3


def test_doubts(monkeypatch: pytest.MonkeyPatch) -> None:
    table: dict[Any, str] = {
        address.literal("172.17.0.1"): "docker0",
        address.literal("172.18.0.1"): "br-0a1b2c3d4e5f",
        address.literal("10.0.0.1"): "br-lan",
    }
    monkeypatch.setattr(address, "_interfaces", lambda: table)
    assert "docker0" in address.judge_announce("172.17.0.1", hosts=2, limit=1).doubt
    assert "br-0a1b2c3d4e5f" in address.judge_announce("172.18.0.1", hosts=2, limit=1).doubt
    assert address.judge_announce("10.0.0.1", hosts=2, limit=1) == address.Judgement()
    assert "not an address of this machine" in address.judge_announce("10.9.9.9", hosts=2, limit=1).doubt
