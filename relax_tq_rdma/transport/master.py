"""A ``mooncake_master`` of one job (``--tq-mooncake-auto-init job-owned``; RFC §4.2.4, FC-17, FC-19).

The job starts it, the job stops exactly it, and no other process of the host is looked at. Life and death are kept by
:mod:`relax_tq_rdma.transport.master_supervisor`; this module is the driver's side: start, stop, and the reaping of what
a dead job may have left on this node.
"""

from __future__ import annotations

import importlib.util
import os
import re
import select
import shutil
import subprocess
import time
from pathlib import Path

import msgspec

from relax_tq_rdma.errors import StartError
from relax_tq_rdma.transport.address import join
from relax_tq_rdma.transport.master_supervisor import STOP_GRACE_SECONDS, Event, Record, Request, file_problem, log_tail
from relax_tq_rdma.transport.process import boot_scope, module_command, module_environment, own_id
from relax_tq_rdma.transport.rundir import run_dir

_SUPERVISOR = "relax_tq_rdma.transport.master_supervisor"
_KEPT_LOGS = 8


class Master:
    """The job's own master.

    Args:
        job: token of the job; names record and log.
        host: address the RPC server binds and the job uses: loopback for a job of one node, else this node's own.
        binary: the ``mooncake_master`` to run; by default the one of the installed wheel.
    """

    def __init__(self, job: str, host: str = "127.0.0.1", binary: Path | None = None) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", job):
            raise StartError(f"job token {job!r} cannot name a file")
        self.job = job
        self.host = host
        self._binary = binary
        self._process: subprocess.Popen[bytes] | None = None
        self._ready: Event | None = None
        self._lines = b""
        self._failure = ""
        self._owner = os.getpid()

    @property
    def address(self) -> str:
        """``host:port`` of the RPC server; empty before :meth:`start`."""
        return join(self.host, self._ready.rpc_port) if self._ready else ""

    @property
    def metrics_address(self) -> str:
        """``host:port`` of the metrics and health pages, always on loopback."""
        return f"127.0.0.1:{self._ready.metrics_port}" if self._ready else ""

    @property
    def log(self) -> Path:
        return run_dir("masters") / f"{self.job}.log"

    @property
    def pid(self) -> int:
        """Process id of the master itself; 0 when it does not run."""
        return self._ready.master.pid if self._ready and self._ready.master else 0

    def start(self, limit: float) -> str:
        """Reap leftovers of dead jobs, start the master, wait until every port of it answers.

        Returns:
            ``host:port`` of the RPC server.

        Raises:
            StartError: it cannot be run, ended early (with its last words and "port N taken" when that was it), or was
                not ready within ``limit`` seconds. Nothing is left running.
        """
        ends = time.monotonic() + limit
        if self._process is not None:
            raise StartError(f"the master of job {self.job} was started before")
        try:
            reap(limit / 2)
            _prune_logs()
            # The supervisor gives up first and says why; the margin is for its own start.
            self._process = self._spawn(ends - time.monotonic() - 1.0)
        except OSError as exc:
            raise StartError(f"the job-owned mooncake_master could not be started: {file_problem(exc)}") from None
        event = self._next_event(ends - time.monotonic())
        if event is not None and event.kind == "ready":
            self._ready = event
            return self.address
        reason = event.reason if event else f"its supervisor said nothing: {log_tail(str(self.log))}"
        self.stop()
        raise StartError(f"the job-owned mooncake_master could not be started: {reason}")

    def stop(self, limit: float = STOP_GRACE_SECONDS + 2.0) -> None:
        """Stop exactly this master. Idempotent; does nothing in a forked child."""
        process, self._process = self._process, None
        if process is None or os.getpid() != self._owner:
            return
        master, self._ready = self._ready.master if self._ready else None, None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            process.kill()  # the kernel ends the master with it
            process.wait()
        process.stdout.close()
        if master is not None:
            master.end(1.0)

    def failure(self) -> str:
        """Why the master is gone, in words with the path of its log; empty while it runs. Never blocks."""
        if self._ready is not None and not self._failure:
            event = self._next_event(0.0)
            if event is not None:
                self._failure = f"{event.reason} (log: {self.log})"
            elif self._process is not None and self._process.poll() is not None:
                self._failure = f"the supervisor of mooncake_master is gone, and the master with it (log: {self.log})"
        return self._failure

    def _spawn(self, limit: float) -> subprocess.Popen[bytes]:
        folder = run_dir("masters")
        request = Request(
            job=self.job,
            host=self.host,
            binary=str(self._binary or master_binary()),
            record=str(folder / f"{self.job}.json"),
            log=str(self.log),
            locks=str(run_dir("ports")),
            limit_seconds=max(limit, 0.1),
            driver=own_id(),
        )
        with open(self.log, "ab") as log:
            os.chmod(self.log, 0o600)
            process = subprocess.Popen(
                module_command(_SUPERVISOR),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd="/",
                env=module_environment(),
                start_new_session=True,
            )
        assert process.stdin is not None
        try:
            process.stdin.write(msgspec.json.encode(request) + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it ended already: the missing event and its log say so
        return process

    def _next_event(self, seconds: float) -> Event | None:
        """The supervisor's next line, or ``None`` when there is none in time or it has ended."""
        assert self._process is not None
        assert self._process.stdout is not None
        fd, ends = self._process.stdout.fileno(), time.monotonic() + seconds
        while b"\n" not in self._lines:
            readable, _, _ = select.select([fd], [], [], max(0.0, ends - time.monotonic()))
            block = os.read(fd, 65536) if readable else b""
            if not block:
                return None
            self._lines += block
        line, _, self._lines = self._lines.partition(b"\n")
        return msgspec.json.decode(line, type=Event)


def master_binary() -> Path:
    """The ``mooncake_master`` of the wheel that this process imports, else the one on ``PATH``.

    Raises:
        StartError: there is none, or it cannot be executed.
    """
    spec = importlib.util.find_spec("mooncake")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        binary = Path(folder) / "mooncake_master"
        if not binary.is_file():
            continue
        if not os.access(binary, os.X_OK):
            try:  # as the wheel's own start script does: pip drops the mode bits of package data
                binary.chmod(binary.stat().st_mode | 0o111)
            except OSError:
                raise StartError(f"{binary} is not executable: run chmod +x on it") from None
        return binary
    found = shutil.which("mooncake_master")
    if found is None:
        raise StartError(
            "mooncake_master is not installed on this node: install relax-tq-rdma with its extra mooncake or "
            "mooncake-cpu, or name a running master with --tq-mooncake-master-address"
        )
    return Path(found)


def reap(limit: float) -> list[str]:
    """End what dead jobs of this user left on this node; each by its exact pid and start time.

    Jobs whose driver is alive are not touched, nor are records of another pid namespace.

    Returns:
        One sentence for each master that was ended.
    """
    ended, stop_at = [], time.monotonic() + limit
    for path in sorted(run_dir("masters").glob("*.json")):
        try:
            record = msgspec.json.decode(path.read_bytes(), type=Record)
        except FileNotFoundError:
            continue  # its job ended just now
        except msgspec.MsgspecError:
            path.unlink(missing_ok=True)
            continue
        if record.driver.alive() or time.monotonic() > stop_at or _other_container(record):
            continue
        found = record.master.alive()
        # The supervisor stops its child itself; the second call is for one that cannot any more.
        record.supervisor.end(min(STOP_GRACE_SECONDS + 1.0, max(0.1, stop_at - time.monotonic())))
        record.master.end(1.0)
        path.unlink(missing_ok=True)
        if found:
            ended.append(f"ended mooncake_master (pid {record.master.pid}) left by the dead job {record.job}")
    return ended


def _other_container(record: Record) -> bool:
    """Same boot, other pid namespace: its pids mean nothing here, and its job may well live."""
    return not record.driver.of_this_boot and record.driver.boot.partition(":")[0] == boot_scope().partition(":")[0]


def _prune_logs() -> None:
    """Keep the logs of the last few masters; those of running ones stay."""
    folder = run_dir("masters")
    logs = [path for path in folder.glob("*.log") if not path.with_suffix(".json").exists()]
    for path in sorted(logs, key=lambda log: log.stat().st_mtime)[:-_KEPT_LOGS]:
        path.unlink(missing_ok=True)
