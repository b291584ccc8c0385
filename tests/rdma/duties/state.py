"""What a process of the agents remembers between calls: it was forked for one purpose and ends after it."""

from __future__ import annotations

from typing import Any

STATE: dict[str, Any] = {}


def client() -> Any:
    """The TransferQueue client of this process."""
    if "client" not in STATE:
        from transfer_queue import interface

        return interface._TQ_CLIENT  # the driver's own
    return STATE["client"]


def manager() -> Any:
    return client().storage_manager
