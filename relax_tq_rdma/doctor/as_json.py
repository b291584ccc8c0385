"""The diagnosis as data (``doctor --json``). The format is described in ``docs/reference/doctor.md``."""

from __future__ import annotations

from typing import Any

import msgspec

from relax_tq_rdma.doctor.examine import Diagnosis
from relax_tq_rdma.transport import memory
from relax_tq_rdma.transport.decision import Refusal
from relax_tq_rdma.transport.report import Fallback, NodeReport

SCHEMA = 1


def to_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """Builtins only. ``decision.backend`` is ``None`` when the job would not start; ``refusal`` then says why."""
    return {
        "schema": SCHEMA,
        "ok": diagnosis.ok,
        "nodes": [_node(report) for report in diagnosis.reports],
        "decision": _decision(diagnosis),
        "refusal": diagnosis.refusal,
        "start_line": diagnosis.start_line,
        "matrix": [
            {
                "verdict": f.verdict,
                "flags": list(f.flags),
                "message": f.message,
                "way_out": f.way_out,
                "reference": f.reference,
            }
            for f in diagnosis.findings
        ],
        "seams": msgspec.to_builtins(list(diagnosis.seams)),
        "memory_plan": [_plan(report) for report in diagnosis.reports if report.memory is not None],
        "capabilities": [_node(report) for report in diagnosis.capabilities],
        "variables": [{"name": n, "value": v, "note": note} for n, v, note in diagnosis.variables],
    }


def _node(report: NodeReport) -> dict[str, Any]:
    return {
        "node": report.node,
        "node_id": report.node_id,
        "address": report.address,
        "mooncake_version": report.mooncake_version,
        "checks": msgspec.to_builtins(report.checks),
        "devices": msgspec.to_builtins(report.devices),
    }


def _decision(diagnosis: Diagnosis) -> dict[str, Any]:
    decision, outcome = diagnosis.decision, diagnosis.outcome
    if decision is None:
        steps = outcome.fallbacks if isinstance(outcome, Refusal) else ()
        return {"backend": None, "protocol": None, "device": "", "gdr": False, "fallbacks": _steps(steps)}
    return {
        "backend": decision.backend,
        "protocol": decision.protocol,
        "device": decision.device,
        "gdr": decision.gdr,
        "fallbacks": _steps(decision.fallbacks),
    }


def _steps(fallbacks: tuple[Fallback, ...]) -> Any:
    return msgspec.to_builtins(fallbacks)


def _plan(report: NodeReport) -> dict[str, Any]:
    plan = report.memory
    assert plan is not None
    return {
        "node": report.node,
        "segments": "producers" if plan.lazy else "every client",
        "process_bytes": plan.process_bytes,
        "node_bytes": plan.node_bytes,
        "rows": msgspec.to_builtins(memory.rows(plan)),
    }
