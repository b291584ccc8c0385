"""Command line of ``relax-tq-rdma demo``. Light: parses and checks before anything heavy is imported."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field

from relax_tq_rdma.demo.mesh import Mesh
from relax_tq_rdma.errors import UsageError
from relax_tq_rdma.flags import add_arguments
from relax_tq_rdma.settings import Settings
from relax_tq_rdma.transport import address
from relax_tq_rdma.usage import Parser

MAX_STAGES = 4  # layers of the model
MAX_TP = 8
DRIVER = "--in-own-session"
"""Internal: this process is the job's driver (see ``session.py``)."""

IMAGE_TOKENS = (4, 16384)  # the image processor's own limits

DESCRIPTION = """\
Run a small fully-async RL job on real photographs through real TransferQueue: a rollout actor makes GRPO groups with
transformers' Qwen2-VL image processor, a cohort of trainer ranks fetches the rows as Relax does and takes optimiser
steps. Needs no GPU, no download and no running Ray. Exit code: 0 ok, 1 the job or the comparison failed, 2 wrong flags,
130 Ctrl-C, 143 SIGTERM."""


@dataclass(frozen=True)
class Options:
    """The job's own flags; those of the plugin are in :class:`~relax_tq_rdma.settings.Settings`."""

    steps: int = 4
    prompts: int = 4
    samples_per_prompt: int = 4
    image_max_tokens: int = 256
    seed: int = 0
    mesh: Mesh = field(default_factory=lambda: Mesh(tp=2))
    num_data_storage_units: int = 1
    max_staleness: int = 1
    per_rank_fetch: bool = False
    ray_address: str = ""
    json: bool = False
    compare: bool = False
    quiet: bool = False
    is_driver: bool = False

    @property
    def rows_per_step(self) -> int:
        return self.prompts * self.samples_per_prompt


def parse(argv: Sequence[str]) -> tuple[Options, Settings]:
    """Parse and check all flags. ``--help`` prints and exits with 0.

    Raises:
        UsageError: unknown flag (the message names the closest one), bad value or impossible combination.
    """
    args = _parser().parse_args(argv)
    options = Options(
        steps=args.steps,
        prompts=args.prompts,
        samples_per_prompt=args.samples_per_prompt,
        image_max_tokens=args.image_max_tokens,
        seed=args.seed,
        mesh=Mesh(tp=args.tp, cp=args.cp, dp=args.dp, pp=args.pp),
        num_data_storage_units=args.num_data_storage_units,
        max_staleness=args.max_staleness,
        per_rank_fetch=args.per_rank_fetch,
        ray_address=args.ray_address,
        json=args.json,
        compare=args.compare,
        quiet=args.quiet,
        is_driver=args.in_own_session,
    )
    _check(options)
    return options, Settings.from_args(args)


def without_plugin(argv: Sequence[str]) -> list[str]:
    """``argv`` without the plugin's flags and their values: today's path for the same job."""
    parser = Parser(add_help=False)
    add_arguments(parser)
    return parser.parse_known_args(list(argv))[1]


def _parser() -> Parser:
    default = Options()
    parser = Parser(prog="relax-tq-rdma demo", description=DESCRIPTION)
    job = parser.add_argument_group("job")
    counts = [
        ("--steps", default.steps, 1, "optimiser steps"),
        ("--prompts", default.prompts, 1, "prompts per step"),
        ("--samples-per-prompt", default.samples_per_prompt, 1, "samples of one GRPO group"),
        ("--image-max-tokens", default.image_max_tokens, 1, "most visual tokens per picture, of 28x28 pixels each"),
        ("--tp", default.mesh.tp, 1, "tensor-parallel ranks"),
        ("--pp", default.mesh.pp, 1, f"pipeline stages, at most {MAX_STAGES}"),
        ("--cp", default.mesh.cp, 1, "context-parallel ranks"),
        ("--dp", default.mesh.dp, 1, "data-parallel ranks; must divide --prompts"),
        ("--num-data-storage-units", default.num_data_storage_units, 1, "storage units of SimpleStorage"),
        ("--max-staleness", default.max_staleness, 0, "steps the rollout may be ahead of the trainer"),
    ]
    for name, value, least, text in counts:
        job.add_argument(name, type=_at_least(least), default=value, metavar="N", help=f"{text} (default: {value})")
    job.add_argument(
        "--seed",
        type=_seed,
        default=default.seed,
        metavar="N",
        help="seed of prompts, weights and answers (default: 0)",
    )
    job.add_argument(
        "--per-rank-fetch", action="store_true", help="host switch: every rank fetches, instead of one that broadcasts"
    )
    job.add_argument(
        "--ray-address",
        type=_ray_address,
        default=default.ray_address,
        metavar="HOST:PORT",
        help="use this running Ray cluster, or auto: that of RAY_ADDRESS, else the one on this machine "
        "(default: start a local Ray and end it with the job)",
    )
    out = parser.add_argument_group("output")
    out.add_argument(
        "--json", action="store_true", help="the result as one JSON document on stdout, all else on stderr"
    )
    out.add_argument(
        "--compare",
        action="store_true",
        help="run today's path and the chosen one on the same seed; fail unless losses and payload are identical, "
        "bit for bit",
    )
    out.add_argument("--quiet", action="store_true", help="no progress")
    out.add_argument(DRIVER, action="store_true", help=argparse.SUPPRESS)
    add_arguments(parser)
    return parser


def _at_least(least: int) -> type[int]:
    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"expected {least} or more, got {value}")
        return value

    return number  # type: ignore[return-value]  # argparse takes any callable


def _ray_address(text: str) -> str:
    try:
        return text if text in ("", "auto") else str(address.parse(text))  # the default is parsed, too
    except UsageError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None


def _seed(text: str) -> int:
    """What torch takes as a seed."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 2^63 - 1, got {text}")
    return value


def _check(options: Options) -> None:
    mesh = options.mesh
    low, high = IMAGE_TOKENS
    if not low <= options.image_max_tokens <= high:
        raise UsageError(f"--image-max-tokens {options.image_max_tokens}: expected {low} to {high}")
    if mesh.tp > MAX_TP or mesh.tp & (mesh.tp - 1):
        raise UsageError(f"--tp {mesh.tp}: the demo's model can be split over 1, 2, 4 or {MAX_TP} ranks")
    if mesh.pp > MAX_STAGES:
        raise UsageError(f"--pp {mesh.pp}: the demo's model has {MAX_STAGES} layers, so at most {MAX_STAGES} stages")
    if options.prompts % mesh.dp:
        raise UsageError(
            f"--prompts {options.prompts} must be a multiple of --dp {mesh.dp}: whole groups go to each DP rank"
        )
