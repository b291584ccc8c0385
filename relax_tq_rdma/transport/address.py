"""Host names and addresses: the one place that knows IPv6, brackets and ports (FC-18).

Mooncake accepts any host text at set-up and fails at first use on another node, so everything is judged here first.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

from relax_tq_rdma.errors import UsageError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_LIMITED_BROADCAST = ipaddress.IPv4Address("255.255.255.255")

_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")
_BRIDGES = re.compile(r"(docker|virbr|cni|lxcbr|podman|br-[0-9a-f]{12}$)")
"""Interfaces that container engines make on every host, with the same address on each: useless to a peer."""


@dataclass(frozen=True)
class HostPort:
    """An endpoint. ``host`` is bare: an IPv6 address carries no brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return join(self.host, self.port)


def parse_host(text: str) -> str:
    """A host as people write it (``10.0.0.1``, ``node1``, ``::1``, ``[::1]``), without brackets.

    Raises:
        UsageError: it is neither an address nor a host name.
    """
    host = text.strip()
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        if ":" not in host:
            raise UsageError(f"{text!r} is not a host: brackets are for IPv6 addresses")
    if literal(host) is not None:
        return host
    # Digits and dots only is a mistyped address; resolvers read it in surprising ways ("10.1" is 10.0.0.1).
    if len(host) > 253 or not _NAME.fullmatch(host) or re.fullmatch(r"[\d.]+", host):
        raise UsageError(f"{text!r} is not a host name or IP address")
    return host


def parse(text: str) -> HostPort:
    """Read ``host:port``; an IPv6 host needs brackets.

    Raises:
        UsageError: no port, a port outside 1-65535, or a bad host; the message shows the right form.
    """
    clean = text.strip()
    host, colon, port = clean.rpartition(":")
    if not colon or not host or (host.startswith("[") and not host.endswith("]")):
        raise UsageError(f"{text!r} is not HOST:PORT (an IPv6 host goes in brackets: [::1]:50051)")
    if ":" in host and not host.startswith("["):
        raise UsageError(f"{text!r} is ambiguous: write an IPv6 host in brackets, as in [::1]:50051")
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise UsageError(f"{text!r}: the port must be a number from 1 to 65535")
    return HostPort(parse_host(host), int(port))


def join(host: str, port: int) -> str:
    """``host:port``, brackets around IPv6."""
    host = parse_host(host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def literal(host: str) -> Address | None:
    """The IP address ``host`` is, or ``None`` for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """True for loopback addresses and the names reserved for them (RFC 6761); nothing is resolved."""
    address = literal(host)
    if address is None:
        name = host.rstrip(".").lower()
        return name in ("localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback") or name.endswith(
            ".localhost"
        )
    return _plain(address).is_loopback


def resolve(host: str, limit: float) -> tuple[Address, ...]:
    """Addresses of a host, within ``limit`` seconds.

    Raises:
        OSError: the name does not resolve; ``TimeoutError`` (an ``OSError``) when the resolver does not answer.
    """
    address = literal(host)
    if address is not None:
        return (address,)
    outcome: list[tuple[Address, ...] | OSError] = []

    def look_up() -> None:
        try:
            infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            outcome.append(tuple(dict.fromkeys(ipaddress.ip_address(info[4][0]) for info in infos)))
        except UnicodeError as exc:
            outcome.append(OSError(f"not a host name: {exc}"))
        except OSError as exc:
            outcome.append(exc)

    # getaddrinfo has no deadline of its own; a daemon thread may be left behind, it holds nothing.
    thread = threading.Thread(target=look_up, daemon=True, name="resolve")
    thread.start()
    thread.join(limit)
    if not outcome:
        raise TimeoutError(f"the resolver did not answer within {limit:g} s")
    result = outcome[0]
    if isinstance(result, OSError):
        raise result
    return result


def dial(endpoint: HostPort, limit: float) -> str:
    """Why nothing answers at ``endpoint``; empty when a TCP connection opens within ``limit`` seconds.

    A name may have several addresses, of which a service often listens on one: they are tried in turn, each for its
    share of the time that is left.
    """
    ends = time.monotonic() + limit
    try:
        targets = resolve(endpoint.host, limit)
    except OSError as exc:
        return _why(endpoint, exc, limit)
    failures = []
    for tried, target in enumerate(targets):
        share = max(0.1, (ends - time.monotonic()) / (len(targets) - tried))
        try:
            socket.create_connection((str(target), endpoint.port), timeout=share).close()
            return ""
        except OSError as exc:
            failures.append(_why(endpoint, exc, limit))
    return failures[0]


def _why(endpoint: HostPort, exc: OSError, limit: float) -> str:
    if isinstance(exc, TimeoutError):
        return f"{endpoint} does not answer within {limit:g} s"
    return f"{endpoint}: {(exc.strerror or str(exc)).lower()}"


def own_address() -> str:
    """The address this node would use towards others (no packet is sent); loopback when it has no route out."""
    for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return "127.0.0.1"


@dataclass(frozen=True)
class Judgement:
    """What is wrong with an announce address: ``problem`` (unusable) or ``doubt`` (may work); both empty when fine."""

    problem: str = ""
    doubt: str = ""


def judge_announce(host: str, *, hosts: int, limit: float) -> Judgement:
    """Judge the address a node announces to its peers.

    Args:
        host: the address or name.
        hosts: machines of the job; loopback is fine when it is one.
        limit: seconds the resolver may take.
    """
    try:
        host = parse_host(host)
    except UsageError as exc:
        return Judgement(problem=str(exc))
    try:
        addresses = [_plain(address) for address in resolve(host, limit)]
    except OSError as exc:
        return Judgement(problem=f"{host} does not resolve ({exc.strerror or exc})")
    for address in addresses:
        shown = host if literal(host) else f"{host} ({address})"
        if address.is_unspecified or address.is_multicast or address in _broadcasts():
            return Judgement(problem=f"{shown} is not the address of a machine")
        if hosts > 1 and (address.is_loopback or is_loopback(host)):
            return Judgement(problem=f"{shown} is loopback: no other node can reach it")
        if hosts > 1 and address.is_link_local:
            return Judgement(problem=f"{shown} is link-local: not routable between nodes")
    if hosts > 1:
        return Judgement(doubt=_local_doubt(addresses))
    return Judgement()


def _local_doubt(addresses: list[Address]) -> str:
    interfaces = _interfaces()
    names = {interfaces.get(address) for address in addresses}
    if interfaces and names == {None}:
        return f"{addresses[0]} is not an address of this machine"
    bridge = next((name for name in names if name and _BRIDGES.match(name)), None)
    return f"{addresses[0]} belongs to {bridge}, a container bridge that every host has" if bridge else ""


def _broadcasts() -> set[Address]:
    """Addresses of everybody at once: the limited one, and those of the networks this machine is in."""
    known = (literal(entry.broadcast or "") for entries in _net_if_addrs().values() for entry in entries)
    # An interface whose network is a single address names that one here too.
    return ({address for address in known if address is not None} - _interfaces().keys()) | {_LIMITED_BROADCAST}


def _interfaces() -> dict[Address, str]:
    found: dict[Address, str] = {}
    for name, entries in _net_if_addrs().items():
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                address = literal(entry.address.split("%")[0])
                if address is not None:
                    found[address] = name
    return found


def _net_if_addrs() -> dict[str, list[Any]]:
    import psutil

    try:
        table: dict[str, list[Any]] = psutil.net_if_addrs()
    except OSError:  # a sandbox may forbid the question: then nothing is doubted
        return {}
    return table


def _plain(address: Address) -> Address:
    """An IPv4-mapped IPv6 address as the IPv4 one it stands for."""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
