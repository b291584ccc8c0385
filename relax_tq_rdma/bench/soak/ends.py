"""A producer or consumer, seen from the driver: commands go out at any time, answers come when they come."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import msgspec

from relax_tq_rdma.bench.soak.messages import Answer, Command
from relax_tq_rdma.errors import DataplaneError
from relax_tq_rdma.transport.process import module_command, module_environment

_MODULE = "relax_tq_rdma.bench.soak.worker"
_GRACE_SECONDS = 3.0


class EndGone(DataplaneError):
    """An end has ended by itself: the run cannot go on."""


class End:
    """One process. ``log`` takes what it and its libraries print."""

    def __init__(self, role: str, name: str, log: Path, environment: Mapping[str, str]) -> None:
        self.name = name
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

    def fileno(self) -> int:
        """Of the answers: readable when :meth:`hear` has something to say."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def tell(self, command: Command) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(command) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._gone() from None

    def hear(self) -> list[Answer]:
        """The answers that have come; call it when :meth:`fileno` is readable.

        Raises:
            EndGone: there will be no more.
        """
        block = os.read(self.fileno(), 1 << 20)
        if not block:
            raise self._gone()
        *lines, self._unread = (self._unread + block).split(b"\n")
        return [msgspec.json.decode(line, type=Answer) for line in lines]

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

    def last_words(self) -> str:
        """The last line of its log."""
        try:
            lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        except OSError as exc:  # a long run may outlive what lies in a folder for temporary files
            return f"its log is gone ({exc.strerror})"
        return f"its last words: {lines[-1][:300]}" if lines else "it said nothing"

    def _gone(self) -> EndGone:
        try:
            how = f"ended with exit status {self._process.wait(_GRACE_SECONDS)}"
        except subprocess.TimeoutExpired:
            how = "closed its output"
        return EndGone(f"{self.name} {how}; {self.last_words()}")
