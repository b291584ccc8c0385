"""Entry of ``relax-tq-rdma doctor``. Exit codes are the job's own: 0 it would start, 1 it would not, 2 wrong flags."""

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
    from relax_tq_rdma.doctor.as_json import to_json
    from relax_tq_rdma.doctor.examine import examine
    from relax_tq_rdma.doctor.render import render

    diagnosis = examine(options, settings)
    if options.json:
        print(json.dumps(to_json(diagnosis), indent=2))
    else:
        render(diagnosis)
    return diagnosis.exit_code
