"""Entry of ``relax-tq-rdma doctor``. Exit codes are the job's own: 0 it would start, 1 it would not, 2 wrong flags."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from relax_tq_rdma.doctor.options import parse
from relax_tq_rdma.errors import StartError


def run(argv: list[str]) -> int:
    """Run the doctor.

    Raises:
        UsageError: a wrong flag, value or root.
        StartError: ``--cluster`` without a cluster to look at, or the result cannot be written.
    """
    options, settings = parse(argv)
    if options.explain_flags:
        from relax_tq_rdma.doctor.explain import explain, explained

        with _delivering():
            if options.json:
                print(json.dumps(explained(), indent=2))
            else:
                explain()
        return 0
    from relax_tq_rdma.doctor.as_json import to_json
    from relax_tq_rdma.doctor.examine import examine
    from relax_tq_rdma.doctor.render import render

    diagnosis = examine(options, settings)
    with _delivering():
        if options.json:
            print(json.dumps(to_json(diagnosis), indent=2))
        else:
            render(diagnosis)
    return diagnosis.exit_code


@contextmanager
def _delivering() -> Iterator[None]:
    """A full disk behind stdout is one sentence, not a stack trace, and not an exit code of 0."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as exc:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the last flush of Python fails again
        raise StartError(f"the result cannot be written: {(exc.strerror or str(exc)).lower()}") from None
