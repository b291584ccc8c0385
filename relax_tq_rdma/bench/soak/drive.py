"""The run: keeps every process busy, takes samples, and at the end has everything given back."""

from __future__ import annotations

import random
import selectors
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import psutil

from relax_tq_rdma.bench.soak.content import MAX_ROWS, plan_step
from relax_tq_rdma.bench.soak.ends import End, EndGone
from relax_tq_rdma.bench.soak.messages import (
    Answer,
    Clear,
    Command,
    Count,
    Counts,
    Drop,
    Failed,
    Get,
    Join,
    Put,
)
from relax_tq_rdma.bench.soak.options import Options
from relax_tq_rdma.bench.soak.sample import Sample, store, usage
from relax_tq_rdma.bench.soak.schedule import Disorder, Schedule
from relax_tq_rdma.bench.soak.stage import Stage, staged
from relax_tq_rdma.bench.soak.worker import LANES

Say = Callable[[str], None]

_JOIN_SECONDS = 120.0
_STILL_SECONDS = 240.0
"""Without any answer for so long nothing will come any more: longer than every deadline of the plugin itself."""

_COUNT_SECONDS = 60.0
_PROGRESS_SECONDS = 10.0


class Fault(Exception):
    """Something went wrong that must not; one sentence."""


class Totals(msgspec.Struct, kw_only=True):
    """What was done. Bytes are of rows as callers see them, with every copy."""

    puts: int = 0
    gets: int = 0
    steps: int = 0
    rows_put: int = 0
    rows_read: int = 0
    bytes_put: int = 0
    bytes_checked: int = 0
    bytes_rechecked: int = 0


@dataclass
class Result:
    """What a run has found so far; complete when ``final`` is there.

    Attributes:
        seconds: from the first put to the last clear.
        final: taken when all steps were cleared and the consumers had let go of everything.
    """

    totals: Totals = field(default_factory=Totals)
    samples: list[Sample] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    final: Sample | None = None
    seconds: float = 0.0
    interrupted: bool = False


def soak(options: Options, say: Say, result: Result) -> None:
    """Run, and fill ``result`` while it goes on. Processes are gone when it returns or raises.

    Raises:
        DataplaneError: a process could not be started.
        KeyboardInterrupt: as it comes; ``result`` then has what was found until then.
    """
    with staged(options, say) as stage:
        run = _Run(stage, options, say, result)
        try:
            run.join()
            run.move()
            run.give_back()
        except (Fault, EndGone, Disorder, OSError, ValueError, psutil.Error) as exc:
            result.faults.append(str(exc) or type(exc).__name__)
            stage.keep_logs = True


class _Run:
    def __init__(self, stage: Stage, options: Options, say: Say, result: Result) -> None:
        self._stage, self._options, self._say, self._result = stage, options, say, result
        self._shape = options.shape
        self._sizes: dict[int, list[int]] = {}
        self._schedule = Schedule(self._sizes_of)
        self._dice = random.Random(f"{options.seed}/driver")
        self._next = 0
        self._asked: dict[int, tuple[End, Command]] = {}
        self._busy: Counter[str] = Counter()
        self._counts: dict[int, Counts] = {}
        self._heard = time.monotonic()
        self._began = 0.0
        self._next_put = 0.0
        self._next_sample = 0.0
        self._next_word = 0.0
        self._selector = selectors.DefaultSelector()
        for end in stage.ends:
            self._selector.register(end, selectors.EVENT_READ)

    def join(self) -> None:
        """Let all ends join the store."""
        at = self._options
        for end in self._stage.ends:
            self._tell(
                end,
                Join(
                    id=self._number(),
                    controller=self._stage.server,
                    master=self._stage.master.address,
                    shape=self._shape,
                    segment_mib=at.segment_mib,
                    pool_mib=at.pool_mib,
                    keep=at.keep,
                ),
            )
        self._wait(lambda: not self._asked, _JOIN_SECONDS, "join the store")

    def move(self) -> None:
        """Put, get and clear until the time is over and every step that was begun is gone."""
        self._began = self._heard = time.monotonic()
        ends = self._began + self._options.seconds
        while not (self._schedule.is_done and not self._asked):
            now = time.monotonic()
            if now >= ends:
                self._schedule.stop()
            if now >= self._next_sample:
                self._next_sample = now + self._options.interval
                self._result.samples.append(self._sample())
                self._tell_progress(now)
            self._dispatch(now)
            self._listen(0.05)
            self._result.seconds = time.monotonic() - self._began
            if time.monotonic() - self._heard > _STILL_SECONDS:
                raise Fault(self._stuck())

    def give_back(self) -> None:
        """Have the consumers let go of everything, and look at what is left."""
        self._say("every step is read and cleared: the consumers let go of what they hold")
        for end in self._stage.consumers:
            self._tell(end, Drop(id=self._number()))
        self._wait(lambda: not self._asked, _COUNT_SECONDS, "let go of their batches")
        self._result.final = self._sample()

    # --- one turn -----------------------------------------------------------------------------------------------------

    def _dispatch(self, now: float) -> None:
        rank0, producer = self._stage.consumers[0], self._stage.producer
        while (step := self._schedule.clear()) is not None:
            self._tell(rank0, Clear(id=self._number(), step=step))  # in the host, the first rank of the actor does it
        while now >= self._next_put and self._busy[producer.name] < LANES and (put := self._schedule.put()) is not None:
            self._tell(producer, Put(id=self._number(), step=put[0], part=put[1]))
            self._next_put = now + self._dice.uniform(0, 2 * self._options.pause)
        for end in self._stage.consumers:
            while self._busy[end.name] < LANES and (got := self._schedule.get(self._dice.randint(1, MAX_ROWS))):
                seconds = self._dice.uniform(0, 2 * self._options.linger)
                self._tell(end, Get(id=self._number(), step=got[0], rows=got[1], seconds=seconds))

    def _tell(self, end: End, command: Command) -> None:
        self._asked[command.id] = (end, command)
        self._busy[end.name] += isinstance(command, Put | Get)
        end.tell(command)

    def _listen(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            end = key.fileobj
            assert isinstance(end, End)
            for answer in end.hear():
                self._take(answer)

    def _take(self, answer: Answer) -> None:
        end, command = self._asked.pop(answer.id)
        self._busy[end.name] -= isinstance(command, Put | Get)
        if isinstance(answer, Failed):
            raise Fault(f"{end.name}: {type(command).__name__.lower()}: {answer.reason}")
        if isinstance(answer, Counts):
            self._counts[answer.id] = answer
            return
        self._heard = time.monotonic()
        totals = self._result.totals
        totals.bytes_rechecked += answer.rechecked
        if isinstance(command, Put):
            self._schedule.stored(command.step, command.part)
            totals.puts += 1
            totals.rows_put += self._sizes[command.step][command.part]
            totals.bytes_put += answer.nbytes
        elif isinstance(command, Get):
            self._schedule.arrived(command.step, answer.rows)
            totals.gets += 1
            totals.rows_read += len(answer.rows)
            totals.bytes_checked += answer.nbytes
        elif isinstance(command, Clear):
            self._schedule.cleared(command.step)
            self._sizes.pop(command.step)
            totals.steps += 1

    # --- samples ------------------------------------------------------------------------------------------------------

    def _sample(self) -> Sample:
        wanted: dict[str, int] = {}
        for end in self._stage.ends:
            wanted[end.name] = self._number()
            self._tell(end, Count(id=wanted[end.name]))
        self._wait(lambda: self._counts.keys() >= set(wanted.values()), _COUNT_SECONDS, "say how they are")
        failure = self._stage.master.failure()
        if failure:
            raise Fault(failure)
        pids = {**self._stage.pids, "driver": psutil.Process().pid}
        return Sample(
            at=round(time.monotonic() - self._began, 2),
            steps=self._schedule.cleared_steps,
            warm=self._schedule.first_is_gone,
            processes={name: usage(pid) for name, pid in pids.items()},
            ends={name: self._counts.pop(number) for name, number in wanted.items()},
            store=store(self._stage.master.metrics_address),
        )

    def _tell_progress(self, now: float) -> None:
        if now < self._next_word:
            return
        self._next_word = now + _PROGRESS_SECONDS
        sample, totals = self._result.samples[-1], self._result.totals
        held = ", ".join(f"{end.held >> 20} of {end.capacity >> 20} MiB" for _, end in sorted(sample.ends.items())[:-1])
        self._say(
            f"{now - self._began:.0f} of {self._options.seconds:.0f} s: {totals.steps} steps, {totals.rows_read} rows, "
            f"{totals.bytes_checked / 1e9:.1f} GB checked; lent {held}; store {sample.store.nbytes >> 20} MiB"
        )

    # --- waiting ------------------------------------------------------------------------------------------------------

    def _wait(self, done: Callable[[], bool], seconds: float, what: str) -> None:
        ends = time.monotonic() + seconds
        while not done():
            if time.monotonic() > ends:
                raise Fault(f"the processes did not {what} within {seconds:.0f} s: {self._stuck()}")
            self._listen(0.05)

    def _stuck(self) -> str:
        waiting = [f"{end.name}: {command}" for end, command in self._asked.values()]
        words = [f"{end.name}: {end.last_words()}" for end in self._stage.ends]
        still = f"nothing has come for {time.monotonic() - self._heard:.0f} s"
        return "; ".join([still, *(waiting or ["no command is under way"]), *words])

    def _number(self) -> int:
        self._next += 1
        return self._next

    def _sizes_of(self, step: int) -> list[int]:
        self._sizes[step] = [len(rows) for rows in plan_step(self._shape, step)]
        return self._sizes[step]
