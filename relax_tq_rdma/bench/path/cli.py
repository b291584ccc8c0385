"""Entry of ``relax-tq-rdma bench path``. Exit codes: 0 all was measured, 1 something was not, 2 wrong usage."""

from __future__ import annotations

import json
import sys
import time

from relax_tq_rdma.bench.path.options import parse
from relax_tq_rdma.errors import StartError


def run(argv: list[str]) -> int:
    """Measure and show.

    Raises:
        UsageError: a wrong flag or value.
        DataplaneError: a process could not be started or has ended.
    """
    options = parse(argv)
    from relax_tq_rdma.bench.path.environment import check_memory, describe, estimate
    from relax_tq_rdma.bench.path.figures import document
    from relax_tq_rdma.bench.path.measure import measure
    from relax_tq_rdma.bench.path.report import show
    from relax_tq_rdma.demo import signals

    say = _Progress()
    check_memory(options)
    say(estimate(options))
    with signals.listening():
        result = measure(options, say)
    whole = document(describe(options), result.cases, result.limits)
    text = json.dumps(whole, indent=2)
    if options.json:
        print(text)
    else:
        show(whole, result)
    if options.output is not None:
        try:
            options.output.write_text(text + "\n", encoding="utf-8")
        except OSError as exc:
            raise StartError(f"-o {options.output} cannot be written: {(exc.strerror or str(exc)).lower()}") from None
    return 1 if any(case.not_measured for case in result.cases) else 0


class _Progress:
    """One line a step on stderr."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def __call__(self, text: str) -> None:
        print(f"[bench {time.monotonic() - self._began:5.0f} s] {text}", file=sys.stderr, flush=True)
