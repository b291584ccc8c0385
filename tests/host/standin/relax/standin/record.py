"""The record of a run: one JSON line an event, appended by whichever process knows it."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from typing import Any


def write(args: Namespace, kind: str, **fields: Any) -> None:
    """One write a line, so lines of different processes do not mix. Nothing without ``--standin-results``."""
    if args.standin_results is None:
        return
    line = json.dumps({"kind": kind, "pid": os.getpid(), **fields}) + "\n"
    with open(args.standin_results, "ab", buffering=0) as file:
        file.write(line.encode())
