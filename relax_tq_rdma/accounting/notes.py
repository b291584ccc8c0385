"""Says each trouble of accounting once, as one sentence, and never raises: metrics must not break the job (FC-48)."""

from __future__ import annotations

import logging

_LOG = logging.getLogger("relax_tq_rdma.accounting")
_SAID: set[str] = set()


def say_once(kind: str, sentence: str) -> None:
    """Warn with ``sentence``; later troubles of the same ``kind`` in this process are silent."""
    if kind not in _SAID:
        _SAID.add(kind)
        _LOG.warning("%s", sentence)


def reason(error: BaseException) -> str:
    """An error as a short phrase."""
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).splitlines()[0]
