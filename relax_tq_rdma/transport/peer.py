"""One native Mooncake client in a child process that can be killed.

Native set-up against a master that accepts and never answers blocks for a minute and more *holding the GIL*: no thread,
signal handler or asyncio timeout of the same process can end it. So a node proves itself through
``python -m relax_tq_rdma.transport.peer``, which imports nothing heavy but Mooncake: one request as JSON on stdin, one
:class:`PeerResult` as JSON on the last line of stdout. :func:`run_peer` is the parent's side and ends the child's
process group at the deadline.

``handshake``: reach the master with a plain socket, set up a client that mounts nothing, make one real call, close.
``hold``: mount a small segment and keep it until stdin is closed.
``ring``: see :mod:`relax_tq_rdma.transport.ring`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import NoReturn

import msgspec

from relax_tq_rdma.errors import StartError, UsageError
from relax_tq_rdma.transport.hazards import installed_mooncake_version
from relax_tq_rdma.transport.native import (
    NativeError,
    PeerRequest,
    PeerResult,
    reach_master,
    set_up,
    set_up_with_segment,
)
from relax_tq_rdma.transport.process import module_command, module_environment
from relax_tq_rdma.transport.ring import run_ring

_MODULE = "relax_tq_rdma.transport.peer"
HOLDING = "holding"
"""Step of mode ``hold`` at which the segment is there."""

CLOSE_SECONDS = 2.5
"""``close`` takes 1 s, and 2 s with a mounted segment (measured, 0.3.13)."""


def run_peer(request: PeerRequest, limit: float) -> PeerResult:
    """Run one peer on this node and end it, whatever happens, within ``limit`` seconds."""
    with Peer(request, limit) as peer:
        return peer.finish()


class Peer:
    """A running peer. A context manager: on the way out the child is gone, whatever happens.

    Args:
        request: what it is to do.
        limit: seconds of its life.
    """

    def __init__(self, request: PeerRequest, limit: float) -> None:
        self._request, self._limit, self._ends = request, limit, time.monotonic() + limit
        self._noise = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        self._said = b""
        self._child = subprocess.Popen(
            module_command(_MODULE, f"{limit:.3f}"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._noise,
            cwd="/",
            env=module_environment(),
            start_new_session=True,
        )
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended already: finish says how
            self._child.stdin.write(msgspec.json.encode(request) + b"\n")
            self._child.stdin.flush()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._child.poll() is None:
            self._kill()
        self._child.communicate()
        self._noise.close()

    def reached(self, step: str) -> bool:
        """Wait until the peer says that it has come to ``step``; ``False`` when it ended or its time is over."""
        assert self._child.stdout is not None
        fd, line = self._child.stdout.fileno(), f"{step}\n".encode()
        while line not in self._said:
            readable, _, _ = select.select([fd], [], [], max(0.0, self._ends - time.monotonic()))
            block = os.read(fd, 65536) if readable else b""
            if not block:
                return False
            self._said += block
        return True

    def finish(self) -> PeerResult:
        """Close its stdin (what a peer that holds waits for), and wait for its result until its time is over."""
        timed_out = False
        try:
            out, _ = self._child.communicate(timeout=max(0.0, self._ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            timed_out = True
            self._kill()
            out, _ = self._child.communicate()
        self._noise.seek(0)
        native = self._noise.read().decode("utf-8", "replace")
        lines = (self._said + out).decode("utf-8", "replace").splitlines()
        result = _result(lines)
        if result is None:
            step = lines[-1] if lines else "start"
            result = self._explain_silence(step, timed_out, native)
        elif not result.reason and self._request.protocol == "rdma" and "Found 0 HCAs" in native:
            # Asked for rdma without an HCA, the engine installs TCP and reports success.
            result = msgspec.structs.replace(
                result, reason="Mooncake found no HCA and silently set up TCP instead", check="rdma_device"
            )
        return msgspec.structs.replace(result, detail=last_words(native))

    def _explain_silence(self, step: str, timed_out: bool, native: str) -> PeerResult:
        """No result: the child hung, crashed or was killed."""
        device, code = self._request.device or "(its own choice)", self._child.returncode
        if not timed_out:
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            return PeerResult(reason=f"the Mooncake client process ended with {how} during {step}", check="mooncake")
        if "No available RNIC" in native or "Failed to install RDMA transport" in native:
            reason = f"Mooncake could not open RDMA device {device} within {self._limit:.0f} s"
            return PeerResult(reason=reason, check="rdma_device")
        return PeerResult(
            reason=f"no answer from Mooncake within {self._limit:.0f} s (step: {step}): what listens on "
            f"{self._request.master} accepts connections but does not answer",
            check="master",
        )

    def _kill(self) -> None:
        """The child leads a session of its own and is not reaped yet, so its group id cannot be a stranger's."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)


def last_words(native: str, lines: int = 8) -> str:
    """The errors and warnings among the last lines of the native library's log."""
    plain = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", native).splitlines()
    told = [line.strip() for line in plain if line.strip() and not line.startswith("I")]
    return "\n".join(told[-lines:])


def _result(lines: list[str]) -> PeerResult | None:
    with contextlib.suppress(IndexError, msgspec.MsgspecError):
        return msgspec.json.decode(lines[-1], type=PeerResult)
    return None


def main() -> NoReturn:
    """Entry point of the child."""
    limit = float(sys.argv[1])
    # Ends this process from a native thread, GIL or not, also when the parent was killed meanwhile.
    faulthandler.dump_traceback_later(limit + 1.0, exit=True)
    ends = time.monotonic() + limit
    request = msgspec.json.decode(sys.stdin.buffer.readline(), type=PeerRequest)
    answer = os.dup(1)
    os.dup2(2, 1)  # whatever the native library prints goes to the log, not between our lines

    def step(name: str) -> None:
        os.write(answer, name.encode() + b"\n")

    try:
        result = _act(request, ends, step)
    except NativeError as exc:
        result = PeerResult(reason=str(exc), check=exc.check)
    except UsageError as exc:
        result = PeerResult(reason=str(exc), check="master")  # an address that is none
    except StartError as exc:
        result = PeerResult(reason=str(exc), check="memcpy_hazard")
    result = msgspec.structs.replace(result, mooncake_version=installed_mooncake_version())
    os.write(answer, msgspec.json.encode(result) + b"\n")
    # Native threads of a client whose master is gone may not end by themselves.
    os._exit(0)


def _act(request: PeerRequest, ends: float, step: Callable[[str], None]) -> PeerResult:
    step("reaching the master")
    reach_master(request.master, max(0.1, min(5.0, ends - time.monotonic())))
    if request.mode == "ring":
        return run_ring(request, ends - CLOSE_SECONDS, step)
    step("set-up")
    store = set_up(request) if request.mode == "handshake" else set_up_with_segment(request)
    if request.mode == "hold":
        step(HOLDING)
        sys.stdin.buffer.read()
    step("close")
    store.close()
    return PeerResult()


if __name__ == "__main__":
    main()
