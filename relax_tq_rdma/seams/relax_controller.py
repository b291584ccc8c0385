"""Seam R4: the host's controller starts the data system, and is what has to end it (contract §2, §10).

The host closes TransferQueue only before a global restart: not when its constructor fails half-way, and not at the end,
which it reaches by ``os._exit``, past every exit handler. A global restart calls the constructor once more in the same
process, so nothing here remembers a start.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from relax_tq_rdma.errors import DataplaneError, SeamError
from relax_tq_rdma.say import say
from relax_tq_rdma.seams.base import SeamReport
from relax_tq_rdma.seams.host_code import installed_host, own_data_plane, problem
from relax_tq_rdma.seams.wrapping import Wrappers
from relax_tq_rdma.summary import PREFIX

MODULE = "relax.core.controller"
_METHODS: dict[str, tuple[str, ...]] = {
    "__init__": ("config", "runtime_env"),
    "_initialize_data_system": (),
    "shutdown": (),
}


class DataPlane(Protocol):
    """What the controller needs of seam T1."""

    @property
    def is_running(self) -> bool: ...

    def close(self) -> None: ...


class RelaxController:
    """See :class:`relax_tq_rdma.seams.base.Seam`.

    Args:
        plane: the data plane of this process; ``None``: it is the host's own business.
        before: called before the host starts its data system; may raise to stop the start.
        after: called when all services of the host are up.
        for_actors: given the runtime environment of the host's actors, the one that they get.
    """

    name = "R4 (the host's Controller)"
    modules = (MODULE,)

    def __init__(
        self,
        plane: DataPlane | None = None,
        before: Callable[[], None] = lambda: None,
        after: Callable[[], None] = lambda: None,
        for_actors: Callable[[Any], Any] = lambda runtime_env: runtime_env,
    ) -> None:
        self._plane, self._before, self._after, self._for_actors = plane, before, after, for_actors
        self._wrappers = Wrappers()

    def check(self) -> SeamReport:
        found = aside = ""
        try:
            problems = (problem(MODULE, f"Controller.{method}", takes) for method, takes in _METHODS.items())
            found = next(filter(None, problems), "")
            aside = own_data_plane()
        except Exception as exc:  # a broken host must become a sentence, whatever it raises
            found = f"{type(exc).__name__}: {exc}"
        return SeamReport(
            name=self.name,
            ok=bool(aside) or not found,
            installed=installed_host(),
            expected=" and ".join(f"Controller.{name}({', '.join(takes)})" for name, takes in _METHODS.items()),
            found="" if aside else found,
            aside=aside,
            way_out="use a host line named in docs/relax.md, or drop the flags of relax-tq-rdma",
        )

    def apply(self) -> None:
        module = sys.modules.get(MODULE)
        if module is None:
            return
        controller = module.Controller
        self._wrappers.put(controller, "__init__", self._cleaning_up)
        self._wrappers.put(controller, "_initialize_data_system", self._checked)
        if self._plane is not None:
            self._wrappers.put(controller, "shutdown", self._closing)

    def remove(self) -> None:
        self._wrappers.take_back()

    def _cleaning_up(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def init(controller: Any, config: Any, runtime_env: Any = None, **named: Any) -> None:
            with _said():
                try:
                    env = None if runtime_env is None else self._for_actors(runtime_env)
                    original(controller, config, runtime_env=env, **named)
                except BaseException:
                    self._close()
                    raise
            self._after()

        return init

    def _checked(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def initialize_data_system(controller: Any) -> None:
            self._before()
            original(controller)
            if self._plane is not None and not self._plane.is_running:
                raise SeamError(
                    f"seam {self.name}: the host has started its data system past transfer_queue.init "
                    f"({installed_host()}): use a host line named in docs/relax.md, or drop the flags of relax-tq-rdma"
                )

        return initialize_data_system

    def _closing(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def shutdown(controller: Any) -> None:
            try:
                original(controller)
            finally:
                self._close()

        return shutdown

    def _close(self) -> None:
        if self._plane is not None and self._plane.is_running:
            self._plane.close()


@contextmanager
def _said() -> Iterator[None]:
    """The host logs what stops it with a stack trace; the sentence for the user stands alone."""
    try:
        yield
    except DataplaneError as exc:
        for line in str(exc).splitlines():
            say(f"{PREFIX} ERROR {line}")
        raise
