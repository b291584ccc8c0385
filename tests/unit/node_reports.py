"""Node reports for tests: good ones, and good ones with one thing wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relax_tq_rdma.transport.report import CHECKS, Check, NodeReport, RdmaDevice


def names(count: int) -> dict[str, str]:
    """Node ids and names of a cluster: ``id-0: node-0``, ..."""
    return {f"id-{i}": f"node-{i}" for i in range(count)}


def good(i: int, missing: Mapping[str, str] | None = None, **changes: Any) -> NodeReport:
    """Report of node ``i`` with everything in order, except the ``missing`` checks (name to evidence)."""
    missing = missing or {}
    checks = tuple(
        Check(name=name, status="missing", evidence=missing[name], fix=f"mend {name}")
        if name in missing
        else Check(name=name, status="ok", evidence="fine")
        for name in CHECKS
    )
    device = RdmaDevice(name="mlx5_0", port=1, gid_index=3, gid="::ffff:10.0.0.1", link_layer="Ethernet")
    values: dict[str, Any] = {
        "node": f"node-{i}",
        "node_id": f"id-{i}",
        "checks": checks,
        "address": f"10.0.0.{i + 1}",
        "mooncake_version": "0.3.13",
        "plugin_version": "0.1.0",
        "devices": (device,),
    }
    return NodeReport(**{**values, **changes})
