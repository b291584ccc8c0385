"""Publishes the totals of this process for its node: a daemon thread writes the snapshot and keeps the endpoint up."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from relax_tq_rdma.accounting import snapshot
from relax_tq_rdma.accounting.exporter import Endpoint
from relax_tq_rdma.accounting.ledger import Ledger
from relax_tq_rdma.accounting.notes import reason, say_once
from relax_tq_rdma.accounting.snapshot import Snapshot
from relax_tq_rdma.transport.process import own_id

INTERVAL_S = 1.0
COMPACT_EVERY_S = 30.0


class Publisher:
    """Owner of this process's snapshot file. Nothing in here raises into its caller.

    ``backend`` is what the process says its job runs on; set it and it goes out with the next snapshot.
    """

    def __init__(self, root: Path, *, job: str, node: str, serial: int, ledger: Ledger, address: str) -> None:
        self._root = root
        self._folder = snapshot.job_folder(root, job)
        self._job, self._node, self._serial, self._ledger = job, node, serial, ledger
        self._owner = own_id()
        self._endpoint = Endpoint(self._folder, address)
        self._written: object = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dataplane-metrics", daemon=True)
        self.backend: tuple[str, str, str, str] | None = None

    def start(self) -> None:
        self._thread.start()

    def publish(self) -> None:
        """Write the snapshot now, if there is news."""
        if os.getpid() != self._owner.pid:
            return
        try:
            with self._lock:
                state = (self._ledger.revision, self.backend)
                if state != self._written:
                    self._folder.mkdir(parents=True, exist_ok=True)
                    value = self._snapshot()
                    snapshot.write_json(self._folder / value.name, value)
                    self._written = state
        except OSError as exc:
            say_once(
                "publish",
                f"metrics of this process are not published in {self._folder} ({reason(exc)}): "
                "set RTQ_RUN_DIR to a folder that can be written",
            )

    def close(self, timeout_s: float = 5.0) -> None:
        """Write a last snapshot and stop; a standby process takes the endpoint over."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        self.backend = None  # this process runs on, but says nothing about the job any more
        self.publish()
        self._endpoint.close()

    def abandon(self) -> None:
        """In a forked child: let go of the parent's endpoint. Its thread does not exist here."""
        self._endpoint.abandon()

    def _snapshot(self) -> Snapshot:
        return Snapshot(
            job=self._job,
            node=self._node,
            owner=self._owner,
            serial=self._serial,
            written=time.time(),
            rows=self._ledger.totals().to_rows(),
            gauges=self._ledger.gauges(),
            backend=self.backend,
        )

    def _run(self) -> None:
        self.publish()
        self._tidy()
        compacted = time.monotonic()
        while not self._stop.is_set():
            self._endpoint.keep_up()
            self._stop.wait(INTERVAL_S)
            self.publish()
            if time.monotonic() - compacted > COMPACT_EVERY_S:
                self._compact()
                compacted = time.monotonic()

    def _tidy(self) -> None:
        try:
            snapshot.remove_finished(self._root, self._folder)
        except OSError as exc:
            say_once("tidy", f"metric files of finished jobs in {self._root} are not removed: {reason(exc)}")

    def _compact(self) -> None:
        try:
            snapshot.compact(self._folder)
        except OSError as exc:
            say_once("compact", f"metric files in {self._folder} are not summed up: {reason(exc)}")
