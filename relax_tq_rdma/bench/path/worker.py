"""A child of the run: ``python -m relax_tq_rdma.bench.path.worker ROLE PARENT``, one of four roles.

``controller`` and ``unit`` are TransferQueue's own servers; ``producer`` and ``consumer`` are the ends. Commands come
on stdin, answers go to stdout, one line of JSON each; what libraries print goes to stderr. The end of stdin is the end.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec

from relax_tq_rdma.bench.path.cases import Case
from relax_tq_rdma.bench.path.copies import watching
from relax_tq_rdma.bench.path.counters import counted, reading
from relax_tq_rdma.bench.path.ends import End, join
from relax_tq_rdma.bench.path.limits import measure_limits
from relax_tq_rdma.bench.path.messages import (
    Answer,
    Clear,
    Command,
    Failed,
    Fill,
    Forget,
    Get,
    Limits,
    Measured,
    Moved,
    Open,
    Put,
    Ready,
    Server,
    Setup,
    Watched,
)
from relax_tq_rdma.bench.path.payload import Shape, check, digests, make_rows, stamp
from relax_tq_rdma.errors import DataplaneError

_PR_SET_PDEATHSIG = 1


class _Worker:
    """A producer or a consumer."""

    def __init__(self, *, produces: bool) -> None:
        import relax_tq_rdma
        from relax_tq_rdma.seams import tq_bare

        relax_tq_rdma.install()  # as in every worker of a job: the section in a config decides
        tq_bare.bind_loopback()
        tq_bare.replace_mooncake_store(counted)
        self._produces = produces
        self._setup: Setup | None = None
        self._ends: dict[str, End] = {}
        self._shape = Shape(tier=1, rows=1)
        self._rows: list[Any] = []
        self._stamped, self._sent = 0, [0]
        self._kept: dict[str, deque[Any]] = defaultdict(deque)

    def answer(self, command: Command) -> Answer:
        if isinstance(command, Put):
            return self._put(command)
        if isinstance(command, Get):
            return self._get(command)
        if isinstance(command, Limits):
            return Measured(seconds=measure_limits(self._shape.row_bytes))
        if isinstance(command, Setup):
            self._setup = command
        elif isinstance(command, Open):
            self._open(command.case, command.master)
        elif isinstance(command, Fill):
            self._shape = command.shape
            self._rows = make_rows(command.shape) if self._produces else []
            self._stamped = 0
            gc.freeze()  # what is loaded now stays: a collection before each step needs not look at it
        elif isinstance(command, Clear):
            self._ends[command.case].clear(command.partition)
        elif isinstance(command, Forget):
            self._rows = []
            self._kept.clear()
        gc.collect()
        return Ready()

    def _open(self, case: Case, master: str) -> None:
        assert self._setup is not None
        self._ends[case.name] = join(case, self._setup, master, produces=self._produces)

    def _put(self, command: Put) -> Moved:
        end = self._ends[command.case]
        if command.stamp != self._stamped:
            stamp(self._rows, self._shape, command.stamp)
            self._stamped, self._sent = command.stamp, digests(self._rows)
        indexes = end.prepare(self._rows, self._shape, command.partition)
        _, moved = _run(end, end.put, command.watch)
        return msgspec.structs.replace(moved, indexes=indexes, digests=self._sent)

    def _get(self, command: Get) -> Moved:
        assert self._setup is not None
        kept = self._kept[command.case]
        while len(kept) > self._setup.keep:
            kept.popleft()
        end = self._ends[command.case]
        found = end.look(self._shape, command.partition)
        rows, moved = _run(end, end.get, command.watch)
        by_index = dict(zip(found, rows, strict=True))
        kept.append(rows)
        check([by_index[index] for index in command.indexes], self._shape, command.digests)
        if moved.watched is None:
            return moved
        stored, encoded = end.stored()
        return msgspec.structs.replace(
            moved, watched=msgspec.structs.replace(moved.watched, stored_bytes=stored, encoded_rows=encoded)
        )


def _run(end: End, move: Callable[[], Any], watch: bool) -> tuple[Any, Moved]:
    gc.collect()
    before = end.rungs()
    if watch:
        from relax_tq_rdma.seams import tq_bare

        with watching(tq_bare.places_that_copy(), tq_bare.message_class()) as seen:
            result, moved = _time(move)
        watched = Watched(copied_bytes=seen.copied, message_bytes=seen.messages)
        moved = msgspec.structs.replace(moved, watched=watched)
    else:
        result, moved = _time(move)
    rungs = {rung: nbytes - before.get(rung, 0) for rung, nbytes in end.rungs().items()}
    return result, msgspec.structs.replace(moved, rungs=rungs)


def _time(move: Callable[[], Any]) -> tuple[Any, Moved]:
    with reading() as cost:
        began = time.perf_counter()
        result = move()
        seconds = time.perf_counter() - began
    return result, Moved(seconds=seconds, counters=cost.found)


class _Serving:
    """TransferQueue's controller or one of its storage units, served from threads of its own."""

    def __init__(self, role: str) -> None:
        from relax_tq_rdma.seams import tq_bare

        tq_bare.bind_loopback()
        self._served, info = tq_bare.controller() if role == "controller" else tq_bare.storage_unit()
        self._at = Server(id=info.id, ip=info.ip, ports=info.ports)

    def answer(self, command: Command) -> Answer:
        return Ready(server=self._at)


_ROLES: dict[str, Callable[[], _Worker | _Serving]] = {
    "producer": lambda: _Worker(produces=True),
    "consumer": lambda: _Worker(produces=False),
    "controller": lambda: _Serving("controller"),
    "unit": lambda: _Serving("unit"),
}


def main(argv: list[str]) -> NoReturn:
    role, parent = argv
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # it died before that: nobody would send the signal
        os._exit(1)
    out = os.dup(1)
    os.dup2(2, 1)
    make = _ROLES[role]
    made: _Worker | _Serving | None = None
    for line in sys.stdin.buffer:
        try:
            if made is None:
                made = make()
            answer = made.answer(msgspec.json.decode(line, type=Command))
        except Exception as exc:
            traceback.print_exc()
            answer = Failed(reason=str(exc) if isinstance(exc, DataplaneError) else f"{type(exc).__name__}: {exc}")
        os.write(out, msgspec.json.encode(answer) + b"\n")
    # The masters end with the run, and with them all that was stored: each store's own farewell would take seconds.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
