"""What a process of the agents can be asked to do. Each process is one job's driver, producer, consumer or actor.

A duty is a public function of one of the modules below; arguments and values are plain data.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from tests.rdma.duties import actors, driver, faults, member, node
from tests.rdma.duties.state import STATE


def preload() -> None:
    """Import what the duties need: 20 times slower under emulation than anything else they do."""
    import mooncake.store  # noqa: F401
    import torch

    import tests.rdma.payloads
    import tests.rdma.plain_port  # noqa: F401
    from relax_tq_rdma.seams.tq_registry import TqRegistry

    torch.set_num_threads(1)
    faults.sabotage()
    report = TqRegistry().check()
    assert report.ok, report.text
    TqRegistry().apply()


def at_end() -> None:
    """The connection is closed: end what would outlive this process."""
    if "master" in STATE:
        STATE["master"].kill()


def _functions(module: ModuleType) -> dict[str, Callable[..., Any]]:
    found = {name: value for name, value in vars(module).items() if callable(value) and not name.startswith("_")}
    return {name: value for name, value in found.items() if value.__module__ == module.__name__}


DUTIES: dict[str, Callable[..., Any]] = {
    name: function for module in (actors, driver, faults, member, node) for name, function in _functions(module).items()
}
