"""Ports for the servers of a job: outside the kernel's ephemeral range, leased against other jobs of this user (FC-17).

A port in the ephemeral range can be taken by any outgoing connection between the check and the bind. Outside of it only
servers compete: a lock file keeps our own jobs apart, a bind shows everybody else's. What remains is a stranger that
binds in the moment between check and use; the server then ends at once, and its starter tries other ports.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from relax_tq_rdma.errors import StartError

_PREFERRED = (range(20000, 32768), range(61000, 65536))
"""10002 to 19999 are Ray's default worker ports and hold Mooncake's own (12300 to 17000)."""


@dataclass
class PortLease:
    """A port nobody else of this user gets until :meth:`release`, or until the process that leased it ends."""

    port: int
    path: Path
    _fd: int = field(repr=False)

    def release(self) -> None:
        """Give the port back. Idempotent."""
        if self._fd >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1


def lease_port(host: str, folder: Path) -> PortLease:
    """Lease one port that can be bound on ``host``.

    Args:
        host: address the server will bind.
        folder: where lock files live; the run folder of this user and node.

    Raises:
        StartError: the address is not one of this node, or no port is free.
    """
    check_bindable(host)
    for port in _candidates():
        lease = _lock(folder / f"{port}.lock", port)
        if lease is None:
            continue
        if is_free(host, port):
            return lease
        lease.release()
    raise StartError(f"no free port on {host}: every port outside the kernel's ephemeral range is taken")


def check_bindable(host: str) -> None:
    """Raises:
    StartError: no server of this node can listen on ``host``.
    """
    try:
        with _bound(host, 0):
            pass
    except OSError as exc:
        raise StartError(
            f"cannot listen on {host} ({exc.strerror or exc}): it is not an address of this node; "
            "set RTQ_LOCAL_HOSTNAME to one that is"
        ) from None


def is_free(host: str, port: int) -> bool:
    """Whether a server could bind this port now."""
    try:
        with _bound(host, port):
            return True
    except OSError:
        return False


def ephemeral_range() -> range:
    """Ports the kernel hands out to outgoing connections."""
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()
        return range(int(low), int(high) + 1)
    except (OSError, ValueError):
        return range(32768, 61000)


def usable_ports(ephemeral: range, preferred: Sequence[range] = _PREFERRED) -> list[int]:
    """Ports to choose from. On a host whose ephemeral range covers everything, the preferred ones all the same."""
    every = [port for ports in preferred for port in ports]
    return [port for port in every if port not in ephemeral] or every


def _candidates() -> Iterator[int]:
    ports = usable_ports(ephemeral_range())
    random.Random().shuffle(ports)  # jobs of other users, whose locks are not ours to see, start elsewhere
    yield from ports


def _bound(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def _lock(path: Path, port: int) -> PortLease | None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Its last holder removes the file: a lock on a removed file keeps nobody out.
        if os.fstat(fd).st_ino == os.stat(path).st_ino:
            return PortLease(port, path, fd)
    except OSError:
        pass
    os.close(fd)
    return None
