"""A daemon thread that keeps this process's record on the board, from its first manager to its last."""

from __future__ import annotations

import atexit
import logging
import os
import threading

from relax_tq_rdma.coverage import board
from relax_tq_rdma.coverage.process import Process

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 5.0
_GOODBYE_SECONDS = 1.0


class Reporter:
    """Writes the record of ``process`` now and every few seconds, and takes it away at the end. Never raises."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._wake, self._end = threading.Event(), threading.Event()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="dataplane-coverage", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def wake(self) -> None:
        """There is news that should not wait."""
        self._wake.set()

    def stop(self) -> None:
        """Take the record away, within a second. Idempotent."""
        if os.getpid() == self._pid:
            self._end.set()
            self._wake.set()
            self._thread.join(_GOODBYE_SECONDS)
        atexit.unregister(self.stop)

    def _run(self) -> None:
        written: set[str] = set()
        told = False
        while not self._end.is_set():
            record = self._process.record()
            try:
                if record is not None:
                    board.put(record)
                    written.add(record.key)
            except board.Unreachable as exc:
                if not told and not written:
                    told = True
                    logger.info("relax-tq-rdma status does not list this process: %s", exc)
            except Exception as exc:  # the control service is gone, or Ray has just been shut down: the next turn tells
                logger.debug("this process's record could not be written: %s", exc)
            self._wake.wait(INTERVAL_SECONDS)
            self._wake.clear()
        for key in written:
            try:
                board.remove(key)
            except Exception as exc:
                logger.debug("this process's record stays: %s", exc)
