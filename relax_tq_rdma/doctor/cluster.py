"""The doctor on a running Ray cluster: connect within a deadline, probe every alive node, disconnect."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from relax_tq_rdma.errors import StartError, UsageError
from relax_tq_rdma.settings import Settings
from relax_tq_rdma.transport import address
from relax_tq_rdma.transport.report import NodeReport

_CONNECT_SECONDS = 30.0
_DIAL_SECONDS = 3.0
_WAY_OUT = "start one (ray start --head), or set RAY_ADDRESS"


def probe_running_cluster(settings: Settings) -> tuple[dict[str, str], list[NodeReport]]:
    """Nodes (id to name) and their reports, within ``--tq-init-timeout-seconds``.

    Raises:
        StartError: Ray is not installed, or there is no cluster to connect to.
    """
    try:
        import ray
    except ImportError as exc:
        raise StartError(f"--cluster needs Ray, which cannot be imported here ({exc}): install it") from None
    from relax_tq_rdma.transport.agents import probe_cluster

    own = not ray.is_initialized()
    if own:
        connect()
    try:
        return probe_cluster(settings, settings.init_timeout_seconds)
    finally:
        if own:
            ray.shutdown()


def connect() -> None:
    """Connect to the cluster of ``RAY_ADDRESS``, else to the one that runs on this machine.

    Raises:
        StartError: there is none.
    """
    import ray

    dial_given_address()
    try:
        with _ends_the_process(_CONNECT_SECONDS, f"Ray did not connect within {_CONNECT_SECONDS:g} s: {_WAY_OUT}"):
            ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as exc:
        raise StartError(f"no running Ray cluster was found ({str(exc).splitlines()[0]}): {_WAY_OUT}") from None


def dial_given_address() -> None:
    """See whether anybody listens at ``RAY_ADDRESS``, where that names a host and a port: quick, and without Ray.

    Raises:
        StartError: nobody does.
    """
    given = os.environ.get("RAY_ADDRESS", "")
    if not given or "://" in given or given in ("auto", "local"):
        return
    try:
        problem = address.dial(address.parse(given), _DIAL_SECONDS)
    except UsageError as exc:
        problem = str(exc)
    if problem:
        raise StartError(f"no Ray cluster at RAY_ADDRESS={given} ({problem}): {_WAY_OUT}")


@contextmanager
def _ends_the_process(seconds: float, sentence: str) -> Iterator[None]:
    """Connecting to a cluster that is gone blocks in native code for minutes: nothing but an exit ends that."""

    def give_up() -> None:
        print(f"relax-tq-rdma: error: {sentence}", file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
