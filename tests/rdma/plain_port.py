"""The start path's port without Ray: agents, controller and storage units are plain processes of the test's agents.

Probe, decision, preflight, init, verification and cleanup are the product's own code (``DriverPort`` and everything
below it); what stands in for Ray is here: who starts a process on which node, and how the controller is found by name.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from importlib import resources
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from transfer_queue import interface
from transfer_queue.storage.bootstrap import StorageBootstrapProvider

from relax_tq_rdma.seams import tq_bare
from relax_tq_rdma.settings import Settings
from relax_tq_rdma.transport import controller
from relax_tq_rdma.transport.agents import Node, NodeAgents
from relax_tq_rdma.transport.driver_port import DriverPort
from relax_tq_rdma.transport.port import Controller, Problem
from tests.rdma.channel import Gone, RemoteError
from tests.rdma.nodes import Process, TestNode, named

NAMES = Path("/tmp/rtq-names")
"""One folder a cluster; in it one socket a named process. It is what Ray's actor names are to the real driver."""

_ACTOR_SECONDS = 60.0
_POLL_SECONDS = 0.05


class PlainAgents(NodeAgents):
    """One process of each node that does the work of a ``NodeAgent``."""

    def __init__(self, nodes: Mapping[str, Node], places: Mapping[str, TestNode]) -> None:
        self.nodes = dict(nodes)
        self._processes = {node_id: places[node_id].process() for node_id in nodes}

    def call(self, method: str, arguments: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
        return {
            node_id: self._processes[node_id].begin("as_agent", method=method, arguments=list(given))
            for node_id, given in arguments.items()
        }

    def gather(self, refs: Mapping[str, Future[Any]], limit: float) -> dict[str, Any]:
        ends = time.monotonic() + limit
        answers: dict[str, Any] = {}
        for node_id, future in refs.items():
            with contextlib.suppress(FutureTimeoutError, Gone):  # such a node is missing
                try:
                    answers[node_id] = future.result(max(0.0, ends - time.monotonic()))
                except RemoteError as exc:
                    answers[node_id] = exc
        return answers

    def close(self) -> None:
        processes, self._processes = self._processes, {}
        for process in processes.values():
            process.close()


class PlainPort(DriverPort):
    """See :class:`relax_tq_rdma.transport.driver_port.DriverPort`.

    Args:
        settings: the job's settings.
        job: the job's token.
        places: the nodes; the driver is on the first.
        cluster: what a Ray cluster is to the real driver: within one, there is one controller.
    """

    runner = "the plain runner"

    def __init__(self, settings: Settings, job: str, places: Sequence[TestNode], cluster: str) -> None:
        super().__init__(settings, job, self._plain_init, interface.close)
        self._places = {place.name: place for place in places}
        self._names = NAMES / cluster
        self._actors: dict[str, Process] = {}

    def alive_nodes(self) -> dict[str, Node]:
        return {name: Node(name=name, address=place.address) for name, place in self._places.items()}

    def own_node(self) -> str:
        return next(iter(self._places))

    def open_agents(self, nodes: Mapping[str, Node]) -> PlainAgents:
        return PlainAgents(nodes, self._places)

    def look(self, limit: float) -> controller.View:
        ends = time.monotonic() + limit
        while True:
            try:
                with contextlib.closing(named(str(self._names / controller.NAME))) as found:
                    conf = found.call("controller_config", max(0.5, limit))
            except FileNotFoundError:
                return controller.View(Controller.ABSENT, "there is no controller")
            except Gone:
                return controller.View(Controller.DEAD, "the controller has died and its name is still there")
            if conf is not None:
                return controller.judge(conf, self._job)
            if time.monotonic() >= ends:
                return controller.View(Controller.UNFINISHED, "the controller's config did not come in time")
            time.sleep(_POLL_SECONDS)

    def kill_controller(self, limit: float) -> Problem | None:
        return self.kill_named({controller.NAME}, limit)

    def named_actors(self) -> set[str]:
        return set(self._actors)

    def kill_named(self, names: set[str], limit: float) -> Problem | None:
        for name in names:
            actor, path = self._actors.pop(name, None), self._names / name
            if actor is not None:
                with contextlib.suppress(AssertionError, Gone, OSError):
                    actor.kill()
                actor.close()
            path.unlink(missing_ok=True)
        return None

    def _plain_init(self, conf: Any) -> Any:
        """``transfer_queue.init`` of a first process, with plain processes where it asks Ray for actors."""
        defaults = OmegaConf.load(resources.files("transfer_queue") / "config.yaml")
        merged = OmegaConf.merge(OmegaConf.create({}, flags={"allow_objects": True}), defaults, conf)
        merged.controller.zmq_info = _server_at(self._start(controller.NAME, self.own_node(), "serve_controller"))
        if merged.backend.storage_backend == "SimpleStorage":
            merged.backend.SimpleStorage.zmq_info = {
                f"{controller.STORAGE_PREFIX}{at}": _server_at(
                    self._start(f"{controller.STORAGE_PREFIX}{at}", place, "serve_storage_unit"), unit=True
                )
                for at, place in enumerate(self._places)
            }
        else:
            StorageBootstrapProvider.get_provider(merged.backend.storage_backend)(merged)
        self._actors[controller.NAME].call("store_controller_config", _ACTOR_SECONDS, conf=plain_conf(merged))
        join(merged)
        return merged

    def _start(self, name: str, place: str, duty: str) -> dict[str, Any]:
        path = self._names / name if place == self.own_node() else ""
        actor = self._actors[name] = self._places[place].process(name=str(path))
        served: dict[str, Any] = actor.call(duty, _ACTOR_SECONDS)
        return served


def plain_conf(conf: Any) -> dict[str, Any]:
    """A TransferQueue config as plain data: addresses of servers as dicts."""
    plain: dict[str, Any] = OmegaConf.to_container(conf)
    plain["controller"]["zmq_info"] = _plain_server(plain["controller"]["zmq_info"])
    units = plain["backend"]["SimpleStorage"].get("zmq_info") or {}
    plain["backend"]["SimpleStorage"]["zmq_info"] = {name: _plain_server(unit) for name, unit in units.items()}
    return plain


def conf_of(plain: dict[str, Any]) -> Any:
    """The reverse of :func:`plain_conf`."""
    conf = OmegaConf.create(plain, flags={"allow_objects": True})
    conf.controller.zmq_info = _server_at(plain["controller"]["zmq_info"])
    units = plain["backend"]["SimpleStorage"]["zmq_info"]
    conf.backend.SimpleStorage.zmq_info = {name: _server_at(unit, unit=True) for name, unit in units.items()}
    return conf


def join(conf: Any) -> Any:
    """What TransferQueue's ``init`` does last in every process: a client with its storage manager."""
    name = conf.backend.storage_backend
    client = tq_bare.client(f"rdma-{os.getpid()}", conf.controller.zmq_info, name, conf.backend[name])
    interface._TQ_CLIENT = client
    return client


def _server_at(plain: dict[str, Any], *, unit: bool = False) -> Any:
    made = tq_bare.storage_unit_at if unit else tq_bare.controller_at
    return made(plain["id"], plain["ip"], plain["ports"])


def _plain_server(server: Any) -> dict[str, Any]:
    return {"id": server.id, "ip": server.ip, "ports": dict(server.ports)}
