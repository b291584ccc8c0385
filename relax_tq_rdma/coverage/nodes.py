"""Whether every node's workers have loaded the plugin, asked before the data system starts (FC-14).

The question travels by value, so a node where the plugin is not installed answers too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from relax_tq_rdma.errors import StartError
from relax_tq_rdma.say import say
from relax_tq_rdma.summary import PREFIX
from relax_tq_rdma.transport.failures import describe
from relax_tq_rdma.version import __version__

_SHOWN = 4


def require_plugin(limit: float) -> None:
    """Ask a fresh worker of every alive node, all at once, within ``limit`` seconds.

    Raises:
        StartError: a node whose workers cannot import the plugin, have not loaded it, or do not answer in time.
    """
    started = time.monotonic()
    names, answers = _ask(limit)
    problems = {
        name: why for node, name in names.items() if (why := judge(answers.get(node), time.monotonic() - started))
    }
    if problems:
        raise StartError(_sentence(problems, len(names)))
    others = {names[node]: answers[node]["version"] for node in names if answers[node]["version"] != __version__}
    for name, version in others.items():
        text = f"node {name} has relax-tq-rdma {version}, the driver {__version__}: install the same version"
        say(f"{PREFIX} WARNING {text}")


def judge(answer: Any, waited: float) -> str:
    """Why a node's workers are not ready; empty when they are."""
    if answer is None:
        return f"no worker answered within {waited:.0f} s; is a CPU worker able to start there?"
    if isinstance(answer, BaseException):
        return describe(answer)
    if "problem" in answer:
        return f"{answer['problem']}; install relax-tq-rdma {__version__} there, in the Python that Ray runs"
    if not answer["ready"]:
        return (
            "the plugin is installed and was not loaded; call relax_tq_rdma.install(args) before ray.init, or put the "
            ".pth file of docs/relax.md there"
        )
    return ""


def _sentence(problems: Mapping[str, str], nodes: int) -> str:
    by_reason: dict[str, list[str]] = {}
    for name, why in problems.items():
        by_reason.setdefault(why, []).append(name)
    parts = []
    for why, names in by_reason.items():
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        parts.append(f"{', '.join(names[:_SHOWN])}{more}: {why}")
    return f"the workers of {len(problems)} of {nodes} nodes have no relax-tq-rdma: " + "; ".join(parts)


def _ask(limit: float) -> tuple[dict[str, str], dict[str, Any]]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from relax_tq_rdma.transport.agents import alive_nodes

    names = {node_id: node.name for node_id, node in alive_nodes().items()}
    ask = ray.remote(num_cpus=0, max_retries=0)(_question())
    here = {node: NodeAffinitySchedulingStrategy(node_id=node, soft=False) for node in names}
    nodes = {ask.options(scheduling_strategy=here[node]).remote(): node for node in names}
    ready, _ = ray.wait(list(nodes), num_returns=len(nodes), timeout=limit)
    return names, {nodes[ref]: _answer(ref) for ref in ready}


def _answer(ref: Any) -> Any:
    import ray

    try:
        return ray.get(ref, timeout=1.0)
    except Exception as exc:  # the worker died, or could not start
        return exc


def _question() -> Callable[[], dict[str, Any]]:
    def relax_tq_rdma_is_ready() -> dict[str, Any]:
        import sys

        failed = getattr(sys, "relax_tq_rdma_hook_failed", "")
        if failed:
            return {"problem": failed}
        try:
            from relax_tq_rdma.install import is_ready
            from relax_tq_rdma.version import __version__ as version

            return {"version": version, "ready": is_ready()}
        except Exception as exc:
            return {"problem": f"{type(exc).__name__}: {exc}"}

    return relax_tq_rdma_is_ready
