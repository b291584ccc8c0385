"""Ctrl-C and SIGTERM become exceptions, so that every ``finally`` runs; while they run, further signals wait."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


class Terminated(KeyboardInterrupt):
    """SIGTERM. A kind of ``KeyboardInterrupt``: what ends a job on Ctrl-C ends it here too."""


def listen() -> None:
    """(Re-)install the handlers. Main thread only; ``ray.init`` replaces the one of SIGTERM, so call it again then."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _terminate)


@contextmanager
def listening() -> Iterator[None]:
    """``listen`` for the block, then put the former handlers back."""
    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    listen()
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@contextmanager
def ignored() -> Iterator[None]:
    """For clean-up that must not be cut short; every step inside has its own deadline."""
    former = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated
