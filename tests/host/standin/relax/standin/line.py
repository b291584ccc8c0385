"""Which line of the host this process imitates, and what it brings beyond it. Read once, at import."""

from __future__ import annotations

import os
from pathlib import Path

LINE = os.environ.get("STANDIN_LINE", "new")
if LINE not in ("mid", "new"):
    raise ImportError(f"STANDIN_LINE={LINE!r}: expected mid or new")

NEW = LINE == "new"
"""The newest mainline (M-new); else mid 2026 (M-mid)."""

WITH = frozenset(filter(None, os.environ.get("STANDIN_WITH", "").split(",")))
"""Work that is not in the mainline: ``pr256`` (a data plane of the host's own), ``group-processor``."""

_HERE = Path(__file__).resolve().parents[2]


def more_paths(package: str) -> list[str]:
    """More folders of a package of the host, for its ``__path__``: of this line, and of what it brings beyond it."""
    folders = (_HERE / "lines" / LINE / package, *(_HERE / "variants" / name / package for name in sorted(WITH)))
    return [str(folder) for folder in folders if folder.is_dir()]
