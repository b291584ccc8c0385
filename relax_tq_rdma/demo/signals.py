"""Ctrl-C and SIGTERM end the job by ``KeyboardInterrupt``, so that every ``finally`` runs, undisturbed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

_terminated = False


def was_terminated() -> bool:
    """Whether the ``KeyboardInterrupt`` at hand stands for a SIGTERM. Its type cannot tell: Ray raises its own."""
    return _terminated


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
    global _terminated
    _terminated = True
    raise KeyboardInterrupt
