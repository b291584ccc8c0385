"""Command line of ``relax-tq-rdma bench path``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from relax_tq_rdma.bench.path.cases import NAMES, Case, chosen
from relax_tq_rdma.errors import UsageError

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
    args = _parser().parse_args(list(argv))
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
    if args.output is not None and args.output.is_dir():
        raise UsageError(f"-o {args.output}: a folder, not a file")
    if args.output is not None and not args.output.absolute().parent.is_dir():
        raise UsageError(f"-o {args.output}: there is no folder {args.output.absolute().parent}")
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


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message.removeprefix('argument ')} (see {PROG} --help)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROG, description=DESCRIPTION, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--tier",
        type=_number(1, 4096),
        action="append",
        metavar="MIB",
        help=f"payload in MiB; may be given again (default: {', '.join(map(str, TIERS))})",
    )
    add("--rows", type=_number(1, 65536), default=64, metavar="N", help="rows of a batch (default: 64)")
    add(
        "--dup",
        type=_number(1, 64),
        default=1,
        metavar="N",
        help="equal copies of each row, as a group of samples of one prompt has (default: 1)",
    )
    add(
        "--dup-shared",
        action="store_true",
        help="the copies are the same tensors, as with --rollout-group-share-processor (default: equal, but separate)",
    )
    add("--repeats", type=_number(1, 1000), default=7, metavar="N", help="measured rounds of all cases (default: 7)")
    add(
        "--retain",
        type=_number(0, 64),
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
        type=_number(1, 65536),
        default=1024,
        metavar="MIB",
        help="--tq-host-staging-mb of the cases with a staging pool (default: 1024)",
    )
    add("--memcpy", type=int, choices=(0, 1), default=0, help="MC_STORE_MEMCPY of every process (default: 0)")
    add("--json", action="store_true", help="one JSON object on stdout (docs/reference/bench-path.md)")
    add("-o", "--output", type=Path, metavar="FILE", help="write the JSON object to a file, too")
    return parser


def _number(lowest: int, highest: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not (text.isascii() and text.isdigit() and lowest <= int(text) <= highest):
            raise argparse.ArgumentTypeError(f"expected a whole number from {lowest} to {highest}, got {text!r}")
        return int(text)

    return number
