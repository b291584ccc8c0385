"""The plugin's part of the TransferQueue config: how one decision reaches every process (design §2, seam T2).

It lives under ``backend.<name>.relax_tq_rdma``, because every storage manager is constructed with exactly that backend
section, also where ``transfer_queue.init`` is never called (``StreamingDataset``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from relax_tq_rdma.errors import StartError, UsageError
from relax_tq_rdma.settings import Settings
from relax_tq_rdma.transport.report import Decision

KEY = "relax_tq_rdma"
SCHEMA = 1


class JobSection(msgspec.Struct, frozen=True, kw_only=True):
    """What every process of a job knows. ``job`` is a random token; it tells our controller from a stranger's."""

    job: str
    settings: Settings
    decision: Decision
    plugin_version: str
    master: str = ""
    nodes: int = 1
    schema: int = SCHEMA

    def to_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain


def read_section(backend_config: Any) -> tuple[JobSection | None, list[str]]:
    """Read the section from a backend's config (``dict`` or OmegaConf ``DictConfig``).

    Returns:
        The section (``None`` when the job does not use the plugin) and notes on keys of a newer version.

    Raises:
        StartError: the section is there but cannot be understood.
    """
    plain = backend_config.get(KEY) if hasattr(backend_config, "get") else None
    if plain is None:
        return None, []
    if not isinstance(plain, Mapping):
        raise StartError(f"backend config key {KEY!r} is not a mapping; was it set by hand?")
    plain = _plain(plain)
    try:
        settings, notes = Settings.from_dict(plain.get("settings") or {})
        section = msgspec.convert({**plain, "settings": settings.to_dict()}, JobSection)
    except (msgspec.ValidationError, UsageError) as exc:
        raise StartError(
            f"the job's data-plane section cannot be read ({exc}); it was written by plugin version "
            f"{plain.get('plugin_version', 'unknown')}: install that version here"
        ) from None
    if section.schema > SCHEMA:
        raise StartError(
            f"the job's data-plane section has schema {section.schema}, this plugin reads up to {SCHEMA}: "
            f"install plugin version {section.plugin_version} here"
        )
    return section, notes


def _plain(value: Any) -> Any:
    """Builtins from any nesting of mappings and sequences, OmegaConf's own included."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_plain(v) for v in value]
    return value
