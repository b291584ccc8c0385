"""Every flag of the plugin, as one list (RFC §4.2.1 and §4.7).

The list is data: it registers the flags on any ``argparse`` parser, feeds ``doctor --explain-flags`` and generates the
table in ``docs/reference/flags.md``. Defaults equal the behaviour of the host without the plugin.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from relax_tq_rdma.errors import UsageError
from relax_tq_rdma.transport import address

_MOST = 1 << 40
"""Of a MiB or byte count; more is a slip of the keyboard, and no format on the way to other processes holds any int."""


def _positive_int(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None
    if value <= 0:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {value}")
    return _bounded(value)


def _natural_int(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None
    if value < 0:
        raise argparse.ArgumentTypeError(f"expected 0 or more, got {value}")
    return _bounded(value)


def _bounded(value: int) -> int:
    if value > _MOST:
        raise argparse.ArgumentTypeError(f"expected at most {_MOST}, got {value}")
    return value


def _endpoint(text: str) -> str:
    """``host:port``, or empty for none."""
    try:
        return str(address.parse(text)) if text.strip() else ""
    except UsageError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None


def _metadata_server(text: str) -> str:
    """What Mooncake takes: ``P2PHANDSHAKE``, an ``http://`` or ``etcd://`` address, or ``host:port``."""
    word = text.strip()
    if word.upper() == "P2PHANDSHAKE":
        return "P2PHANDSHAKE"
    try:
        address.parse(word.partition("://")[2].split("/")[0] if word.startswith(("http://", "etcd://")) else word)
    except UsageError as exc:
        raise argparse.ArgumentTypeError(f"expected P2PHANDSHAKE or HOST:PORT ({exc})") from None
    return word


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected seconds as a number, got {text!r}") from None
    if not 0 < value < 86400:
        raise argparse.ArgumentTypeError(f"expected seconds between 0 and 86400, got {text}")
    return value


@dataclass(frozen=True)
class Flag:
    """One command-line flag.

    ``setting`` names the field of :class:`relax_tq_rdma.settings.Settings` that the flag fills. ``kind`` is ``switch``
    (bare flag), ``toggle`` (``--x/--no-x``) or ``value``.
    """

    name: str
    setting: str
    layer: str
    help: str
    default: Any
    kind: str = "value"
    choices: tuple[str, ...] | None = None
    type: Callable[[str], Any] | None = None
    metavar: str | None = None

    @property
    def dest(self) -> str:
        return self.name.lstrip("-").replace("-", "_")


FLAGS: tuple[Flag, ...] = (
    Flag(
        "--dataplane-accounting",
        "accounting",
        "L0",
        "count bytes and time the stages: one line a step (summary), per-field JSON lines too (verbose)",
        "off",
        choices=("off", "summary", "verbose"),
    ),
    Flag(
        "--tq-storage-backend",
        "storage_backend",
        "L1",
        "storage behind TransferQueue: SimpleStorage over ZMQ (simple) or MooncakeStore (mooncake)",
        "simple",
        choices=("simple", "mooncake"),
    ),
    Flag(
        "--tq-transport",
        "transport",
        "L1",
        "wire of the mooncake backend; rdma needs --tq-rdma-mode auto or required",
        "tcp",
        choices=("tcp", "rdma"),
    ),
    Flag(
        "--tq-rdma-mode",
        "rdma_mode",
        "L1",
        "off: never RDMA; auto: RDMA where every node can, else degrade and record why; required: as asked or exit 1",
        "off",
        choices=("off", "auto", "required"),
    ),
    Flag(
        "--tq-rdma-device",
        "rdma_device",
        "L1",
        "RDMA device, or several with commas (mlx5_0,mlx5_1); empty: Mooncake chooses",
        "",
        metavar="NAME",
    ),
    Flag(
        "--tq-use-gdr",
        "use_gdr",
        "L1",
        "GPUDirect RDMA: the NIC reads and writes GPU memory; needs --tq-transport rdma",
        False,
        kind="toggle",
    ),
    Flag(
        "--tq-gdr-staging-mb",
        "gdr_staging_mb",
        "L1",
        "GPU staging buffer of each client with --tq-use-gdr, in MiB",
        1024,
        type=_positive_int,
        metavar="N",
    ),
    Flag(
        "--tq-mooncake-metadata-server",
        "mooncake_metadata_server",
        "L1",
        "Mooncake metadata: P2PHANDSHAKE (no extra service) or host:port of an HTTP metadata server",
        "P2PHANDSHAKE",
        type=_metadata_server,
        metavar="ADDR",
    ),
    Flag(
        "--tq-mooncake-master-address",
        "mooncake_master_address",
        "L1",
        "host:port of a running mooncake_master; needed with mooncake unless --tq-mooncake-auto-init job-owned",
        "",
        type=_endpoint,
        metavar="ADDR",
    ),
    Flag(
        "--tq-mooncake-auto-init",
        "mooncake_auto_init",
        "L1",
        "never: use the given master, start none; job-owned: start a master for this job and stop exactly that one",
        "never",
        choices=("never", "job-owned"),
    ),
    Flag(
        "--tq-fallback-backend",
        "fallback_backend",
        "L1",
        "where to go when Mooncake cannot be used: SimpleStorage (simple), or fail the start (none)",
        "simple",
        choices=("simple", "none"),
    ),
    Flag(
        "--tq-init-timeout-seconds",
        "init_timeout_seconds",
        "L1",
        "limit of each start attempt: probe, set-up and verification together",
        30.0,
        type=_seconds,
        metavar="N",
    ),
    Flag(
        "--tq-normalize-multimodal",
        "normalize_multimodal",
        "L2",
        "put multimodal_train_inputs as one self-describing byte row per sample instead of Python dicts",
        False,
        kind="switch",
    ),
    Flag(
        "--rollout-group-share-processor",
        "group_share_processor",
        "L3a",
        "run the image processor once per GRPO group",
        False,
        kind="switch",
    ),
    Flag(
        "--tq-dedup-multimodal",
        "dedup_multimodal",
        "L3b",
        "write identical payloads of one put once; needs --tq-normalize-multimodal",
        False,
        kind="switch",
    ),
    Flag(
        "--tq-dedup-share-view",
        "dedup_share_view",
        "L3b",
        "give the members of a group views of one tensor instead of independent copies (read-only consumers)",
        False,
        kind="switch",
    ),
    Flag(
        "--tq-host-staging",
        "host_staging",
        "L5",
        "keep registered host buffers and reuse them (mooncake only)",
        False,
        kind="switch",
    ),
    Flag(
        "--tq-host-staging-mb",
        "host_staging_mb",
        "L5",
        "cap of the host staging pool of each process, in MiB",
        1024,
        type=_positive_int,
        metavar="N",
    ),
    Flag(
        "--tq-batch-bytes-budget",
        "batch_bytes_budget",
        "L5",
        "cut store batches by bytes; 0: by TransferQueue's key count",
        0,
        type=_natural_int,
        metavar="N",
    ),
    Flag(
        "--tq-per-rank-fetch",
        "per_rank_fetch",
        "L4",
        "auto: with simple the host's --per-rank-fetch, with mooncake + multimodal + staging on; "
        "host: always the host's switch; on/off: as said",
        "auto",
        choices=("auto", "host", "on", "off"),
    ),
    Flag(
        "--tq-allow-unstaged-per-rank-fetch",
        "allow_unstaged_per_rank_fetch",
        "L4",
        "confirm per-rank fetch without host staging: every fixed read cost is paid TP x PP x CP times",
        False,
        kind="switch",
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Register all flags on ``parser``. A flag that the host defines, before this or after, is the host's.

    Returns the parser, as the host's ``parse_args(add_custom_arguments=...)`` expects.
    """
    for container in (parser, *parser._action_groups):  # groups made later take over the parser's
        container.conflict_handler = "resolve"
    taken = set(parser._option_string_actions)
    group = parser.add_argument_group("data plane (relax-tq-rdma)", "all off by default: the job runs as without them")
    for flag in FLAGS:
        if flag.name in taken:
            continue
        help_text = f"[{flag.layer}] {flag.help} (default: {shown(flag.default)})".replace("%", "%%")
        if flag.kind == "switch":
            group.add_argument(flag.name, dest=flag.dest, action="store_true", default=flag.default, help=help_text)
        elif flag.kind == "toggle":
            group.add_argument(
                flag.name, dest=flag.dest, action=argparse.BooleanOptionalAction, default=flag.default, help=help_text
            )
        else:
            group.add_argument(
                flag.name,
                dest=flag.dest,
                default=flag.default,
                type=flag.type or str,
                choices=flag.choices,
                metavar=flag.metavar,
                help=help_text,
            )
    return parser


def shown(default: Any) -> str:
    """A default as people read it: switches are off, empty text is none."""
    if default is False:
        return "off"
    if default == "":
        return "none"
    return f"{default:g}" if isinstance(default, float) else str(default)
