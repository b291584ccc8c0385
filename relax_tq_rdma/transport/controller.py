"""The named controller of TransferQueue, looked at and removed without ever waiting for good (RFC F10, FC-12, FC-13).

``transfer_queue.init`` attaches to any actor of that name and then asks for its config without an end. So whoever wants
to init or attach looks first: a config that never comes, a constructor that never finishes and an actor that died are
three different things, and none of them is a healthy controller of somebody else.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError

from relax_tq_rdma.errors import StartError
from relax_tq_rdma.section import read_section
from relax_tq_rdma.transport import placement
from relax_tq_rdma.transport.port import Controller, Problem

NAME = "TransferQueueController"
NAMESPACE = "transfer_queue"
STORAGE_PREFIX = "TransferQueueStorageUnit#"
_POLL_SECONDS = 0.05
_ASK_SECONDS = 2.0


class View:
    """What was seen: ``state``, the ``reason`` in one sentence for the user, and the stored ``config`` when healthy."""

    def __init__(self, state: Controller, reason: str, config: Any = None) -> None:
        self.state = state
        self.reason = reason
        self.config = config


def look(limit: float, job: str = "") -> View:
    """Look at the named controller; wait at most ``limit`` seconds for an unfinished one to finish.

    Args:
        limit: grace time, seconds. A healthy controller answers at once.
        job: this job's token, to tell its controller from a stranger's.
    """
    ends = time.monotonic() + limit
    handle = find()
    if handle is None:
        return View(Controller.ABSENT, "there is no controller")
    if not hasattr(handle, "get_config"):
        return View(Controller.FOREIGN, "an actor of that name is not a controller of TransferQueue")
    answered = False
    while True:
        try:
            config = ray.get(handle.get_config.remote(), timeout=max(0.05, min(_ASK_SECONDS, ends - time.monotonic())))
            answered = True
        except ActorDiedError:
            return View(Controller.DEAD, "the controller has died and its name is still there")
        except (GetTimeoutError, RayActorError):
            config = None
        except Exception as exc:  # it runs and does not behave as ours would
            return View(Controller.FOREIGN, f"the controller's config cannot be read ({type(exc).__name__})")
        if config is not None:
            return judge(config, job)
        if time.monotonic() >= ends:
            return View(Controller.UNFINISHED, _why_unfinished(handle, answered, limit))
        time.sleep(_POLL_SECONDS if answered else 0)


def find() -> Any | None:
    """Handle of the named actor, or ``None``. It may be of an actor that is dead already."""
    try:
        return ray.get_actor(NAME, namespace=NAMESPACE)
    except ValueError:
        return None


def kill(limit: float) -> Problem | None:
    """Kill the named controller and wait until its name is really free: a kill is not done when it returns."""
    ends = time.monotonic() + limit
    while (handle := find()) is not None:
        if time.monotonic() > ends:
            return Problem(reason=f"actor {NAME!r} was killed and its name was not free after {limit:.0f} s")
        with contextlib.suppress(Exception):  # dead already, or dying: what counts is the name
            ray.kill(handle)
        time.sleep(_POLL_SECONDS)
    return None


def kill_named(names: set[str], limit: float) -> Problem | None:
    """Kill actors of this driver's own namespace by name and wait until the names are free."""
    ends = time.monotonic() + limit
    while left := names & own_named_actors():
        if time.monotonic() > ends:
            return Problem(reason=f"{len(left)} storage actors were killed and did not go within {limit:.0f} s")
        for name in left:
            with contextlib.suppress(Exception):
                ray.kill(ray.get_actor(name))
        time.sleep(_POLL_SECONDS)
    return None


def own_named_actors() -> set[str]:
    """Names of the living named actors in this driver's namespace."""
    return {str(name) for name in ray.util.list_named_actors(all_namespaces=False)}


def shortage() -> str:
    """The controller and this driver's storage units as far as Ray has not placed them, and the CPUs that are free, in
    words; empty when all have a process.

    Ray tells it only through its internal state; where that has changed, nothing is claimed.
    """
    try:
        from ray._private.state import state
        from ray.core.generated.gcs_pb2 import ActorTableData, ResourceUsageBatchData

        accessor = state._connect_and_get_accessor()
        actors = [ActorTableData.FromString(found) for found in accessor.get_actor_table(None, None)]
        nodes = ResourceUsageBatchData.FromString(accessor.get_all_resource_usage()).batch
        job = ray.get_runtime_context().get_job_id()
        return placement.unplaced(
            [
                actor.required_resources["CPU"]
                for actor in actors
                if _is_of_transfer_queue(actor, job) and not actor.pid and actor.state != ActorTableData.DEAD
            ],
            [placement.Cpus(node.resources_total["CPU"], node.resources_available["CPU"]) for node in nodes],
        )
    except Exception:
        return ""


def _is_of_transfer_queue(actor: Any, job: str) -> bool:
    is_controller = (actor.name, actor.ray_namespace) == (NAME, NAMESPACE)
    return is_controller or (actor.name.startswith(STORAGE_PREFIX) and actor.job_id.hex() == job)


def judge(config: Any, job: str) -> View:
    """What the config says that a healthy controller has stored: ours, or somebody else's."""
    try:
        backend = config["backend"]
        section, _ = read_section(backend[backend["storage_backend"]])
    except StartError as exc:
        return View(Controller.FOREIGN, str(exc), config)
    except (KeyError, TypeError, AttributeError, IndexError):
        return View(Controller.FOREIGN, "the controller's config has no backend section", config)
    if section is not None and job and section.job == job:
        return View(Controller.OURS, "the controller of this job", config)
    whose = f"job {section.job}" if section is not None else "a job that does not use relax-tq-rdma"
    return View(Controller.FOREIGN, f"a healthy controller of {whose}", config)


def _why_unfinished(handle: Any, answered: bool, limit: float) -> str:
    if answered:
        return f"the controller answers, but its config did not come within {limit:.0f} s: its init never finished"
    if _has_process(handle) is False:
        return f"the controller did not get a process within {limit:.0f} s: {shortage() or 'it cannot be scheduled'}"
    return f"the controller did not answer within {limit:.0f} s: its constructor has not finished"


def _has_process(handle: Any) -> bool | None:
    """Whether the actor was scheduled at all. Ray tells it only through its internal state; ``None``: it does not."""
    try:
        from ray._private import state

        return bool(state.actors(handle._actor_id.hex())["Pid"])
    except Exception:
        return None
