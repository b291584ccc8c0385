"""The frozen settings of a job. They ride with the TransferQueue config to every process (design §2)."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from relax_tq_rdma.errors import UsageError
from relax_tq_rdma.flags import FLAGS, add_arguments
from relax_tq_rdma.usage import Parser


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asked for. Every default equals the host's behaviour without the plugin (RFC §4.7).

    Sizes ending in ``_mb`` are MiB, ``batch_bytes_budget`` is bytes, ``init_timeout_seconds`` is seconds.
    """

    accounting: Literal["off", "summary", "verbose"] = "off"
    storage_backend: Literal["simple", "mooncake"] = "simple"
    transport: Literal["tcp", "rdma"] = "tcp"
    rdma_mode: Literal["off", "auto", "required"] = "off"
    rdma_device: str = ""
    use_gdr: bool = False
    gdr_staging_mb: int = 1024
    mooncake_metadata_server: str = "P2PHANDSHAKE"
    mooncake_master_address: str = ""
    mooncake_auto_init: Literal["never", "job-owned"] = "never"
    fallback_backend: Literal["simple", "none"] = "simple"
    init_timeout_seconds: float = 30.0
    normalize_multimodal: bool = False
    group_share_processor: bool = False
    dedup_multimodal: bool = False
    dedup_share_view: bool = False
    host_staging: bool = False
    host_staging_mb: int = 1024
    batch_bytes_budget: int = 0
    per_rank_fetch: Literal["auto", "host", "on", "off"] = "auto"
    allow_unstaged_per_rank_fetch: bool = False

    @classmethod
    def from_flags(cls, argv: Sequence[str]) -> Settings:
        """Parse plugin flags only.

        Raises:
            UsageError: an unknown flag or a bad value; the message names it.
        """
        parser = Parser(add_help=False)
        add_arguments(parser)
        return cls.from_args(parser.parse_args(argv))

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Settings:
        """Read the plugin's flags from a namespace; a missing attribute means the default.

        The host may own a flag of the same name and hand over another type, so values are checked here too. A bare
        ``off`` or ``on`` in its YAML file arrives as a boolean.

        Raises:
            UsageError: a value outside the flag's range; the message names the flag.
        """
        values: dict[str, Any] = {}
        for flag in FLAGS:
            value = getattr(args, flag.dest, None)
            if value is None:
                continue
            if isinstance(value, bool) and flag.choices and (word := "on" if value else "off") in flag.choices:
                value = word
            try:
                value = getattr(msgspec.convert({flag.setting: value}, cls), flag.setting)
                values[flag.setting] = flag.type(str(value)) if flag.type else value
            except msgspec.ValidationError as exc:
                raise UsageError(f"{flag.name}: {value!r} is not valid: {exc}") from None
            except argparse.ArgumentTypeError as exc:
                raise UsageError(f"{flag.name}: {exc}") from None
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """A plain dict of builtins, fit for OmegaConf, JSON and pickling."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> tuple[Settings, list[str]]:
        """Read settings written by any version of the plugin.

        Returns:
            The settings and one note for each key this version does not know (the key is ignored).

        Raises:
            UsageError: a known key holds an invalid value.
        """
        if not isinstance(plain, Mapping):
            raise UsageError(f"settings of the job cannot be read: {type(plain).__name__} instead of a mapping")
        known = {field.name for field in msgspec.structs.fields(cls)}
        notes = [
            f"setting {key!r} is not known to this version of relax-tq-rdma and is ignored; "
            "install the same version on every node"
            for key in sorted(set(plain) - known, key=str)
        ]
        try:
            return msgspec.convert({k: v for k, v in plain.items() if k in known}, cls), notes
        except msgspec.ValidationError as exc:
            raise UsageError(f"settings of the job cannot be read: {exc}") from None

    @property
    def rdma_devices(self) -> tuple[str, ...]:
        """``--tq-rdma-device`` as names: trimmed, without ports and duplicates, in the order given (FC-06).

        ``mlx5_0:1`` is device ``mlx5_0``: the engine knows names only, the probe looks at the port.
        """
        names = (re.sub(r"^(.+?)\s*:\s*\d{1,3}$", r"\1", part.strip()) for part in self.rdma_device.split(","))
        return tuple(dict.fromkeys(name for name in names if name))

    @property
    def wants_mooncake(self) -> bool:
        return self.storage_backend == "mooncake"

    @property
    def wants_rdma(self) -> bool:
        return self.wants_mooncake and self.transport == "rdma" and self.rdma_mode != "off"

    @property
    def touches_nothing(self) -> bool:
        """True when no layer is on: the plugin then leaves every registry and method alone."""
        return (
            self.accounting == "off"
            and not self.wants_mooncake
            and not self.normalize_multimodal
            and not self.group_share_processor
            and not self.dedup_multimodal
            and self.per_rank_fetch in ("auto", "host")
        )
