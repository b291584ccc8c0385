"""Metrics of a job go into its record."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from relax.standin import record


def init_tracking(args: Namespace, primary: bool = True) -> None:
    """The record needs no set-up."""


def log(args: Namespace, metrics: dict[str, Any], step_key: str) -> None:
    record.write(args, "perf", **metrics, step_key=step_key)
