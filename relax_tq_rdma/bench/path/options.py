"""Command line of ``relax-tq-rdma bench path``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from relax_tq_rdma.bench import output
from relax_tq_rdma.bench.path.cases import NAMES, Case, chosen
from relax_tq_rdma.errors import UsageError
from relax_tq_rdma.usage import Parser, whole

PROG = "relax-tq-rdma bench path"
DESCRIPTION = """\
Measure what a batch costs from producer to consumer on each way: the engine's raw binding, TransferQueue without the
plugin, and with it layer by layer. All cases in turn in every repeat; every byte compared. Exit code: 0 all was
measured, 1 something was not (the reason is shown), 2 wrong usage."""
TIERS = (1, 4, 16, 64, 256, 512)


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure. ``tiers`` and ``pool`` in MiB; ``keep``: batches that the consumer holds on to."""

    tiers: list[int]
    rows: int
    copies: int
    shared: bool
    repeats: int
    keep: int
    pool: int
    memcpy: bool
    cases: list[Case]
    json: bool
    output: Path | None


def parse(argv: Sequence[str]) -> Options:
    """Parse and check the command line. ``--help`` prints and exits with 0.

    Raises:
        UsageError: an unknown flag or a bad value; the message names it.
    """
    args = _parser().parse_args(argv)
    cases = chosen(args.case or (), args.backend or (), args.dup)
    if not cases:
        raise UsageError(
            f"no case is left to measure: the cases of --case {', '.join(args.case or NAMES)} need "
            "another --backend, or --dup 8"
        )
    if args.rows % args.dup:
        raise UsageError(f"--rows {args.rows} cannot be cut into groups of --dup {args.dup}")
    if args.dup_shared and args.dup == 1:
        raise UsageError("--dup-shared needs copies: add --dup 8")
    output.check(args.output)
    return Options(
        tiers=sorted(set(args.tier or TIERS)),
        rows=args.rows,
        copies=args.dup,
        shared=args.dup_shared,
        repeats=args.repeats,
        keep=args.retain,
        pool=args.pool_mib,
        memcpy=args.memcpy == 1,
        cases=cases,
        json=args.json,
        output=args.output,
    )


def _parser() -> Parser:
    parser = Parser(prog=PROG, description=DESCRIPTION)
    add = parser.add_argument
    add(
        "--tier",
        type=whole(1, 4096),
        action="append",
        metavar="MIB",
        help=f"payload in MiB; may be given again (default: {', '.join(map(str, TIERS))})",
    )
    add("--rows", type=whole(1, 65536), default=64, metavar="N", help="rows of a batch (default: 64)")
    add(
        "--dup",
        type=whole(1, 64),
        default=1,
        metavar="N",
        help="equal copies of each row, as a group of samples of one prompt has (default: 1)",
    )
    add(
        "--dup-shared",
        action="store_true",
        help="the copies are the same tensors, as with --rollout-group-share-processor (default: equal, but separate)",
    )
    add("--repeats", type=whole(1, 1000), default=7, metavar="N", help="measured rounds of all cases (default: 7)")
    add(
        "--retain",
        type=whole(0, 64),
        default=1,
        metavar="N",
        help="batches that the consumer keeps alive, as the host does (default: 1)",
    )
    add("--backend", choices=("simple", "mooncake"), action="append", help="only cases of this backend")
    add(
        "--case",
        choices=NAMES,
        action="append",
        metavar="NAME",
        help=f"only this case; may be given again: {', '.join(NAMES)}",
    )
    add(
        "--pool-mib",
        type=whole(1, 65536),
        default=1024,
        metavar="MIB",
        help="--tq-host-staging-mb of the cases with a staging pool (default: 1024)",
    )
    add("--memcpy", type=int, choices=(0, 1), default=0, help="MC_STORE_MEMCPY of every process (default: 0)")
    add("--json", action="store_true", help="one JSON object on stdout (docs/reference/bench-path.md)")
    add("-o", "--output", type=Path, metavar="FILE", help="write the JSON object to a file, too")
    return parser
