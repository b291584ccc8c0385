"""A producer or consumer of a soak: ``python -m relax_tq_rdma.bench.soak.worker ROLE PARENT``.

Commands come on stdin, answers go to stdout; what libraries print goes to stderr. Commands run side by side, in
:data:`LANES` threads. The end of stdin is the end.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec

from relax_tq_rdma.bench.path.cases import Case
from relax_tq_rdma.bench.path.config import backend_config
from relax_tq_rdma.bench.path.counters import ENGINE, counted
from relax_tq_rdma.bench.path.messages import Setup
from relax_tq_rdma.bench.soak.content import Content, Mismatch, RowPlan, plan_step
from relax_tq_rdma.bench.soak.messages import (
    Answer,
    Clear,
    Command,
    Count,
    Counts,
    Done,
    Drop,
    Failed,
    Get,
    Join,
    Put,
)
from relax_tq_rdma.errors import DataplaneError

LANES = 2
"""Puts, or gets, that one process has under way at the same time."""

LAYERS = {"normalize_multimodal": True, "dedup_multimodal": True, "host_staging": True}

_IMAGES, _TOKENS, _ROW, _TEXT = "multimodal_train_inputs", "tokens", "row", "prompt"
_TASK = "soak"
_REDRAW = 1 / 12
"""How often a consumer changes its mind about how much it holds: it must stay at its cap for a while, and off it."""
_PR_SET_PDEATHSIG = 1


@dataclass
class _Kept:
    """A batch that is held: plans and values."""

    plans: list[RowPlan]
    values: list[Any]
    nbytes: int


class _End:
    def __init__(self, join: Join, role: str) -> None:
        import relax_tq_rdma
        from relax_tq_rdma.seams import tq_bare

        relax_tq_rdma.install()  # as in every worker of a job: the section in a config decides
        tq_bare.bind_loopback()
        tq_bare.replace_mooncake_store(counted)
        at = join.controller
        setup = Setup(controller=at, units=[], segment_mib=join.segment_mib, pool_mib=join.pool_mib, keep=join.keep)
        case = Case(name="soak", backend="mooncake", settings=LAYERS)
        name, config = backend_config(case, setup, join.master, produces=role == "producer")
        controller = tq_bare.controller_at(at.id, at.ip, at.ports)
        self._client: Any = tq_bare.client(f"soak-{role}", controller, name, config)
        self._shape, self._content = join.shape, Content(join.shape)
        self._dice = random.Random(f"{join.shape.seed}/{role}")
        self._most, self._wanted, self._was_full = join.keep, join.keep, False
        self._kept: deque[_Kept] = deque()
        self._lock = threading.Lock()

    def put(self, command: Put) -> Done:
        import torch
        from tensordict import NonTensorStack, TensorDict

        plans = plan_step(self._shape, command.step)[command.part]
        values = self._content.values([plan.payload for plan in plans])
        tokens = [self._content.tokens(plan) for plan in plans]
        names = [(command.step, command.part, number) for number in range(len(plans))]
        nbytes = sum(self._content.check(plan.payload, value) for plan, value in zip(plans, values, strict=True))
        nbytes += sum(self._content.check_tokens(plan, own) for plan, own in zip(plans, tokens, strict=True))
        data = TensorDict(
            {
                _IMAGES: NonTensorStack(*values),
                _TOKENS: torch.nested.as_nested_tensor(tokens, layout=torch.jagged),
                _ROW: torch.tensor(names),
                _TEXT: NonTensorStack(*map(_text, names)),
            },
            batch_size=len(plans),
        )
        self._client.put(data, partition_id=_partition(command.step))
        return Done(id=command.id, nbytes=nbytes)

    def get(self, command: Get) -> Done:
        from relax_tq_rdma.staging.columns import rows_of

        began = time.monotonic()
        fields = [_IMAGES, _TOKENS, _ROW, _TEXT]
        meta = self._client.get_meta(fields, command.rows, _partition(command.step), mode="fetch", task_name=_TASK)
        data = self._client.get_data(meta)
        values = rows_of(data, _IMAGES)
        if values is None or len(values) != command.rows:
            raise Mismatch(f"step {command.step}: {data} instead of {command.rows} rows")
        names = [tuple(one.tolist()) for one in data[_ROW].unbind()]
        texts = data.get(_TEXT).tolist()
        puts = plan_step(self._shape, command.step)
        plans, sizes, own = [], 0, 0
        for name, text, value, tokens in zip(names, texts, values, data[_TOKENS].unbind(), strict=True):
            step, part, number = name
            if step != command.step or text != _text(name):
                raise Mismatch(f"step {command.step}: row {name} with text {text!r}")
            plan = puts[part][number]
            try:
                sizes += self._content.check(plan.payload, value)
                own += self._content.check_tokens(plan, tokens)
            except Mismatch as exc:
                raise Mismatch(f"{_text(name)}: {exc}") from None
            plans.append(plan)
        rechecked = self._keep(_Kept(plans, values, sizes))
        del data, values, value, tokens
        time.sleep(max(0.0, command.seconds - (time.monotonic() - began)))
        return Done(
            id=command.id, rows=[(part, number) for _, part, number in names], nbytes=sizes + own, rechecked=rechecked
        )

    def clear(self, command: Clear) -> Done:
        self._client.clear_partition(_partition(command.step))
        return Done(id=command.id)

    def drop(self, command: Drop) -> Done:
        rechecked = self._let_go(0)
        gc.collect()
        return Done(id=command.id, rechecked=rechecked)

    def counts(self, command: Count) -> Counts:
        with self._lock:
            kept = list(self._kept)
        staging = self._client.storage_manager.storage_client.staging_counts()
        return Counts(
            id=command.id,
            kept=len(kept),
            kept_bytes=sum(batch.nbytes for batch in kept),
            capacity=staging.capacity,
            held=staging.held,
            peak=staging.peak,
            retired=staging.retired + staging.retired_regions,
            misses=staging.misses,
            registrations=ENGINE.registrations,
            allocations=staging.allocations,
            allocated=staging.allocated,
            spare=staging.spare,
            rungs={f"{way}/{rung}": (moved.values, moved.nbytes) for (way, rung), moved in staging.rungs.items()},
        )

    def _keep(self, batch: _Kept) -> int:
        """Hold a batch, and let go of the oldest ones that are too many. Returns bytes compared again."""
        with self._lock:
            self._kept.append(batch)
            # All it may hold comes first, so that the most memory that a run needs is no growth later in it.
            self._was_full = self._was_full or len(self._kept) >= self._most
            if self._was_full and self._dice.random() < _REDRAW:
                self._wanted = self._dice.randint(0, self._most)
            wanted = self._wanted
        return self._let_go(wanted)

    def _let_go(self, wanted: int) -> int:
        rechecked = 0
        while True:
            with self._lock:
                if len(self._kept) <= wanted:
                    return rechecked
                batch = self._kept.popleft()
            for plan, value in zip(batch.plans, batch.values, strict=True):
                try:
                    rechecked += self._content.check(plan.payload, value)
                except Mismatch as exc:
                    raise Mismatch(f"a row changed while it was held: {exc}") from None


def _partition(step: int) -> str:
    return f"soak_{step}"


def _text(name: Sequence[int]) -> str:
    return "step {}, put {}, row {}".format(*name)


class _Worker:
    """Reads commands, answers them in any order."""

    def __init__(self, role: str, out: int) -> None:
        self._role, self._out = role, out
        self._end: _End | None = None
        self._writing = threading.Lock()
        self._lanes = ThreadPoolExecutor(LANES, thread_name_prefix="lane")

    def take(self, command: Command) -> None:
        if isinstance(command, Join | Count):
            self._run(command)
        else:
            self._lanes.submit(self._run, command)

    def _run(self, command: Command) -> None:
        try:
            answer = self._do(command)
        except Exception as exc:
            traceback.print_exc()
            known = isinstance(exc, DataplaneError | Mismatch)
            answer = Failed(id=command.id, reason=str(exc) if known else f"{type(exc).__name__}: {exc}")
        line = msgspec.json.encode(answer) + b"\n"
        with self._writing:
            while line:
                line = line[os.write(self._out, line) :]

    def _do(self, command: Command) -> Answer:
        if isinstance(command, Join):
            self._end = _End(command, self._role)
            return Done(id=command.id)
        assert self._end is not None
        if isinstance(command, Put):
            return self._end.put(command)
        if isinstance(command, Get):
            return self._end.get(command)
        if isinstance(command, Clear):
            return self._end.clear(command)
        if isinstance(command, Drop):
            return self._end.drop(command)
        return self._end.counts(command)


def main(argv: list[str]) -> NoReturn:
    role, parent = argv
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # it died before that: nobody would send the signal
        os._exit(1)
    out = os.dup(1)
    os.dup2(2, 1)
    worker = _Worker(role, out)
    for line in sys.stdin.buffer:
        worker.take(msgspec.json.decode(line, type=Command))
    # The master ends with the run, and with it all that was stored: the store's own farewell would take seconds.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
