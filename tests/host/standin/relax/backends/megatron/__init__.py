"""Importing this package imports the modules of ``RELAX_EXTRA_MODULES``; what goes wrong there is printed, no more."""

from __future__ import annotations

import importlib
import os

for _name in filter(None, (name.strip() for name in os.environ.get("RELAX_EXTRA_MODULES", "").split(","))):
    try:
        importlib.import_module(_name)
    except Exception as _exc:
        print(f"extra module {_name} was not imported: {_exc}")
