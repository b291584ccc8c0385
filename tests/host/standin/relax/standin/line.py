"""Which line of the host this process imitates. Read once, at import."""

from __future__ import annotations

import os

LINE = os.environ.get("STANDIN_LINE", "new")
if LINE not in ("mid", "new"):
    raise ImportError(f"STANDIN_LINE={LINE!r}: expected mid or new")

NEW = LINE == "new"
"""The newest mainline (M-new); else mid 2026 (M-mid)."""
