"""Entry of ``relax-tq-rdma demo``. Exit codes: 0 ok, 1 the job or the comparison failed, 2 usage."""

from __future__ import annotations

import signal
import sys

from relax_tq_rdma.demo import signals
from relax_tq_rdma.demo.options import Options, parse
from relax_tq_rdma.settings import Settings


def run(argv: list[str]) -> int:
    """Run a demo.

    Raises:
        UsageError: a wrong flag.
        DataplaneError: the job failed.
        KeyboardInterrupt: Ctrl-C; everything the job started is gone. After SIGTERM that is 143 instead.
    """
    options, settings = parse(argv)
    try:
        with signals.listening():
            return _run(argv, options, settings)
    except signals.Terminated:
        print("relax-tq-rdma: terminated", file=sys.stderr)
        return 128 + signal.SIGTERM


def _run(argv: list[str], options: Options, settings: Settings) -> int:
    if options.compare:
        from relax_tq_rdma.demo.compare import compare

        return compare(argv, options)
    from relax_tq_rdma.demo.job import run_job
    from relax_tq_rdma.demo.output import Reporter, print_json

    report = Reporter(json=options.json, quiet=options.quiet)
    result = run_job(options, settings, report)
    report.line(
        f"done: {options.steps} steps, loss {result.losses[0]:+.6f} -> {result.losses[-1]:+.6f}, "
        f"payload digest {result.payload_digest}"
    )
    if options.json:
        print_json(result.to_json())
    return 0
