"""Joining a running data plane from a worker: bounded, proven before native code runs, never creating anything.

``transfer_queue.init`` attaches to any actor of the right name, waits for its config without an end, ignores the config
it was given, and creates a controller when there is none (RFC F10, contract §13). So a worker looks first.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from relax_tq_rdma import env
from relax_tq_rdma.errors import StartError
from relax_tq_rdma.section import JobSection, read_section
from relax_tq_rdma.transport.port import Controller
from relax_tq_rdma.transport.report import RdmaDevice

_WAYS_OUT = {
    Controller.ABSENT: "start the driver first; a worker never creates a controller, and a job that has ended has none",
    Controller.UNFINISHED: "the start of the driver has failed or still runs: wait for it, or restart the job",
    Controller.DEAD: "restart the job",
    Controller.FOREIGN: "give this worker the TransferQueue config of the job that runs now",
}


def section_of(conf: Any) -> JobSection | None:
    """The plugin's section of a TransferQueue config; ``None`` without one, and for a config that is not complete.

    Raises:
        StartError: there is one that cannot be read.
    """
    try:
        backend = conf["backend"]
        return read_section(backend[backend["storage_backend"]])[0]
    except (KeyError, TypeError, AttributeError, IndexError):
        return None


def is_running(job: str, limit: float = 2.0) -> bool:
    """Whether the cluster's controller is the one of this job."""
    from relax_tq_rdma.transport import controller

    return controller.look(limit, job).state is Controller.OURS


def running_section(limit: float = 2.0) -> JobSection | None:
    """The section of the job whose controller runs in this cluster; ``None`` when that job does not use the plugin."""
    from relax_tq_rdma.transport import controller

    return section_of(controller.look(limit).config)


def prove(section: JobSection, limit: float) -> None:
    """Prove within ``limit`` seconds that this process can join the job.

    The controller is there, healthy and of this job; with Mooncake, a client in a child process that can be killed has
    set up and talked to the master.

    Raises:
        StartError: it cannot; the message says why and what to do.
    """
    from relax_tq_rdma.transport import controller

    ends = time.monotonic() + limit
    seen = controller.look(limit, section.job)
    if seen.state is not Controller.OURS:
        raise StartError(f"this process cannot join job {section.job}: {seen.reason}: {_WAYS_OUT[seen.state]}")
    if section.decision.backend == "MooncakeStore":
        _shake_hands(section, max(1.0, ends - time.monotonic()))


def own_devices(names: str) -> tuple[RdmaDevice, ...]:
    """The RDMA devices of this node among ``names``, judged here: a GID index may differ from node to node (FC-01)."""
    from relax_tq_rdma.transport.hca import parse_request
    from relax_tq_rdma.transport.rdma_checks import check_rdma
    from relax_tq_rdma.transport.sysfs import Tree

    tree = Tree(Path(env.SYSTEM_ROOT.read()))
    return check_rdma(tree, parse_request(names), os.environ, largest_region=0, splits_regions=True)[1]


def _shake_hands(section: JobSection, limit: float) -> None:
    import ray

    from relax_tq_rdma.transport.native import PeerRequest, metadata_url
    from relax_tq_rdma.transport.peer import run_peer

    decision = section.decision
    rdma = decision.protocol == "rdma"
    request = PeerRequest(
        mode="handshake",
        master=section.master,
        hostname=env.LOCAL_HOSTNAME.read() or ray.util.get_node_ip_address(),
        metadata_server=metadata_url(section.settings.mooncake_metadata_server),
        protocol="rdma" if rdma else "tcp",
        device=decision.device,
        devices=own_devices(decision.device) if rdma else (),
    )
    result = run_peer(request, limit)
    if result.reason:
        raise StartError(
            f"this process cannot join the store of job {section.job}: {result.reason} (check {result.check}): "
            "run relax-tq-rdma doctor on this node"
        )
