"""The job's TransferQueue: brought up once by the driver, attached to by every worker, closed by the driver.

The config has the shape of the host's controller: a live sampler object, polling mode, the unit count of SimpleStorage
and no ``storage_backend`` key. With no flag of the plugin set, not a line of the plugin runs here.
"""

from __future__ import annotations

import sys
from typing import Any

from relax_tq_rdma.errors import StartError
from relax_tq_rdma.settings import Settings

_CONTROLLER = ("TransferQueueController", "transfer_queue")


def start(settings: Settings, samples_per_prompt: int, storage_units: int) -> Any:
    """Bring the data system up from the driver; returns the config that workers attach with.

    Raises:
        StartError: another job's controller holds the name, or the start path gave up.
    """
    import transfer_queue as tq

    if settings.touches_nothing:
        _refuse_foreign_controller()
    else:
        import relax_tq_rdma

        relax_tq_rdma.install(settings)
    conf = _host_config(samples_per_prompt, storage_units)
    return tq.init(conf=conf) or conf


def attach(tq_config: Any, with_plugin: bool) -> Any:
    """Join from a worker process; returns the client."""
    import transfer_queue as tq

    if with_plugin:
        import relax_tq_rdma

        relax_tq_rdma.install()
    tq.init(tq_config)
    return tq.get_client()


def close() -> None:
    """Close what :func:`start` brought up, as far as it came: client, storage, controller."""
    tq = sys.modules.get("transfer_queue")
    if tq is not None:
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
