"""Entry of ``relax-tq-rdma demo``. Exit codes: 0 ok, 1 the job or the comparison failed, 2 usage."""

from __future__ import annotations

from relax_tq_rdma.demo import signals
from relax_tq_rdma.demo.options import parse


def run(argv: list[str]) -> int:
    """Run a demo.

    Raises:
        UsageError: a wrong flag.
        DataplaneError: the job failed.
        KeyboardInterrupt: Ctrl-C or SIGTERM; everything the job started is gone.
    """
    options, settings = parse(argv)
    with signals.listening():
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
