"""The job's TransferQueue: brought up once by the driver, attached to by every worker, closed by the driver.

The config has the shape of the host's controller: a live sampler object, polling mode, the unit count of SimpleStorage
and no ``storage_backend`` key. With no flag of the plugin set, ``install`` only prints the start line.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import relax_tq_rdma
from relax_tq_rdma.compat import HostFacts
from relax_tq_rdma.errors import StartError
from relax_tq_rdma.settings import Settings
from relax_tq_rdma.transport import gcs
from relax_tq_rdma.transport.report import Decision

_CONTROLLER = ("TransferQueueController", "transfer_queue")


@dataclass(frozen=True)
class DataSystem:
    """``config`` is what workers attach with, ``summary_line`` the start line."""

    config: Any
    decision: Decision
    summary_line: str


def start(settings: Settings, host: HostFacts, samples_per_prompt: int) -> DataSystem:
    """Bring the data system up from the driver, after :func:`relax_tq_rdma.install`.

    Raises:
        StartError: another job's controller holds the name, or the start path gave up.
    """
    import transfer_queue as tq

    if settings.touches_nothing:
        _refuse_foreign_controller()
    relax_tq_rdma.install(settings, host=host)
    conf = _host_config(samples_per_prompt, host.num_data_storage_units or 1)
    conf = tq.init(conf=conf) or conf
    decision = relax_tq_rdma.current_decision()
    assert decision is not None, "this process is the driver, and its init has returned"
    return DataSystem(conf, decision, relax_tq_rdma.current_start_line())


def attach(tq_config: Any, with_plugin: bool) -> Any:
    """Join from a worker process; returns the client."""
    import transfer_queue as tq

    if with_plugin:
        relax_tq_rdma.install()
    tq.init(tq_config)
    return tq.get_client()


def leave() -> None:
    """Close a worker's own client. Only with the plugin: upstream's ``close`` kills the controller from anywhere."""
    import transfer_queue as tq

    tq.close()


def close(settings: Settings) -> None:
    """Close what :func:`start` brought up, as far as it came: client, storage, controller, and the job's master."""
    tq = sys.modules.get("transfer_queue")
    if tq is None or (settings.touches_nothing and gcs.why_silent()):
        return  # nothing was begun; or upstream's own close would call actors of a Ray that is gone, without an end
    tq.close()


def _host_config(samples_per_prompt: int, storage_units: int) -> Any:
    from omegaconf import OmegaConf
    from transfer_queue import GRPOGroupNSampler

    return OmegaConf.create(
        {
            "controller": {
                "sampler": GRPOGroupNSampler(n_samples_per_prompt=samples_per_prompt),
                "polling_mode": True,
            },
            "backend": {"SimpleStorage": {"num_data_storage_units": storage_units}},
        },
        flags={"allow_objects": True},
    )


def _refuse_foreign_controller() -> None:
    """``transfer_queue.init`` would attach to another job's controller, and ``close`` would then kill it."""
    import ray

    try:
        ray.get_actor(*_CONTROLLER)
    except ValueError:
        return
    raise StartError(
        "this Ray cluster already runs a TransferQueue (actor TransferQueueController): end that job first, or leave "
        "out --ray-address so that the demo starts its own Ray"
    )
