"""Who reaches whom: every node listens on the address it announces, the others dial it, both ways (RFC §4.2.3).

A loopback pass proves nothing, and one direction says nothing about the other: a node behind NAT, with a firewall or
with a wrong announce address can dial out and cannot be dialled.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from relax_tq_rdma import env
from relax_tq_rdma.transport.address import literal, parse_host
from relax_tq_rdma.transport.report import Check

_ALL_PAIRS = 16
_SHOWN = 4
_FIX = f"set {env.LOCAL_HOSTNAME.name} on that node to an address its peers can reach, and open its ports to them"


class Listening(msgspec.Struct, frozen=True, kw_only=True):
    """A node's listener: the address it announces, its port, and the words by which a caller knows it."""

    host: str
    port: int
    token: str


class Listener:
    """Accepts and greets until closed. Binds the announced address, or every address where that is not a local one
    (it may be translated on the way: the dial shows)."""

    def __init__(self, host: str) -> None:
        self._socket = _bind(host)
        self.listening = Listening(host=host, port=self._socket.getsockname()[1], token=secrets.token_hex(8))
        threading.Thread(target=self._serve, daemon=True, name="reachability").start()

    def close(self) -> None:
        # shutdown wakes the thread in accept; close alone leaves it there.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                caller, _ = self._socket.accept()
            except OSError:
                return
            with contextlib.suppress(OSError), caller:
                caller.sendall(self.listening.token.encode())


def dial(targets: Mapping[str, Listening], seconds: float) -> dict[str, str]:
    """Connect to every target at once. Returns why each was not reached; empty: reached, and it was the right one."""
    if not targets:
        return {}
    with ThreadPoolExecutor(min(len(targets), 32), thread_name_prefix="dial") as pool:
        return dict(zip(targets, pool.map(lambda target: _dial(target, seconds), targets.values()), strict=True))


def partners(index: int, size: int) -> list[int]:
    """Whom a node dials. In a small job everybody; in a large one those 1, 2, 4, ... places away on both sides, so that
    every node is dialled from many sides and the work stays n log n."""
    if size <= _ALL_PAIRS + 1:
        return [i for i in range(size) if i != index]
    steps = [2**k for k in range(size.bit_length()) if 2**k < size]
    return sorted({(index + sign * step) % size for step in steps for sign in (1, -1)} - {index})


def judge(names: Mapping[str, str], dialled: Mapping[str, Mapping[str, str]]) -> dict[str, Check]:
    """One check for each node that dialled or was dialled.

    Args:
        names: node id to the name shown.
        dialled: caller's id to (target's id to reason, empty when reached).

    A node that none of its callers reaches, or that reaches none of its targets, is to blame for those failures; any
    other failure is laid at both ends.
    """
    calls = [(a, b, why) for a, found in dialled.items() for b, why in found.items()]
    into, out_of = _grouped((b, not why) for _, b, why in calls), _grouped((a, not why) for a, _, why in calls)
    blamed = {node for reached in (into, out_of) for node, successes in reached.items() if not any(successes)}
    by: dict[str, list[tuple[str, str]]] = {}
    to: dict[str, list[tuple[str, str]]] = {}
    for a, b, why in calls:
        for end in ({a, b} & blamed or {a, b}) if why else ():
            (to if end == a else by).setdefault(end, []).append((names[b if end == a else a], why))
    checks = {}
    for node in into.keys() | out_of.keys():
        parts = [f"{_shown(by[node])} cannot reach it ({by[node][0][1]})"] if node in by else []
        parts += [f"it cannot reach {_shown(to[node])} ({to[node][0][1]})"] if node in to else []
        counts = f"reaches {len(out_of.get(node, []))} peers and is reached by {len(into.get(node, []))}"
        checks[node] = Check(
            name="reachability",
            status="missing" if parts else "ok",
            evidence="; ".join(parts) or counts,
            fix=_FIX if parts else "",
        )
    return checks


def _grouped(pairs: Iterable[tuple[str, bool]]) -> dict[str, list[bool]]:
    grouped: dict[str, list[bool]] = {}
    for node, value in pairs:
        grouped.setdefault(node, []).append(value)
    return grouped


def _shown(failures: Sequence[tuple[str, str]]) -> str:
    more = f" and {len(failures) - _SHOWN} more" if len(failures) > _SHOWN else ""
    return ", ".join(name for name, _ in failures[:_SHOWN]) + more


def _bind(host: str) -> socket.socket:
    host = parse_host(host)
    address = literal(host)
    family = socket.AF_INET6 if address is not None and address.version == 6 else socket.AF_INET
    for where in (host, "::" if family == socket.AF_INET6 else "0.0.0.0"):
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            bound.bind((where, 0))
            bound.listen(128)
            return bound
        except OSError:
            bound.close()
    raise OSError(f"no server can listen on this node for {host}")


def _dial(target: Listening, seconds: float) -> str:
    try:
        with socket.create_connection((target.host, target.port), timeout=seconds) as connection:
            said = connection.makefile("rb").read(64).decode("ascii", "replace")
    except OSError as exc:
        return "timed out" if isinstance(exc, TimeoutError) else exc.strerror or str(exc)
    return "" if said == target.token else "something else answers there"
