"""Who fetches in a cohort: one rank that broadcasts, or every rank for itself (RFC §4.5, §4.7; design §4). Pure."""

from __future__ import annotations

from dataclasses import dataclass

from relax_tq_rdma.compat import HostFacts, per_rank_wanted
from relax_tq_rdma.settings import Settings
from relax_tq_rdma.transport.report import Decision


@dataclass(frozen=True)
class Choice:
    """``on``: every rank of the cohort fetches. ``why`` is one clause for people."""

    on: bool
    why: str


def resolve_per_rank_fetch(
    settings: Settings,
    *,
    host_switch: bool,
    multimodal: bool,
    routed_experts: bool = False,
    decision: Decision | None = None,
) -> Choice:
    """Resolve ``--tq-per-rank-fetch`` against the host's bare ``--per-rank-fetch`` switch.

    Args:
        settings: the job's settings; they passed :func:`relax_tq_rdma.compat.check`, which refuses unconfirmed
            per-rank fetch without staging.
        host_switch: the host's ``--per-rank-fetch``; a bare switch cannot say "off".
        multimodal: the fetched fields include ``multimodal_train_inputs``.
        routed_experts: the fetched fields include ``rollout_routed_experts``, whose broadcast cannot be skipped.
        decision: the job's transport decision once it is known. A job that fell back to SimpleStorage follows the
            rule of SimpleStorage: the advice for a key-value store would overrun its few units (RFC §4.5).
    """
    if routed_experts:
        return Choice(False, "the host cannot combine per-rank fetch with rollout_routed_experts")
    if settings.per_rank_fetch in ("on", "off"):
        return Choice(settings.per_rank_fetch == "on", f"--tq-per-rank-fetch {settings.per_rank_fetch}")
    said = "the host's --per-rank-fetch is " + ("set" if host_switch else "not set")
    fell_back = decision is not None and decision.backend == "SimpleStorage"
    if settings.per_rank_fetch == "host" or not settings.wants_mooncake or fell_back:
        return Choice(host_switch, said)
    if per_rank_wanted(settings, HostFacts(multimodal=multimodal, per_rank_fetch=host_switch)):
        return Choice(True, said if host_switch else "multimodal data on Mooncake with host staging")
    missing = "no host staging" if multimodal else "no multimodal data"
    return Choice(False, f"{missing} on Mooncake, and {said}")
