"""A process-wide timer. ``start`` refuses a name that is running, so overlapping uses must call ``add``."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from relax.standin.line import NEW
from relax.utils.misc import SingletonMeta


class Timer(metaclass=SingletonMeta):
    def __init__(self) -> None:
        self.timers: dict[str, float] = {}
        self.start_time: dict[str, float] = {}

    def start(self, name: str, **_: Any) -> None:
        assert name not in self.start_time, f"timer {name} is running already"
        self.start_time[name] = time.time()

    def end(self, name: str, keep: bool = True, **_: Any) -> None:
        assert name in self.start_time, f"timer {name} was not started"
        elapsed = time.time() - self.start_time.pop(name)
        if keep:
            self.add(name, elapsed)

    def add(self, name: str, elapsed_time: float) -> None:
        self.timers[name] = self.timers.get(name, 0.0) + elapsed_time

    def log_dict(self) -> dict[str, float]:
        return dict(self.timers)

    def reset(self, name: str | None = None) -> None:
        if name is None:
            self.timers.clear()
        else:
            self.timers.pop(name, None)

    @contextmanager
    def context(self, name: str, **kw: Any) -> Iterator[None]:
        self.start(name, **kw)
        try:
            yield
        finally:
            self.end(name, **kw)


def timer(name_or_func: str | Callable[..., Any], **kw: Any) -> Any:
    """``with timer("name")`` or ``@timer``."""
    if isinstance(name_or_func, str):
        return Timer().context(name_or_func, **kw)
    function = name_or_func

    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with Timer().context(function.__name__):
            return function(*args, **kwargs)

    return timed


@contextmanager
def inverse_timer(name: str) -> Iterator[None]:
    """Stop a running timer for the duration."""
    Timer().end(name)
    try:
        yield
    finally:
        Timer().start(name)


def with_defer(deferred: Callable[[], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: call ``deferred`` after the function, whatever happens."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            finally:
                deferred()

        return wrapped

    return decorate


if NEW:

    @contextmanager
    def span_timer(name: str, *, attributes: dict[str, Any] | None = None) -> Iterator[None]:
        """Like :func:`timer`, and safe for overlapping uses."""
        began = time.time()
        try:
            yield
        finally:
            Timer().add(name, time.time() - began)
