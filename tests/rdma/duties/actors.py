"""What Ray's actors do for a real job, and servers that no job owns."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from tests.rdma.duties.state import STATE

_AGENT_METHODS = ("probe", "listen", "dial", "peers")


def as_agent(method: str, arguments: list[Any]) -> Any:
    """What a ``NodeAgent`` of the start path does on its node."""
    from relax_tq_rdma.transport.agents import NodeAgent

    assert method in _AGENT_METHODS
    agent = STATE.setdefault("agent", NodeAgent())
    return getattr(agent, method)(*arguments)


def serve_controller() -> dict[str, Any]:
    from relax_tq_rdma.seams import tq_bare

    STATE["controller"], server = tq_bare.controller()
    return {"id": server.id, "ip": server.ip, "ports": dict(server.ports)}


def serve_storage_unit() -> dict[str, Any]:
    from relax_tq_rdma.seams import tq_bare

    STATE["unit"], server = tq_bare.storage_unit()
    return {"id": server.id, "ip": server.ip, "ports": dict(server.ports)}


def store_controller_config(conf: dict[str, Any]) -> None:
    STATE["controller"].store_config(conf)


def controller_config() -> Any:
    controller = STATE.get("controller")
    return controller.get_config() if controller is not None else None


def serve_master(address: str, flags: dict[str, Any]) -> str:
    """A master that no job owns, with flags of the test's choice; it ends with this process."""
    from tests.mooncake import MooncakeMaster

    log = Path(os.environ.get("RTQ_RDMA_RESULTS", "/tmp")) / "master.log"
    STATE["master"] = MooncakeMaster(log, rpc_address=address, **flags)
    return f"{address}:{STATE['master'].rpc_port}"


def accept_and_say_nothing(address: str) -> int:
    """Listen, take every connection, and never answer; returns the port."""
    server = STATE["silent"] = socket.create_server((address, 0), backlog=64)
    return int(server.getsockname()[1])
