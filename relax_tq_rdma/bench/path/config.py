"""The TransferQueue config of a case, made as the plugin makes it for a job."""

from __future__ import annotations

from typing import Any

from relax_tq_rdma.bench.path.cases import Case
from relax_tq_rdma.bench.path.messages import Setup
from relax_tq_rdma.bench.path.payload import MIB
from relax_tq_rdma.section import JobSection
from relax_tq_rdma.settings import Settings
from relax_tq_rdma.transport.report import Decision
from relax_tq_rdma.version import __version__

_LOOPBACK = "127.0.0.1"
_LOCAL_BUFFER = 128 * MIB
_DECISIONS = {
    "mooncake": Decision(backend="MooncakeStore", protocol="tcp"),
    "simple": Decision(backend="SimpleStorage", protocol="zmq"),
}


def backend_config(case: Case, setup: Setup, master: str, *, produces: bool) -> tuple[str, Any]:
    """Name and config of the backend. Without the plugin, only the producer mounts a segment, as with it."""
    from omegaconf import OmegaConf

    name = "MooncakeStore" if case.backend == "mooncake" else "SimpleStorage"
    plain: dict[str, Any] = {}
    if case.backend == "mooncake":
        plain = {
            "auto_init": False,
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": master,
            "local_hostname": _LOOPBACK,
            "protocol": "tcp",
            "global_segment_size": setup.segment_mib * MIB if produces else 0,
            "local_buffer_size": _LOCAL_BUFFER,
            "hard_pin": True,
        }
    conf = OmegaConf.create({"backend": {"storage_backend": name, name: plain}}, flags={"allow_objects": True})
    if case.settings is not None:
        conf = _with_plugin(case, setup, conf, master)
    config = conf.backend[name]
    if case.backend == "simple":
        from relax_tq_rdma.seams import tq_bare

        config.zmq_info = {unit.id: tq_bare.storage_unit_at(unit.id, unit.ip, unit.ports) for unit in setup.units}
    return name, config


def _with_plugin(case: Case, setup: Setup, conf: Any, master: str) -> Any:
    from relax_tq_rdma.transport.config import build_conf

    asked = {**(case.settings or {}), "storage_backend": case.backend, "host_staging_mb": setup.pool_mib}
    settings, notes = Settings.from_dict(asked)
    if notes:
        raise RuntimeError(f"{case.name}: {notes[0]}")
    section = JobSection(
        job=f"bench-{case.name}",
        settings=settings,
        decision=_DECISIONS[case.backend],
        plugin_version=__version__,
        master=master,
    )
    return build_conf(conf, section)
