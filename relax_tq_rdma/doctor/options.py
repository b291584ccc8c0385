"""Command line of ``relax-tq-rdma doctor``: the job's own flags plus a few of the doctor's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from relax_tq_rdma import env
from relax_tq_rdma.errors import UsageError
from relax_tq_rdma.flags import add_arguments
from relax_tq_rdma.settings import Settings
from relax_tq_rdma.usage import Parser, positive

DESCRIPTION = """\
Look at this node (or, with --cluster, at every node of the Ray cluster) and say what a job with the given flags would
decide and why. Starts nothing that outlives the command. Exit code, as the job's own: 0 it would start (a degradation
is shown), 1 it would not, 2 wrong flags, or flags that cannot go together."""


@dataclass(frozen=True)
class Options:
    """The doctor's own flags. ``root`` is where the node's ``sys``, ``proc`` and ``dev`` are."""

    root: Path
    cluster: bool = False
    json: bool = False
    explain_flags: bool = False
    nodes: int = 1
    processes_per_node: int = 0


def parse(argv: Sequence[str]) -> tuple[Options, Settings]:
    """Parse and check the command line. ``--help`` prints and exits with 0.

    Raises:
        UsageError: an unknown flag (the message names the closest one), a bad value, or an unreadable root.
    """
    args = _parser().parse_args(argv)
    if args.cluster and args.root is not None:
        raise UsageError(
            f"--root is for one node and --cluster looks at all: drop one of them (a node of a cluster takes its root "
            f"from {env.SYSTEM_ROOT.name})"
        )
    if args.cluster and args.nodes is not None:
        raise UsageError("--nodes is for one node and --cluster counts the nodes itself: drop one of them")
    root = _folder(env.SYSTEM_ROOT.read(), env.SYSTEM_ROOT.name) if args.root is None else _folder(args.root, "--root")
    options = Options(
        root=root,
        cluster=args.cluster,
        json=args.json,
        explain_flags=args.explain_flags,
        nodes=args.nodes or 1,
        processes_per_node=args.processes_per_node,
    )
    return options, Settings.from_args(args)


def _parser() -> Parser:
    parser = Parser(prog="relax-tq-rdma doctor", description=DESCRIPTION)
    own = parser.add_argument_group("doctor")
    own.add_argument(
        "--cluster",
        action="store_true",
        help="look at every alive node of the running Ray cluster: that of RAY_ADDRESS, else the one on this machine",
    )
    own.add_argument(
        "--root",
        metavar="DIR",
        default=None,
        help="look at the sys, proc and dev trees below DIR instead of this machine's",
    )
    own.add_argument("--json", action="store_true", help="one JSON object on stdout (docs/reference/doctor.md)")
    own.add_argument(
        "--explain-flags", action="store_true", help="print every flag and the compatibility matrix, and end"
    )
    own.add_argument(
        "--nodes", type=positive, default=None, metavar="N", help="machines of the planned job (default: 1)"
    )
    own.add_argument(
        "--processes-per-node",
        type=positive,
        default=0,
        metavar="N",
        help="client processes of a node, for the memory plan (default: GPUs + 1, at least 2)",
    )
    add_arguments(parser)
    return parser


def _folder(text: str, source: str) -> Path:
    if not text:
        raise UsageError(f"{source}: no folder given")
    root = Path(text).expanduser()
    try:
        os.listdir(root)
    except OSError as exc:
        raise UsageError(f"{source} {text}: {(exc.strerror or str(exc)).lower()}") from None
    if not any((root / part).is_dir() for part in ("sys", "proc", "dev")):
        raise UsageError(f"{source} {text}: holds no sys, proc or dev folder")
    return root.resolve()
