"""Entry of ``relax-tq-rdma bench path``. Exit codes: 0 all was measured, 1 something was not, 2 wrong usage."""

from __future__ import annotations

import json
import sys
import time

from relax_tq_rdma.bench import output
from relax_tq_rdma.bench.path.options import parse


def run(argv: list[str]) -> int:
    """Measure and show.

    Raises:
        UsageError: a wrong flag or value.
        DataplaneError: a process could not be started or has ended.
    """
    options = parse(argv)
    from relax_tq_rdma.bench.path.environment import check_memory, describe, estimate, warnings
    from relax_tq_rdma.bench.path.figures import document
    from relax_tq_rdma.bench.path.measure import measure
    from relax_tq_rdma.bench.path.report import show
    from relax_tq_rdma.demo import signals

    say = _Progress()
    check_memory(options)
    say(estimate(options))
    for warning in warnings(options):
        say(f"WARNING {warning}")
    with signals.listening():
        result = measure(options, say)
    whole = document(describe(options), result.cases, result.limits)
    text = json.dumps(whole, indent=2)
    if options.json:
        print(text)
    else:
        show(whole, result)
    output.write(options.output, text)
    return 1 if any(case.not_measured for case in result.cases) else 0


class _Progress:
    """One line a step on stderr."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def __call__(self, text: str) -> None:
        print(f"[bench {time.monotonic() - self._began:5.0f} s] {text}", file=sys.stderr, flush=True)
