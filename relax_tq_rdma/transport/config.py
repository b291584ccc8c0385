"""The TransferQueue config of a job: the caller's own, plus the decided backend and the plugin's section. Pure.

TransferQueue hands exactly one backend section to every storage manager, so that is where the decision travels.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf, flag_override

from relax_tq_rdma.section import KEY, JobSection
from relax_tq_rdma.transport.memory import client_sizes


def build_conf(conf: Mapping[str, Any] | DictConfig | None, section: JobSection) -> Any:
    """The config to give to ``transfer_queue.init``.

    Args:
        conf: the caller's config; it is not changed. Live objects in it (``controller.sampler``) are carried over as
            they are.
        section: what every process of the job must know: settings, decision, master.

    Returns:
        A new ``DictConfig`` (flag ``allow_objects``) with every key of the caller; or ``conf`` itself when no layer of
        the plugin is on.

    Raises:
        UsageError: an ``RTQ_*`` variable that holds a size is not one.
    """
    if section.settings.touches_nothing:
        return conf
    if isinstance(conf, DictConfig):
        built = copy.deepcopy(conf)  # leaf objects stay the same objects
    else:
        built = OmegaConf.create(dict(conf or {}), flags={"allow_objects": True})
    with flag_override(built, ["struct", "readonly", "allow_objects"], [False, False, True]):
        for backend in _mappings(built.get("backend")):
            backend.pop(KEY, None)  # of an earlier start whose config is used again
        name = section.decision.backend
        if name == "MooncakeStore":
            OmegaConf.update(built, f"backend.{name}", _mooncake(section))
        OmegaConf.update(built, "backend.storage_backend", name)
        OmegaConf.update(built, f"backend.{name}.{KEY}", section.to_dict())
    built._set_flag("allow_objects", True)
    return built


def _mooncake(section: JobSection) -> dict[str, Any]:
    """Keys of ``backend.MooncakeStore``; what is not here keeps the caller's value or TransferQueue's default."""
    settings, decision = section.settings, section.decision
    return {
        "auto_init": False,  # upstream's own start kills every mooncake_master of the host by name (RFC F8)
        "metadata_server": settings.mooncake_metadata_server,
        "master_server_address": section.master,
        "local_hostname": "",  # each node announces its own (FC-18)
        "protocol": decision.protocol,
        "device_name": decision.device,
        "use_gdr": decision.gdr,
        "gdr_staging_buffer_mb": settings.gdr_staging_mb,
        "hard_pin": True,  # an evicted sample is a lost sample
        "global_segment_size": 0,  # the plugin's client mounts its segment itself, at its first large put
        "local_buffer_size": client_sizes(settings).buffer,  # each process adds its staging pool, if it can have one
    }


def _mappings(backends: Any) -> list[DictConfig]:
    if not isinstance(backends, DictConfig):
        return []
    return [value for value in backends.values() if isinstance(value, DictConfig)]
