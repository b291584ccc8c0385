"""The agent of a node: imports what is slow once, then forks a process for each connection.

    python -m tests.rdma.agent [--listen ADDRESS:PORT]

The token in ``RTQ_RDMA_TOKEN`` is the first thing a connection must send, so set the same one on every node. A forked
process does the duties of :mod:`tests.rdma.duties` and ends with its connection, or with the agent.

Forking is safe here because the agent itself has no store client, no socket of TransferQueue and no other thread.
"""

from __future__ import annotations

import argparse
import ctypes
import hmac
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.rdma.channel import serve

PORT = 18700
_HELLO_SECONDS = 10.0
_PR_SET_PDEATHSIG = 1


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.rdma.agent")
    parser.add_argument("--listen", default=f"0.0.0.0:{PORT}", help="ADDRESS:PORT (default: %(default)s)")
    host, _, port = parser.parse_args().listen.rpartition(":")
    token = os.environ.get("RTQ_RDMA_TOKEN", "")
    if len(token) < 16:
        sys.exit("RTQ_RDMA_TOKEN must hold a secret of at least 16 characters, the same one on every node")
    began = time.monotonic()
    from tests.rdma import duties

    duties.preload()
    with socket.create_server((host, int(port)), backlog=16) as server:
        print(f"agent: ready on port {port} after {time.monotonic() - began:.0f} s", flush=True)
        _accept(server, token, duties.DUTIES)


def _accept(server: socket.socket, token: str, duties: Any) -> None:
    children: dict[int, int | None] = {}  # pid to exit status, None while it runs
    while True:
        connection, _ = server.accept()
        _reap(children)
        connection.settimeout(_HELLO_SECONDS)
        try:
            hello = json.loads(_line(connection))
            if not hmac.compare_digest(str(hello["token"]), token):
                raise ValueError("wrong token")
        except (OSError, ValueError, KeyError, TypeError):
            connection.close()
            continue
        connection.settimeout(None)
        if "signal" in hello:  # only ever for a process of this agent
            pid = int(hello["pid"])
            if children.get(pid, 0) is None:
                os.kill(pid, int(hello["signal"]))
            connection.sendall(json.dumps({"status": children.get(pid, 0)}).encode() + b"\n")
            connection.close()
            continue
        pid = os.fork()
        if pid == 0:
            server.close()
            _be_a_process(connection, hello, duties)
        children[pid] = None
        connection.close()


def _be_a_process(connection: socket.socket, hello: dict[str, Any], duties: Any) -> None:
    """The forked process: answer, and end with the connection."""
    from tests.rdma.duties import at_end

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    os.environ.update(hello.get("environment", {}))
    if hello.get("name"):
        threading.Thread(target=_serve_by_name, args=(Path(hello["name"]), duties), daemon=True).start()
    connection.sendall(json.dumps({"pid": os.getpid()}).encode() + b"\n")
    serve(connection, duties)
    at_end()
    os._exit(0)


def _serve_by_name(path: Path, duties: Any) -> None:
    """Also answer whoever finds this process by its name, a socket in a folder of this node."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        while True:
            connection, _ = server.accept()
            threading.Thread(target=serve, args=(connection, duties), daemon=True).start()


def _line(connection: socket.socket) -> bytes:
    """Up to the first newline, byte by byte: what follows belongs to the forked process."""
    line = b""
    while not line.endswith(b"\n") and len(line) < 65536:
        byte = connection.recv(1)
        if not byte:
            break
        line += byte
    return line


def _reap(children: dict[int, int | None]) -> None:
    for pid, status in children.items():
        if status is None:
            ended, code = os.waitpid(pid, os.WNOHANG)
            children[pid] = os.waitstatus_to_exitcode(code) if ended else None


if __name__ == "__main__":
    main()
