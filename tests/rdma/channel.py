"""Calls over a socket: one JSON line a message, requests and answers in any order, nothing but plain data.

A request is ``{"id", "duty", "arguments"}``, an answer ``{"id", "value"}`` or ``{"id", "error", "kind"}``. Nothing that
comes over the wire is ever executed or unpickled: a duty is looked up by name in the table the server was given.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError  # Python 3.10 has two of that name
from typing import Any

Duties = Mapping[str, Callable[..., Any]]


class RemoteError(Exception):
    """A duty ended with an exception. ``kind``: name of its class."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Gone(Exception):
    """The process at the other end has ended."""


class Caller:
    """The calling side. Safe to use from several threads."""

    def __init__(self, connection: socket.socket, name: str = "the process") -> None:
        self.name = name
        self._connection = connection
        self._numbers = itertools.count()
        self._open: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._gone = False
        threading.Thread(target=self._hear, daemon=True).start()

    def begin(self, duty: str, **arguments: Any) -> Future[Any]:
        """Start a duty; the future gives its value, a :class:`RemoteError` or :class:`Gone`."""
        future: Future[Any] = Future()
        number = next(self._numbers)
        with self._lock:
            if self._gone:
                future.set_exception(Gone(f"{self.name} has ended"))
                return future
            self._open[number] = future
            message = json.dumps({"id": number, "duty": duty, "arguments": arguments})
            with contextlib.suppress(OSError):  # _hear notices
                self._connection.sendall(message.encode() + b"\n")
        return future

    def call(self, duty: str, limit: float, **arguments: Any) -> Any:
        """A duty's value.

        Raises:
            RemoteError: it raised.
            Gone: the process ended before it answered.
            TimeoutError: there was no answer within ``limit`` seconds.
        """
        try:
            return self.begin(duty, **arguments).result(limit)
        except FutureTimeoutError:
            raise TimeoutError(f"{self.name} did not answer {duty} within {limit:g} s") from None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _hear(self) -> None:
        with contextlib.suppress(OSError, ValueError), self._connection.makefile("rb") as lines:
            for line in lines:
                answer = json.loads(line)
                with self._lock:
                    future = self._open.pop(answer["id"])
                if "error" in answer:
                    future.set_exception(RemoteError(answer["kind"], answer["error"]))
                else:
                    future.set_result(answer["value"])
        with self._lock:
            self._gone, left = True, list(self._open.values())
            self._open.clear()
        for future in left:
            future.set_exception(Gone(f"{self.name} has ended"))


def serve(connection: socket.socket, duties: Duties) -> None:
    """Answer calls, each in a thread of its own, until the other side closes the connection."""
    lock = threading.Lock()

    def answer(request: dict[str, Any]) -> None:
        try:
            reply = {"value": duties[request["duty"]](**request["arguments"])}
        except BaseException as exc:  # also SystemExit: it ends the duty, not the process
            reply = {"error": str(exc), "kind": type(exc).__name__}
        with lock, contextlib.suppress(OSError):
            connection.sendall(json.dumps({"id": request["id"], **reply}).encode() + b"\n")

    with contextlib.suppress(OSError, ValueError), connection.makefile("rb") as lines:
        for line in lines:
            threading.Thread(target=answer, args=(json.loads(line),), daemon=True).start()
