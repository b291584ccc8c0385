"""Entry of ``relax-tq-rdma demo``.

Exit codes: 0 ok; 1 the job or the comparison failed; 2 usage; 130 Ctrl-C, 143 SIGTERM (all it started is gone then).
"""

from __future__ import annotations

import signal
import sys

from relax_tq_rdma.demo import signals
from relax_tq_rdma.demo.options import Options, parse
from relax_tq_rdma.settings import Settings
from relax_tq_rdma.words import count


def run(argv: list[str]) -> int:
    """Run a demo; returns the exit code.

    Raises:
        UsageError: a wrong flag.
        DataplaneError: the job failed.
    """
    options, settings = parse(argv)
    try:
        with signals.listening():
            return _run(argv, options, settings)
    except KeyboardInterrupt:
        if not options.is_driver:  # the process in front says it
            print(f"relax-tq-rdma: {'terminated' if signals.was_terminated() else 'interrupted'}", file=sys.stderr)
        return 128 + (signal.SIGTERM if signals.was_terminated() else signal.SIGINT)


def _run(argv: list[str], options: Options, settings: Settings) -> int:
    if options.compare:
        from relax_tq_rdma.demo.compare import compare

        return compare(argv, options)
    if options.is_driver:
        return _drive(options, settings)
    from relax_tq_rdma.demo.session import run_driver

    return run_driver(argv)[0]


def _drive(options: Options, settings: Settings) -> int:
    from relax_tq_rdma.demo.job import run_job
    from relax_tq_rdma.demo.output import Reporter, print_json

    report = Reporter(json=options.json, quiet=options.quiet)
    result = run_job(options, settings, report)
    report.line(
        f"done: {count(options.steps, 'step')}, loss {result.losses[0]:+.6f} -> {result.losses[-1]:+.6f}, "
        f"payload digest {result.payload_digest}"
    )
    if options.json:
        print_json(result.to_json())
    return 0
