"""``doctor --explain-flags``: every flag and every rule of the compatibility matrix, as text or data."""

from __future__ import annotations

from typing import Any, TextIO

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from relax_tq_rdma.compat import RULES
from relax_tq_rdma.doctor.as_json import SCHEMA
from relax_tq_rdma.doctor.render import plain_lines
from relax_tq_rdma.env import VARIABLES
from relax_tq_rdma.flags import FLAGS, Flag, shown


def explain(file: TextIO | None = None) -> None:
    """Print flags, matrix and variables."""
    with plain_lines(file) as console:
        _explain(console)


def _explain(console: Console) -> None:
    console.print(Text("flags: all off by default, the job then runs as without the plugin", style="bold"))
    for flag in FLAGS:
        console.print()
        console.print(Text.assemble((_usage(flag), "bold"), f"  [{flag.layer}, default {shown(flag.default)}]"))
        _indented(console, flag.help + ".")
    console.print()
    console.print(Text("compatibility matrix", style="bold"))
    for rule in RULES:
        console.print()
        flags = " ".join(rule.flags) or "any"
        by = " (decided by the probe)" if rule.applies is None else ""
        console.print(Text.assemble((rule.verdict, "bold"), f"  {flags}  [{rule.reference}]{by}"))
        _indented(console, rule.message + (f": {rule.way_out}" if rule.way_out else ""))
    console.print()
    console.print(Text("environment variables (internals, not flags)", style="bold"))
    for variable in VARIABLES:
        console.print()
        console.print(Text.assemble((variable.name, "bold"), f"  [default {variable.default or variable.otherwise}]"))
        _indented(console, variable.meaning)


def explained() -> dict[str, Any]:
    """The same as builtins."""
    return {
        "schema": SCHEMA,
        "flags": [
            {
                "name": flag.name,
                "layer": flag.layer,
                "kind": flag.kind,
                "choices": list(flag.choices or ()),
                "default": flag.default,
                "help": flag.help,
            }
            for flag in FLAGS
        ],
        "matrix": [
            {
                "verdict": rule.verdict,
                "flags": list(rule.flags),
                "message": rule.message,
                "way_out": rule.way_out,
                "reference": rule.reference,
                "decided_by": "probe" if rule.applies is None else "flags",
            }
            for rule in RULES
        ],
        "variables": [{"name": v.name, "default": v.default, "meaning": v.meaning} for v in VARIABLES],
    }


def _usage(flag: Flag) -> str:
    if flag.kind == "toggle":
        return f"{flag.name} / --no-{flag.name.removeprefix('--')}"
    if flag.kind == "switch":
        return flag.name
    return f"{flag.name} {'{' + ','.join(flag.choices) + '}' if flag.choices else flag.metavar}"


def _indented(console: Console, text: str) -> None:
    console.print(Padding(Text(text), (0, 0, 0, 4)))
