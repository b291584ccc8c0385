"""The way into a connection: open until somebody shuts it, who then waits for those inside.

The native store crashes the process when it is closed while another thread is in one of its calls (measured, 0.3.13).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar, cast

from relax_tq_rdma.staging.errors import StoreFault

Method = TypeVar("Method", bound=Callable[..., Any])


class Gate:
    """Safe to use from several threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._is_shut = False

    def check(self) -> None:
        """
        Raises:
            StoreFault: the gate is shut.
        """
        if self._is_shut:
            raise StoreFault(
                "the connection to the Mooncake store is closed", "init TransferQueue again before using it"
            )

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Be inside for the length of the block. Raises as :meth:`check`."""
        with self._changed:
            self.check()
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def shut(self, limit: float) -> bool:
        """Let nobody in any more, and wait up to ``limit`` seconds; whether nobody is inside."""
        with self._changed:
            self._is_shut = True
            return self._changed.wait_for(lambda: not self._inside, limit)


class _Gated(Protocol):
    _gate: Gate


def inside(method: Method) -> Method:
    """A method that runs inside its object's gate."""

    @functools.wraps(method)
    def run(self: _Gated, *args: Any, **named: Any) -> Any:
        with self._gate.enter():
            return method(self, *args, **named)

    return cast(Method, run)
