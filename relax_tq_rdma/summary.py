"""The start line: one line, stable ``key=value`` grammar, always printed by the driver (design §5, §9; RFC §4.1).

Grammar (``docs/reference/start-line.md``)::

    "[dataplane]" (SP key "=" value)+ SP "(probe: " text "; verify: " text ")"

Values hold no blank and no parenthesis; ``-`` stands for "not applicable".
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from relax_tq_rdma.compat import HostFacts
from relax_tq_rdma.fanout.choice import resolve_per_rank_fetch
from relax_tq_rdma.settings import Settings
from relax_tq_rdma.transport.port import Verification
from relax_tq_rdma.transport.report import Decision, Fallback

PREFIX = "[dataplane]"
UNTOUCHED = Decision(backend="SimpleStorage", protocol="zmq")


def start_line(
    settings: Settings,
    decision: Decision = UNTOUCHED,
    *,
    probe: tuple[int, int] | None = None,
    verify: Verification | None = None,
    host: HostFacts | None = None,
) -> str:
    """The line for a job that is about to run.

    Args:
        settings: what was asked for.
        decision: what the job really runs on.
        probe: nodes that passed every check the decision relies on, and nodes asked; ``None`` when nothing was probed.
        verify: the byte round trips; ``None`` when nothing was verified.
        host: facts about the host, if there is one: ``per_rank_fetch`` is then what comes of them, else the setting.
    """
    mooncake = decision.backend == "MooncakeStore"
    pairs: dict[str, str] = {
        "backend": decision.backend,
        "protocol": decision.protocol,
        "device": decision.device or ("auto" if decision.protocol == "rdma" else "-"),
        "gdr": _on(decision.gdr),
        "normalize": _on(settings.normalize_multimodal),
        "dedup": _on(settings.dedup_multimodal),
        "staging": _on(settings.host_staging and mooncake),
        "per_rank_fetch": _per_rank_fetch(settings, decision, host),
        "fallback": ",".join(_step(f) for f in decision.fallbacks) or "none",
    }
    body = " ".join(f"{key}={value}" for key, value in pairs.items())
    return f"{PREFIX} {body} (probe: {_probe(probe)}; verify: {_verify(verify)})"


def parse_start_line(line: str) -> Mapping[str, str]:
    """Read a start line back into its pairs, with ``probe`` and ``verify`` as two more keys.

    Raises:
        ValueError: the text is no start line.
    """
    match = re.fullmatch(r"\[dataplane\] ((?:\w+=[^\s()]+ )+)\(probe: ([^;]*); verify: ([^)]*)\)", line.strip())
    if match is None:
        raise ValueError(f"not a start line: {line!r}")
    pairs = dict(item.split("=", 1) for item in match[1].split())
    return {**pairs, "probe": match[2], "verify": match[3]}


def _per_rank_fetch(settings: Settings, decision: Decision, host: HostFacts | None) -> str:
    """With the number of ranks that read the same rows, or with what stands in the way of a wish (RFC §4.5)."""
    if host is None:
        return settings.per_rank_fetch
    wanted = resolve_per_rank_fetch(
        settings, host_switch=host.per_rank_fetch, multimodal=host.multimodal is not False, decision=decision
    ).on
    if wanted and host.rollout_routed_experts:
        return "off:rollout_routed_experts"
    return f"on:x{host.cohort}" if wanted and host.cohort is not None else _on(wanted)


def _on(value: bool) -> str:
    return "on" if value else "off"


def _step(fallback: Fallback) -> str:
    where = ":".join(_word(part) for part in (fallback.node, fallback.check) if part)
    return f"{fallback.from_}>{fallback.to}" + (f"@{where}" if where else "")


def _word(text: str) -> str:
    return re.sub(r"[\s();,=]+", "_", text)


def _probe(probe: tuple[int, int] | None) -> str:
    return "not needed" if probe is None else f"{probe[0]}/{probe[1]} nodes ok"


def _verify(verify: Verification | None) -> str:
    if verify is None:
        return "not needed"
    return f"{verify.passed}/{verify.total} round trips, wire={verify.wire}"
