"""The start path's port on a Ray cluster: agents and TransferQueue's actors are Ray's."""

from __future__ import annotations

from collections.abc import Mapping

import ray

from relax_tq_rdma.transport import agents, controller, gcs
from relax_tq_rdma.transport.agents import Agents, Node
from relax_tq_rdma.transport.controller import View
from relax_tq_rdma.transport.driver_port import DriverPort
from relax_tq_rdma.transport.port import Problem


class RayPort(DriverPort):
    """See :class:`relax_tq_rdma.transport.driver_port.DriverPort`."""

    runner = "Ray"

    def alive_nodes(self) -> dict[str, Node]:
        return agents.alive_nodes()

    def own_node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def open_agents(self, nodes: Mapping[str, Node]) -> Agents:
        return Agents(nodes)

    def look(self, limit: float) -> View:
        return controller.look(limit, self._job)

    def kill_controller(self, limit: float) -> Problem | None:
        return controller.kill(limit)

    def named_actors(self) -> set[str]:
        return controller.own_named_actors()

    def kill_named(self, names: set[str], limit: float) -> Problem | None:
        return controller.kill_named(names, limit)

    def why_silent(self) -> str:
        return gcs.why_silent()

    def shortage(self) -> str:
        return controller.shortage()
