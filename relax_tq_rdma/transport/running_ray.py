"""The Ray cluster that runs already: joined within a deadline, and left again. Nothing is started here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from relax_tq_rdma.errors import StartError, UsageError
from relax_tq_rdma.say import say
from relax_tq_rdma.transport import address
from relax_tq_rdma.transport.bounded import if_longer
from relax_tq_rdma.transport.findings import clip

AUTO = "auto"
"""The cluster of ``RAY_ADDRESS``, else the one that runs on this machine."""

_JOIN_SECONDS = 30.0
_DIAL_SECONDS = 3.0
_REASON_CHARS = 300


@contextmanager
def joined() -> Iterator[None]:
    """A connection to the cluster of :data:`AUTO` for the block; one that this process has already stays.

    Raises:
        StartError: see :func:`join`.
    """
    ray = _ray()
    if ray.is_initialized():
        yield
        return
    join()
    try:
        yield
    finally:
        ray.shutdown()


def join(where: str = AUTO, flag: str = "", *, namespace: str | None = None) -> None:
    """Connect this process; ``ray.shutdown`` is the caller's business.

    Args:
        where: ``HOST:PORT``, or :data:`AUTO`.
        flag: what the user gave ``HOST:PORT`` with.
        namespace: of Ray, for this process.

    Raises:
        StartError: Ray is not installed, no cluster is there, or it does not let this process in.
    """
    ray = _ray()
    dial(where, flag)
    named, name = _named(where, flag)
    nobody = f"no Ray cluster answers at {named}" if named else "no Ray cluster answers on this machine"
    try:
        with _ends_the_process(_JOIN_SECONDS, f"{nobody} within {_JOIN_SECONDS:g} s: {_way_out(named, name)}"):
            ray.init(address=where, namespace=namespace, log_to_driver=False, logging_level="ERROR")
    except ConnectionError:
        raise StartError(f"{nobody}: {_way_out(named, name)}") from None
    except Exception as exc:  # Ray's refusals have no common type: another version of Ray or Python, a bad job
        raise StartError(f"this process cannot join the Ray cluster: {clip(str(exc), _REASON_CHARS)}") from None


def dial(where: str = AUTO, flag: str = "") -> None:
    """See whether anybody listens where a host and a port are named: quick, and without Ray.

    Raises:
        StartError: nobody does, or what is named is no running cluster.
    """
    named, name = _named(where, flag)
    if not named or "://" in named:
        return
    try:
        problem = address.dial(address.parse(named), _DIAL_SECONDS)
    except UsageError as exc:
        problem = str(exc)
    if problem:
        raise StartError(f"{name} names no running Ray cluster: {problem}; {_way_out(named, name)}")


def _named(where: str, flag: str) -> tuple[str, str]:
    """The address, and what names it; it is empty where Ray is to find the cluster of this machine."""
    if where != AUTO:
        return where, flag
    given = os.environ.get("RAY_ADDRESS", "")
    return "" if given == AUTO else given, "RAY_ADDRESS"


def _way_out(named: str, name: str) -> str:
    return f"start one (ray start --head), or {'correct' if named else 'set'} {name}"


def _ray() -> Any:
    try:
        import ray
    except ImportError as exc:
        raise StartError(f"a Ray cluster cannot be joined without Ray ({exc}): install it") from None
    return ray


def _ends_the_process(seconds: float, sentence: str) -> AbstractContextManager[None]:
    """Connecting to a cluster that is gone blocks in native code for minutes: nothing but an exit ends that."""

    def give_up() -> None:
        say(f"relax-tq-rdma: error: {sentence}")
        os._exit(1)

    return if_longer(seconds, give_up)
