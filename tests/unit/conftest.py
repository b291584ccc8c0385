"""Clients on a store that is as strict as an RDMA engine."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.mooncake import backend_config
from tests.strict_store import StrictStore, use_strict_store

MakeClient = Callable[..., Any]


@pytest.fixture
def master() -> Iterator[str]:
    """Something that listens, as a master does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def make_client(monkeypatch: pytest.MonkeyPatch, master: str) -> Iterator[MakeClient]:
    """``make(store, lazy=True, pool=True, config=None, settings=None)``: a client on a fake store.

    ``lazy``: the wheel can mount after set-up; ``pool``: it has a ``BufferPool``.
    """
    from relax_tq_rdma.staging import transfer
    from relax_tq_rdma.staging.client import DataplaneMooncakeStoreClient

    made: list[Any] = []
    monkeypatch.setenv("RTQ_SEGMENT_MB", "64")
    monkeypatch.setenv("RTQ_STORE_WAIT_SECONDS", "3")
    monkeypatch.setattr(transfer.time, "sleep", lambda seconds, sleep=time.sleep: sleep(min(seconds, 0.05)))

    def make(
        store: StrictStore,
        *,
        lazy: bool = True,
        pool: bool = True,
        config: dict[str, Any] | None = None,
        settings: dict[str, Any] | None = None,
    ) -> Any:
        use_strict_store(monkeypatch, store, lazy=lazy, pool=pool)
        made.append(DataplaneMooncakeStoreClient(config or backend_config(master, settings=settings)))
        return made[-1]

    yield make
    for client in made:
        client.close()
