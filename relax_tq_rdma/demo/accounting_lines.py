"""Brings the accounting's step lines from an actor to the driver: else only Ray's logs would hold them."""

from __future__ import annotations

from relax_tq_rdma.accounting import flush
from relax_tq_rdma.accounting.process import current


class LineCatcher:
    """``attach`` once the plugin has configured this process, ``take`` after each step. Empty with accounting off."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def attach(self) -> None:
        active = current()
        if active is not None:
            active.sink = self._lines.append

    def take(self) -> list[str]:
        """The lines since the last call; what this process did for a step is complete when it asks."""
        flush()
        taken = self._lines[:]
        self._lines.clear()
        return taken
