"""Entry of ``relax-tq-rdma doctor``. Exit codes: 0 the job would start, 1 it would not, 2 wrong usage."""

from __future__ import annotations

import json

from relax_tq_rdma.doctor.options import parse


def run(argv: list[str]) -> int:
    """Run the doctor.

    Raises:
        UsageError: a wrong flag, value or root.
        StartError: ``--cluster`` without a cluster to look at.
    """
    options, settings = parse(argv)
    if options.explain_flags:
        from relax_tq_rdma.doctor.explain import explain, explained

        if options.json:
            print(json.dumps(explained(), indent=2))
        else:
            explain()
        return 0
    from relax_tq_rdma.doctor.examine import examine

    diagnosis = examine(options, settings)
    if options.json:
        from relax_tq_rdma.doctor.as_json import to_json

        print(json.dumps(to_json(diagnosis), indent=2))
    else:
        from relax_tq_rdma.doctor.render import render

        render(diagnosis)
    return 0 if diagnosis.ok else 1
