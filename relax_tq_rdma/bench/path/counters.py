"""What a stretch of code costs its process, as the kernel and the engine's binding tell it."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil

from relax_tq_rdma.bench.path.messages import Counters

_PAGE = resource.getpagesize()
_RESET_PEAK = "5"  # proc(5), clear_refs


@dataclass
class Engine:
    """Calls of the engine's binding in this process, all clients together."""

    registrations: int = 0
    registered_bytes: int = 0
    moved_bytes: int = 0


@dataclass
class Reading:
    """Filled when the block of :func:`reading` ends."""

    found: Counters = field(init=False)


ENGINE = Engine()


def counted(native: Any) -> Any:
    """The engine's store class, with its calls counted in :data:`ENGINE`."""

    class Counted(native):  # type: ignore[misc]
        def register_buffer(self, buffer_ptr: int, size: int) -> Any:
            ENGINE.registrations += 1
            ENGINE.registered_bytes += size
            return super().register_buffer(buffer_ptr, size)

        def batch_upsert_from(self, keys: Any, pointers: Any, sizes: Any, *more: Any, **named: Any) -> Any:
            ENGINE.moved_bytes += sum(sizes)
            return super().batch_upsert_from(keys, pointers, sizes, *more, **named)

        def batch_get_into(self, keys: Any, pointers: Any, sizes: Any, *more: Any, **named: Any) -> Any:
            ENGINE.moved_bytes += sum(sizes)
            return super().batch_get_into(keys, pointers, sizes, *more, **named)

    return Counted


@contextmanager
def reading() -> Iterator[Reading]:
    """Count what happens in the block, in all threads of this process."""
    result, process = Reading(), psutil.Process()
    with open("/proc/self/clear_refs", "w", encoding="ascii") as peak:
        peak.write(_RESET_PEAK)
    rss = process.memory_info().rss
    engine = Engine(ENGINE.registrations, ENGINE.registered_bytes, ENGINE.moved_bytes)
    before = resource.getrusage(resource.RUSAGE_SELF)
    yield result
    after = resource.getrusage(resource.RUSAGE_SELF)
    peak_rss = max(_peak_rss(), rss)
    result.found = Counters(
        registrations=ENGINE.registrations - engine.registrations,
        registered_bytes=ENGINE.registered_bytes - engine.registered_bytes,
        moved_bytes=ENGINE.moved_bytes - engine.moved_bytes,
        # A fault of a huge page counts as one of a small page; then the growth tells more.
        fresh_bytes=max((after.ru_minflt - before.ru_minflt) * _PAGE, peak_rss - rss),
        rss_before=rss,
        rss_peak=peak_rss,
        cpu_s=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    )


def _peak_rss() -> int:
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        line = next(line for line in status if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
