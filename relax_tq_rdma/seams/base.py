"""What a seam is: a place where the plugin touches others' code, with a check before and a way back (design §2)."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from importlib import metadata
from typing import Any, Protocol

import msgspec

from relax_tq_rdma.errors import SeamError


class SeamReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a seam looks like in this process.

    ``installed``: name and version of what it touches. ``expected``: what must be there, in words. ``found``: what is
    not as expected, empty when all is. ``taken_by``: the module of a stranger who sits there already. ``aside``: why
    the plugin leaves this place alone although all is well: the host brings its own. ``way_out``: what the user can do
    when it does not fit. ``needed``: the job that was asked for does not start without it.
    """

    name: str
    ok: bool
    installed: str
    expected: str
    found: str = ""
    taken_by: str = ""
    aside: str = ""
    way_out: str = "install a version this plugin was tested with (TransferQueue 0.1.10 or 0.1.11), or drop its flags"
    needed: bool = True

    @property
    def text(self) -> str:
        """One sentence for the user."""
        if self.ok and self.aside:
            return f"seam {self.name} stands aside: {self.aside} ({self.installed})"
        if self.ok:
            return f"seam {self.name} is as expected ({self.installed})"
        if self.taken_by:
            return (
                f"seam {self.name} is taken by {self.taken_by} ({self.installed}): expected {self.expected}; "
                "remove that patch, or run without the flags of relax-tq-rdma"
            )
        return (
            f"seam {self.name} does not fit {self.installed}: expected {self.expected}, found {self.found}; "
            f"{self.way_out}"
        )


class Seam(Protocol):
    """All methods are idempotent."""

    @property
    def name(self) -> str: ...

    def check(self) -> SeamReport:
        """Look, touch nothing. The version does not decide, what is there does."""

    def apply(self) -> None:
        """Take the seam. Only after :func:`require`."""

    def remove(self) -> None:
        """Give it back as it was. What a stranger has put over it in the meantime stays."""


def require(seams: Iterable[Seam]) -> None:
    """Check seams that a layer of this job needs.

    Raises:
        SeamError: one does not fit; the message names it, the installed version and what was expected.
    """
    for seam in seams:
        report = seam.check()
        if not report.ok:
            raise SeamError(report.text)


def installed_transfer_queue() -> str:
    return installed("TransferQueue", "TransferQueue")


def installed(distribution: str, title: str) -> str:
    """Title and version of a package."""
    try:
        return f"{title} {metadata.version(distribution)}"
    except metadata.PackageNotFoundError:
        return f"{title} of unknown version"


def missing_parameters(function: Any, names: Iterable[str]) -> list[str]:
    """Of ``names`` those that ``function`` does not take by name."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return list(names)
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return []
    return [name for name in names if name not in parameters]
