"""The nodes of a run as the tests see them: where their agents listen, and the processes they have started there."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.rdma.agent import PORT
from tests.rdma.channel import Caller, Gone

_CONNECT_SECONDS = 5.0
_HELLO_SECONDS = 60.0
"""For the agent to fork, with all that it has imported, under emulation."""


@dataclass(frozen=True)
class TestNode:
    """One node: its name, the address its data plane announces, and where its agent listens (``control``: by default
    the same address)."""

    __test__ = False

    name: str
    address: str
    port: int = PORT
    control: str = ""

    def process(self, *, name: str = "", environment: Mapping[str, str] | None = None) -> Process:
        """A new process there. ``name``: path of a socket by which others of the node find it."""
        return Process(self, name, environment or {})

    def await_agent(self, limit: float) -> None:
        """Wait until the agent has imported all it needs.

        Raises:
            TimeoutError: it did not get ready.
        """
        ends = time.monotonic() + limit
        while True:
            try:
                socket.create_connection(self.agent, timeout=_CONNECT_SECONDS).close()
                return
            except OSError as exc:
                if time.monotonic() > ends:
                    raise TimeoutError(
                        f"no agent of {self.name} at {self.agent[0]}:{self.port} after {limit:g} s ({exc}): see its log"
                    ) from None
                time.sleep(0.2)

    @property
    def agent(self) -> tuple[str, int]:
        return self.control or self.address, self.port

    def plain(self) -> dict[str, Any]:
        return {"name": self.name, "address": self.address, "port": self.port, "control": self.control}


class Process(Caller):
    """A process on a node. A context manager: with the block it ends, and whatever it has started with it."""

    def __init__(self, node: TestNode, name: str, environment: Mapping[str, str]) -> None:
        self.node = node
        connection = _connect(node, {"name": name, "environment": dict(environment)})
        self.pid = int(json.loads(_line(connection))["pid"])
        connection.settimeout(None)
        super().__init__(connection, f"process {self.pid} of {node.name}")

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def kill(self) -> None:
        """SIGKILL; returns when it is sent."""
        self.signal(signal.SIGKILL)

    def signal(self, number: int) -> None:
        """Send a signal, by way of the agent that has started the process."""
        with _connect(self.node, {"pid": self.pid, "signal": int(number)}) as connection:
            assert json.loads(_line(connection))["status"] is None, f"{self.name} is gone already"

    def exit_status(self, limit: float) -> int:
        """Wait for its end; the status, negative for a signal.

        Raises:
            TimeoutError: it runs on.
        """
        ends = time.monotonic() + limit
        while True:
            with _connect(self.node, {"pid": self.pid, "signal": 0}) as connection:
                status = json.loads(_line(connection))["status"]
            if status is not None:
                return int(status)
            if time.monotonic() > ends:
                raise TimeoutError(f"{self.name} still runs after {limit:g} s")
            time.sleep(0.2)


def named(path: str) -> Caller:
    """Call a process of this node by its name.

    Raises:
        FileNotFoundError: there is none of that name.
        Gone: it has died.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
    except ConnectionRefusedError:
        connection.close()
        raise Gone(f"the process named {path} has died") from None
    except OSError:
        connection.close()
        raise
    return Caller(connection, os.path.basename(path))


def _connect(node: TestNode, hello: dict[str, Any]) -> socket.socket:
    connection = socket.create_connection(node.agent, timeout=_CONNECT_SECONDS)
    connection.settimeout(_HELLO_SECONDS)
    connection.sendall(json.dumps({"token": os.environ["RTQ_RDMA_TOKEN"], **hello}).encode() + b"\n")
    return connection


def _line(connection: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte:
            raise Gone("the agent has closed the connection: is RTQ_RDMA_TOKEN the same on both sides?")
        line += byte
    return line
