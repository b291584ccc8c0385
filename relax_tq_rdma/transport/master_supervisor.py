"""The process between a job and its ``mooncake_master``: it owns the master and outlives neither the job nor the
master.

Run as ``python -m relax_tq_rdma.transport.master_supervisor``; imports nothing heavy. It reads one :class:`Request`
from stdin, chooses ports, starts the master, proves every port ready, and says so in one :class:`Event` per line on
stdout. Then it waits. Whatever ends the driver (SIGKILL too) closes the pipe on stdin or changes the parent: the
supervisor then stops exactly its own child. A SIGKILL of the supervisor itself ends the master through the kernel's
parent-death signal. A session of its own keeps the Ctrl-C of a terminal away from both (FC-17, FC-19).
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NoReturn

import msgspec
import psutil

from relax_tq_rdma.errors import StartError
from relax_tq_rdma.transport.ports import PortLease, is_free, lease_port
from relax_tq_rdma.transport.process import ProcessId, own_id

ATTEMPTS = 3
"""Ports are checked before use; a second and third pair are for strangers that bind in between."""

STOP_GRACE_SECONDS = 3.0
_POLL_SECONDS = 0.02
_WATCH_SECONDS = 0.5
_LOOPBACK = "127.0.0.1"
_PR_SET_PDEATHSIG = 1
_NOISE = ("Master service started", "Logging before InitGoogleLogging", "Task cleanup thread", "admin server started")

_FLAGS = {
    # A client counts as lost after this many seconds without a heartbeat, and its segment is dropped with all data in
    # it. The default of 10 is less than a process can stand still (swap, a paused VM, a snapshot); the master is this
    # job's own, so a really lost client costs nothing but a late message: the job has failed by then.
    "client_ttl": "60",
    # Nothing unread may be evicted. As TransferQueue starts its master: no watermark, no ratio, long leases.
    "eviction_high_watermark_ratio": "1.0",
    "eviction_ratio": "0.0",
    "default_kv_lease_ttl": "999999",
    "default_kv_soft_pin_ttl": "999999",
    "allow_evict_soft_pinned_objects": "false",
    "metrics_host": _LOOPBACK,
    # One line every ten seconds for the whole life of a job; the same numbers are on the metrics port.
    "enable_metric_reporting": "false",
    "logtostderr": "true",
}


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What to start. ``host`` is the address the RPC server binds, ``record`` the file that names the processes."""

    job: str
    host: str
    binary: str
    record: str
    log: str
    locks: str
    limit_seconds: float
    driver: ProcessId


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """On disk while the master runs: enough to end exactly these processes when nobody else can."""

    job: str
    driver: ProcessId
    supervisor: ProcessId
    master: ProcessId


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One line to the driver. ``ended`` is a master that stopped by itself."""

    kind: Literal["ready", "failed", "ended"]
    reason: str = ""
    rpc_port: int = 0
    metrics_port: int = 0
    master: ProcessId | None = None


def master_command(binary: str, host: str, rpc_port: int, metrics_port: int) -> list[str]:
    """Command line of the master: every port it opens is named. An older master skips the flags it does not know."""
    flags = {"rpc_address": host, "rpc_port": str(rpc_port), "metrics_port": str(metrics_port), **_FLAGS}
    return [binary, *(f"--{name}={value}" for name, value in flags.items()), f"--undefok={','.join(flags)}"]


def log_tail(path: str, lines: int = 6) -> str:
    """The last lines of a log on one line, without colours and start-up noise."""
    try:
        with open(path, "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - 16384))
            text = log.read().decode("utf-8", "replace")
    except OSError as exc:
        return f"log unreadable: {exc.strerror}"
    plain = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text).splitlines()
    told = [line.strip() for line in plain if line.strip() and not any(noise in line for noise in _NOISE)]
    return " | ".join(told[-lines:]) or "nothing was logged"


def file_problem(exc: OSError) -> str:
    """A file of the run folder that cannot be written, as on a full disk, in words."""
    return f"{exc.filename or 'a file'} cannot be written ({exc.strerror}): set RTQ_RUN_DIR to a folder that has room"


class Supervisor:
    """Owner of one master. ``wanted`` tells whether the job still wants it; it is asked all the time."""

    def __init__(self, request: Request, wanted: Callable[[float], bool]) -> None:
        self.request = request
        self._wanted = wanted
        self._ends = time.monotonic() + request.limit_seconds
        self._child: subprocess.Popen[bytes] | None = None
        self._leases: list[PortLease] = []

    def run(self, say: Callable[[Event], None]) -> int:
        """Start the master, watch it, stop it. Returns the exit status: 0 when the job did not want it any more."""
        try:
            ready = self._start()
            if ready is None:
                return 0
            say(ready)
            while self._wanted(_WATCH_SECONDS):
                if self._exited():
                    say(Event(kind="ended", reason=self._describe_exit()))
                    return 1
            return 0
        except StartError as exc:
            say(Event(kind="failed", reason=str(exc)))
            return 1
        except OSError as exc:
            say(Event(kind="failed", reason=file_problem(exc)))
            return 1
        finally:
            self.stop()

    def stop(self) -> None:
        """Stop the child, if there is one, and take the record back. Idempotent."""
        child = self._child
        if child is not None and child.poll() is None:
            child.terminate()
            try:
                child.wait(STOP_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        Path(self.request.record).unlink(missing_ok=True)
        self._release()

    def _start(self) -> Event | None:
        reasons: list[str] = []
        locks = Path(self.request.locks)
        for _ in range(ATTEMPTS):
            rpc, metrics = self._lease(self.request.host, locks), self._lease(_LOOPBACK, locks)
            self.launch(rpc, metrics)
            while self._wanted(_POLL_SECONDS):
                if self._exited():
                    break
                if self.ready(rpc, metrics):
                    return Event(kind="ready", rpc_port=rpc, metrics_port=metrics, master=self._record())
                if time.monotonic() > self._ends:
                    raise StartError(
                        f"mooncake_master was not ready within {self.request.limit_seconds:.0f} s: "
                        f"{log_tail(self.request.log)} (log: {self.request.log})"
                    )
            else:
                return None
            reason, again = self.why_exited(rpc, metrics)
            self._release()
            if not again:
                raise StartError(reason)
            reasons.append(reason)
        raise StartError(f"mooncake_master found its ports taken {ATTEMPTS} times: {'; '.join(reasons)}")

    def launch(self, rpc_port: int, metrics_port: int) -> None:
        """Start the child, bound to the life of this process' main thread."""
        libc, parent = ctypes.CDLL(None, use_errno=True), os.getpid()

        def bind_to_parent() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:  # it died between fork and prctl: nobody would send the signal
                os._exit(1)

        with open(self.request.log, "ab") as log:
            try:
                # Safe: this process has one thread.
                self._child = subprocess.Popen(
                    master_command(self.request.binary, self.request.host, rpc_port, metrics_port),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd="/",
                    preexec_fn=bind_to_parent,
                )
            except OSError as exc:
                raise StartError(f"{self.request.binary} cannot be run: {exc.strerror}") from None
        self._record()

    def ready(self, rpc_port: int, metrics_port: int) -> bool:
        """Whether the child answers on both ports: a health page that says so, and an RPC port that accepts.

        The RPC port must be the child's own: a stranger who took it in the last moment accepts just as well, and the
        master dies of that only some time after its health page is up (FC-17).
        """
        if self._child is None or not _listens(self._child.pid, rpc_port):
            return False
        return _healthy(metrics_port) and _accepts(self.request.host, rpc_port)

    def why_exited(self, rpc_port: int, metrics_port: int) -> tuple[str, bool]:
        """Why the child ended, and whether other ports may help."""
        tail = log_tail(self.request.log)
        ports = ((self.request.host, rpc_port), (_LOOPBACK, metrics_port))
        taken = [port for host, port in ports if not is_free(host, port)]
        if taken:
            return f"port {' and '.join(map(str, taken))} taken", True
        if "Address already in use" in tail:
            return f"port {rpc_port} or {metrics_port} taken", True
        return f"{self._describe_exit()} (log: {self.request.log})", False

    def _lease(self, host: str, locks: Path) -> int:
        """A port, leased until the master is stopped."""
        lease = lease_port(host, locks)
        self._leases.append(lease)
        return lease.port

    def _release(self) -> None:
        while self._leases:
            self._leases.pop().release()

    def _exited(self) -> bool:
        return self._child is not None and self._child.poll() is not None

    def _describe_exit(self) -> str:
        code = self._child.returncode if self._child is not None else None
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit status {code}"
        return f"mooncake_master ended with {how}: {log_tail(self.request.log)}"

    def _record(self) -> ProcessId | None:
        """Write down who runs, all at once: a reader never sees half a record."""
        master = ProcessId.of(self._child.pid) if self._child is not None else None
        if master is not None:
            record = Record(job=self.request.job, driver=self.request.driver, supervisor=own_id(), master=master)
            path = Path(self.request.record)
            half = path.with_suffix(".tmp")
            half.write_bytes(msgspec.json.encode(record))
            half.replace(path)
        return master


def _listens(pid: int, port: int) -> bool:
    try:
        connections = psutil.Process(pid).net_connections(kind="tcp")
    except psutil.Error:  # it has ended
        return False
    return any(entry.status == psutil.CONN_LISTEN and entry.laddr.port == port for entry in connections)


def _healthy(metrics_port: int) -> bool:
    connection = http.client.HTTPConnection(_LOOPBACK, metrics_port, timeout=1.0)
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        return answer.status == 200 and json.loads(answer.read()).get("service_ready") is True
    except (OSError, http.client.HTTPException, ValueError, AttributeError):
        return False
    finally:
        connection.close()


def _accepts(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return True
    except OSError:
        return False


def _until_unwanted() -> Callable[[float], bool]:
    """A wait that ends at once when stdin closes, the parent is gone, a stop signal comes or a child changes state."""
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write)
    stopping: list[int] = []
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda number, frame: stopping.append(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    parent = os.getppid()

    def wanted(seconds: float) -> bool:
        readable, _, _ = select.select([0, wake_read], [], [], seconds)
        if wake_read in readable:
            os.read(wake_read, 512)
        # A forked child of the driver holds the pipe open too: the parent's death counts by itself.
        closed = 0 in readable and not os.read(0, 512)
        return not (stopping or closed or os.getppid() != parent)

    return wanted


def _say(event: Event) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(1, msgspec.json.encode(event) + b"\n")


def main() -> NoReturn:
    """Entry point. One line on stdin, then a pipe that stays open as long as the master is wanted."""
    line = b""
    while not line.endswith(b"\n"):
        block = os.read(0, 1)
        if not block:
            sys.exit(0)
        line += block
    wanted = _until_unwanted()
    sys.exit(Supervisor(msgspec.json.decode(line, type=Request), wanted).run(_say))


if __name__ == "__main__":
    main()
