"""The seams of one process: taken now, or when their module has been executed, and given back together."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Literal, Protocol, TypeAlias

from relax_tq_rdma.seams.base import Seam
from relax_tq_rdma.seams.on_import import AfterImport, when_imported

logger = logging.getLogger(__name__)

State: TypeAlias = Literal["taken", "waiting", "aside", "failed"]
"""``waiting``: this process has not imported what it touches; ``aside``: the host brings its own; ``failed``: it does
not fit, and this process runs without it."""


class HostSeam(Seam, Protocol):
    """A seam in the host. ``modules``: after each execution of one of them :meth:`apply` is due."""

    @property
    def modules(self) -> tuple[str, ...]: ...


class TakenSeams:
    """Seams by name, with their state."""

    def __init__(self) -> None:
        self._seams: list[Seam] = []
        self._watches: list[AfterImport] = []
        self._states: dict[str, State] = {}

    @property
    def states(self) -> Mapping[str, State]:
        """By the short name of a seam, which is the first word of its name: ``T2``, ``R3``."""
        return dict(self._states)

    def take(self, seam: Seam) -> None:
        """Take a seam that was checked."""
        seam.apply()
        self._seams.append(seam)
        self._states[_short(seam)] = "taken"

    def take_when_imported(self, seam: HostSeam) -> None:
        """Take a seam whenever one of its modules was executed, if it fits then. Never raises later on: a layer that
        cannot work is the driver's business to refuse."""
        self._seams.append(seam)
        self._states[_short(seam)] = "waiting"
        self._watches += [when_imported(module, lambda: self._try(seam)) for module in seam.modules]

    def failed(self, seam: Seam) -> None:
        """A seam of this process that does not fit."""
        self._states[_short(seam)] = "failed"

    def give_back(self) -> None:
        """Idempotent."""
        while self._watches:
            self._watches.pop().cancel()
        while self._seams:
            self._seams.pop().remove()
        self._states.clear()

    def _try(self, seam: HostSeam) -> None:
        try:
            report = seam.check()
            if report.ok:
                seam.apply()
            self._states[_short(seam)] = "aside" if report.aside else "taken" if report.ok else "failed"
            problem = "" if report.ok else report.text
        except Exception as exc:  # an import of the host must not fail with us
            self._states[_short(seam)] = "failed"
            problem = f"seam {seam.name} could not be taken ({type(exc).__name__}: {exc})"
        if problem:
            logger.warning("%s", problem)


def _short(seam: Seam) -> str:
    return seam.name.partition(" ")[0]
