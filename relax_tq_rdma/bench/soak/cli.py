"""Entry of ``relax-tq-rdma bench soak``. Exit codes: 0 it holds, 1 it does not, 2 wrong usage, 130 interrupted."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from relax_tq_rdma.bench import output
from relax_tq_rdma.bench.soak.options import Options, parse
from relax_tq_rdma.errors import StartError
from relax_tq_rdma.words import duration

_INTERRUPTED = 130
_PROCESSES_MIB = 2048


def run(argv: list[str]) -> int:
    """Soak and show.

    Raises:
        UsageError: a wrong flag or value.
        DataplaneError: a process could not be started.
    """
    options = parse(argv)
    from relax_tq_rdma.bench.soak.drive import Result, soak
    from relax_tq_rdma.bench.soak.report import document, environment, show
    from relax_tq_rdma.demo import signals

    _check_memory(options)
    say = _Progress()
    say(f"{duration(options.seconds)} of load, then all is read; to start, and to end, takes about half a minute more")
    result, surroundings = Result(), environment()
    try:
        with signals.listening():
            soak(options, say, result)
    except KeyboardInterrupt:
        result.interrupted = True
    whole = document(options, result, surroundings)
    text = json.dumps(whole, indent=2)
    if options.json:
        print(text)
    else:
        show(options, result)
    output.write(options.output, text)
    if result.interrupted:
        return _INTERRUPTED
    return 0 if whole["verdict"]["ok"] else 1


def _check_memory(options: Options) -> None:
    """Refuse what would bring the machine to its knees.

    Raises:
        StartError: with what is needed, what there is, and how to need less.
    """
    from relax_tq_rdma.transport.host_checks import available_memory
    from relax_tq_rdma.transport.sysfs import Tree

    need, (free, _) = need_mib(options) << 20, available_memory(Tree(Path("/")))
    if free is not None and need > free:
        raise StartError(
            f"the run may need {need / 2**30:.1f} GiB of memory and {free / 2**30:.1f} GiB are available: choose a "
            f"smaller --pool-mib than {options.pool_mib}, or fewer --consumers"
        )


def need_mib(options: Options) -> int:
    """At most: segment, and of each end its pool, its spare memory, its caches, and what is in work or held."""
    each = 3 * options.pool_mib + options.cache_mib + options.recycled_mib
    return options.segment_mib + (options.consumers + 1) * each + _PROCESSES_MIB


class _Progress:
    """One line a step on stderr."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def __call__(self, text: str) -> None:
        print(f"[soak {time.monotonic() - self._began:5.0f} s] {text}", file=sys.stderr, flush=True)
