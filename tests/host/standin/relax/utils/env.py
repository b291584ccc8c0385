"""Names of the host's own environment variables."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

logger = logging.getLogger(__name__)

OWNED_ENV_PREFIXES = ("RELAX_", "SLIME_")
_KNOWN: dict[str, object] = {
    "RELAX_EXTRA_ENV_ALLOWLIST": "",
    "RELAX_EXTRA_MODULES": "",
    "RELAX_FETCH_SPLIT_MAX_RETRIES": 40,
    "RELAX_PROPAGATE_ENV_VARS": "",
    "RELAX_STRICT_ENV": 0,
    "RELAX_TELEMETRY_HOOK": "",
    "RELAX_TGD_PROFILE": 0,
    "SLIME_HOST_IP": "",
}


class _Envs:
    """Read-only and lazy: each read looks into the environment."""

    def __getattr__(self, name: str) -> object:
        if name not in _KNOWN:
            raise AttributeError(name)
        default = _KNOWN[name]
        text = os.environ.get(name)
        return default if text is None else int(text) if isinstance(default, int) else text


Envs = _Envs()


def known_env_names() -> frozenset[str]:
    return frozenset(_KNOWN)


def is_env_set(env: str) -> bool:
    return env in os.environ


def validate_env(extra_env: Mapping[str, str] | None = None) -> None:
    """Warn of unknown names under the host's prefixes; ``ValueError`` under ``RELAX_STRICT_ENV=1``."""
    allowed = {name.strip() for name in str(Envs.RELAX_EXTRA_ENV_ALLOWLIST).split(",")}
    names = {*os.environ, *(extra_env or {})}
    unknown = sorted(n for n in names if n.startswith(OWNED_ENV_PREFIXES) and n not in _KNOWN and n not in allowed)
    if not unknown:
        return
    text = f"unknown environment variables: {', '.join(unknown)}"
    if Envs.RELAX_STRICT_ENV:
        raise ValueError(text)
    logger.warning("%s", text)
