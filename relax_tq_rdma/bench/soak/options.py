"""Command line of ``relax-tq-rdma bench soak``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from relax_tq_rdma.bench import output
from relax_tq_rdma.bench.soak.content import KIB, MIB, Shape
from relax_tq_rdma.errors import UsageError
from relax_tq_rdma.usage import Parser, whole

PROG = "relax-tq-rdma bench soak"
DESCRIPTION = """\
Move random batches over Mooncake/TCP with normalise, dedup and host staging on, with consumers that hold on to what
they got, and compare every byte. Ends with a verdict: no error, nothing grew, everything came back. Exit code: 0 it
holds, 1 it does not, 2 wrong usage, 130 interrupted (what was measured until then is still shown)."""

_PUTS_IN_SEGMENT = 8


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What to run. Sizes in MiB; ``max_row`` in KiB; Means in seconds: ``pause`` between two puts,
    ``linger`` that a consumer takes for a batch. ``interval``: between samples."""

    seconds: float
    consumers: int
    pool_mib: int
    segment_mib: int
    max_row_kib: int
    keep: int
    pause: float
    linger: float
    interval: float
    seed: int
    json: bool
    output: Path | None

    @property
    def cache_mib(self) -> int:
        """Each process's cache of sources of deduplicated rows."""
        return max(16, self.pool_mib // 4)

    @property
    def recycled_mib(self) -> int:
        """Memory that each process keeps for copies of such rows."""
        return max(16, self.pool_mib // 2)

    @property
    def shape(self) -> Shape:
        return Shape(
            seed=self.seed,
            max_row=self.max_row_kib * KIB,
            put_bytes=self.segment_mib * MIB // _PUTS_IN_SEGMENT,
            oversized=self.pool_mib * MIB * 3 // 4 + MIB,
        )


def parse(argv: Sequence[str]) -> Options:
    """Parse and check the command line. ``--help`` prints and exits with 0.

    Raises:
        UsageError: an unknown flag or a bad value; the message names it.
    """
    args = _parser().parse_args(argv)
    output.check(args.output)
    if args.max_row_kib * KIB > args.pool_mib * MIB // 16:
        raise UsageError(
            f"--max-row-kib {args.max_row_kib} is more than a sixteenth of --pool-mib {args.pool_mib}: such rows may "
            "miss the pool by right, and the run could not tell that from a fault"
        )
    seconds = args.seconds if args.seconds is not None else args.minutes * 60
    return Options(
        seconds=seconds,
        consumers=args.consumers,
        pool_mib=args.pool_mib,
        segment_mib=2 * args.pool_mib,
        max_row_kib=args.max_row_kib,
        keep=args.keep,
        pause=args.pause_ms / 1000,
        linger=args.linger_ms / 1000,
        interval=args.interval or min(5.0, seconds / 60),
        seed=args.seed,
        json=args.json,
        output=args.output,
    )


def _parser() -> Parser:
    parser = Parser(prog=PROG, description=DESCRIPTION)
    add = parser.add_argument
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--minutes", type=whole(1, 24 * 60), default=30, metavar="N", help="how long to move batches (default: 30)"
    )
    length.add_argument("--seconds", type=whole(10, 24 * 3600), metavar="N", help="the same, in seconds")
    add("--consumers", type=int, choices=(1, 2), default=2, help="processes that share the batches (default: 2)")
    add(
        "--pool-mib",
        type=whole(64, 65536),
        default=512,
        metavar="MIB",
        help="--tq-host-staging-mb of each process; the producer's segment is twice that (default: 512)",
    )
    add(
        "--max-row-kib",
        type=whole(1, 1 << 20),
        default=16 * 1024,
        metavar="KIB",
        help="largest row; the smallest has 1 KiB (default: 16384)",
    )
    add(
        "--keep",
        type=whole(1, 1000),
        default=48,
        metavar="N",
        help="most batches that a consumer holds at one time (default: 48)",
    )
    add(
        "--pause-ms",
        type=whole(0, 60_000),
        default=0,
        metavar="MS",
        help="mean pause between two puts, to leave the machine to others (default: 0)",
    )
    add(
        "--linger-ms",
        type=whole(0, 60_000),
        default=200,
        metavar="MS",
        help="mean time that a consumer takes for a batch; it has two under way (default: 200)",
    )
    add(
        "--interval",
        type=whole(1, 600),
        metavar="S",
        help="seconds between samples (default: a sixtieth of the run, at most 5)",
    )
    add("--seed", type=whole(0, 2**31), default=1, metavar="N", help="of everything random (default: 1)")
    add("--json", action="store_true", help="one JSON object on stdout")
    add("-o", "--output", type=Path, metavar="FILE", help="write the JSON object to a file, too")
    return parser
