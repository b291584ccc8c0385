"""Joining and leaving the data system."""

from __future__ import annotations

from typing import Any

import transfer_queue as tq


def attach_tq_client(conf: Any, *, role: str, timeout: float | None = None) -> Any:
    tq.init(conf)
    return tq.get_client()


def uses_mooncake(conf: Any) -> bool:
    return bool(conf.backend.storage_backend == "MooncakeStore")
