"""A child process of the run, seen from the driver: one question, one answer, one deadline."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from relax_tq_rdma.bench.path.messages import Answer, Command, Failed
from relax_tq_rdma.errors import DataplaneError
from relax_tq_rdma.transport.process import module_command, module_environment

_MODULE = "relax_tq_rdma.bench.path.worker"
_GRACE_SECONDS = 3.0


class ChildError(DataplaneError):
    """A child has ended or does not answer: the run cannot go on."""


class Refused(DataplaneError):
    """A child could not do what it was asked; it is still there."""


class Child:
    """One worker. ``log`` takes what it and its libraries print."""

    def __init__(self, role: str, log: Path, environment: Mapping[str, str]) -> None:
        self.role = role
        self._log = log
        self._unread = b""
        with open(log, "ab") as errors:
            self._process = subprocess.Popen(
                module_command(_MODULE, role, str(os.getpid())),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd="/",
                env={**module_environment(), **environment},
                start_new_session=True,  # a Ctrl-C is for the driver, who ends its children in order
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, command: Command) -> None:
        """Send a command without waiting for the answer, which :meth:`hear` then gives."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(command) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._gone() from None

    def hear(self, seconds: float) -> Answer:
        """The answer to the oldest command that has none yet.

        Raises:
            Refused: the child could not do it.
            ChildError: it has ended, or says nothing for ``seconds``.
        """
        assert self._process.stdout is not None
        descriptor, ends = self._process.stdout.fileno(), time.monotonic() + seconds
        while b"\n" not in self._unread:
            readable, _, _ = select.select([descriptor], [], [], max(0.0, ends - time.monotonic()))
            if not readable:
                raise ChildError(f"the {self.role} did not answer within {seconds:.0f} s; {self._last_words()}")
            block = os.read(descriptor, 1 << 20)
            if not block:
                raise self._gone()
            self._unread += block
        line, _, self._unread = self._unread.partition(b"\n")
        answer: Answer = msgspec.json.decode(line, type=Answer)
        if isinstance(answer, Failed):
            raise Refused(answer.reason)
        return answer

    def ask(self, command: Command, seconds: float) -> Answer:
        self.tell(command)
        return self.hear(seconds)

    def dismiss(self) -> None:
        """Tell it to end, and do not wait."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def close(self) -> None:
        """End it, by force if it does not go. Idempotent."""
        self.dismiss()
        try:
            self._process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _gone(self) -> ChildError:
        try:
            code = self._process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            return ChildError(f"the {self.role} closed its output; {self._last_words()}")
        return ChildError(f"the {self.role} ended with exit status {code}; {self._last_words()}")

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"its last words: {lines[-1][:300]}" if lines else "it said nothing"
