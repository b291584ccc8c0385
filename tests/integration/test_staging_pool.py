"""The staging pool on a real store over TCP: consumers that keep what they got, old wheels, any sequence of calls."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from torch.utils.data import DataLoader

from relax_tq_rdma.payload import decode_row, plan_column
from relax_tq_rdma.staging.client import DataplaneMooncakeStoreClient
from relax_tq_rdma.staging.jagged import jagged_view
from relax_tq_rdma.transport.memory import MIB
from tests.mooncake import MooncakeMaster, backend_config
from tests.staging_machine import STAGED, StagingMachine

pytestmark = pytest.mark.integration

MakeClient = Callable[..., Any]


@pytest.fixture
def master(tmp_path: Path) -> Iterator[MooncakeMaster]:
    started = MooncakeMaster(tmp_path / "master.log")
    yield started
    started.kill()


@pytest.fixture
def make_client(master: MooncakeMaster, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeClient]:
    """``make(pool_mb)``: a client; the local buffer is 16 MiB and the pool."""
    made: list[Any] = []
    monkeypatch.setenv("MC_STORE_MEMCPY", "0")
    monkeypatch.setenv("RTQ_SEGMENT_MB", "256")

    def make(pool_mb: int) -> Any:
        staged = {"host_staging": pool_mb > 0, "host_staging_mb": pool_mb or 1024}
        made.append(DataplaneMooncakeStoreClient(backend_config(master.address, settings=staged)))
        return made[-1]

    yield make
    for client in made:
        client.close()


def rows_of(micro: int, number: int = 8) -> list[dict[str, torch.Tensor]]:
    return [
        {"pixels": torch.full((262_144,), float(100 * micro + i)), "grid": torch.tensor([i])} for i in range(number)
    ]


def agrees(got: list[Any], micro: int) -> bool:
    values = [decode_row(back.memory) for back in got]
    return all(
        value is not None and torch.equal(value["pixels"], row["pixels"])
        for value, row in zip(values, rows_of(micro), strict=True)
    )


def test_a_consumer_that_keeps_twice_what_the_pool_holds(make_client: MakeClient) -> None:
    """Three steps; in each, sixteen micro-batches of eight rows of 1 MiB stay referenced. The pool has 64 MiB."""
    producer, consumer = make_client(32), make_client(64)
    keys, micros = [f"{i}@mm" for i in range(8)], range(16)
    fresh, slowest = [], 0.0
    for step in range(3):
        kept: list[list[Any]] = []
        for micro in micros:
            values = [*plan_column(rows_of(micro)).planned(), torch.arange(micro, micro + 100), {"text": "hello"}]
            named = [*keys, "0@ids", "0@meta"]
            metas = producer.put(named, values)
            started = time.monotonic()
            kept.append(consumer.get(named, custom_backend_meta=metas))
            slowest = max(slowest, time.monotonic() - started)
            producer.clear(named, custom_backend_meta=metas)
        for micro, got in zip(micros, kept, strict=True):
            assert agrees(got[:8], micro)
            assert got[8].tolist() == list(range(micro, micro + 100))
            assert got[9] == {"text": "hello"}
        counts = consumer.staging_counts()
        assert 40 * MIB < counts.held <= 48 * MIB
        fresh.append(counts.allocations)
        del kept, got
        gc.collect()
        assert consumer.staging_counts().held == 0, step
    assert (counts.registrations, producer.staging_counts().registrations) == (0, 0)
    lent, copied = counts.moved("get", "lend"), counts.moved("get", "copy")
    assert lent.values + copied.values == 3 * 16 * 10
    assert lent.nbytes > 3 * 40 * MIB
    assert (counts.misses, counts.retired) == (0, 0)
    assert counts.advised_mb > 128
    assert fresh[2] - fresh[1] <= fresh[0] * 0.3, "most of the memory is used again"
    assert slowest < 5, "nothing waited for the consumer to let go"


def test_tensors_of_a_column_are_lent_as_one_and_live_in_a_dataloader(make_client: MakeClient) -> None:
    client = make_client(64)
    column = [torch.full((1000 + i, 100), float(i)) for i in range(16)]
    keys = [f"{i}@pixels" for i in range(16)]
    metas = client.put(keys, column)
    rows = client.get(keys, custom_backend_meta=metas)
    nested = jagged_view(rows)
    assert nested is not None
    held = client.staging_counts().held
    assert held >= sum(row.nbytes for row in column)
    del rows
    loaders = [
        DataLoader(list(nested.unbind()), batch_size=None),
        DataLoader([row[:1000] for row in nested.unbind()], batch_size=4),
        DataLoader([row[:1000] for row in nested.unbind()], batch_size=4, num_workers=1),
    ]
    del nested
    single = list(loaders[0])
    batches = [list(loader) for loader in loaders[1:]]
    more = [client.get(keys, custom_backend_meta=metas) for _ in range(8)]
    assert all(map(torch.equal, single, column))
    for batch in batches:
        assert torch.equal(torch.cat(batch), torch.stack([row[:1000] for row in column]))
    assert all(map(torch.equal, more[-1], column))
    loaders.clear()
    del single, more
    gc.collect()
    assert client.staging_counts().held == 0
    assert torch.equal(torch.cat(batches[1]), torch.stack([row[:1000] for row in column])), "a worker's batch is a copy"


def test_what_was_lent_stays_readable_when_the_store_is_closed(make_client: MakeClient) -> None:
    client = make_client(32)
    keys = [f"{i}@mm" for i in range(8)]
    got = client.get(keys, custom_backend_meta=client.put(keys, plan_column(rows_of(3)).planned()))
    assert client.staging_counts().moved("get", "lend").values == 8
    client.close()
    gc.collect()
    assert agrees(got, 3)
    got[0].memory.fill_(1)


def test_a_pool_larger_than_the_headroom_leaves_byte_calls_their_memory(make_client: MakeClient) -> None:
    """With everything on lease the store's own byte calls would fail (-600, measured)."""
    client = make_client(32)
    keys = [f"{i}@mm" for i in range(40)]
    metas = client.put(keys, plan_column(rows_of(0, 40)).planned())
    kept = client.get(keys, custom_backend_meta=metas)
    assert client.staging_counts().held > 20 * MIB
    native = client._store._native
    assert native.put("bytes", b"x" * MIB) == 0
    assert native.get("bytes") == b"x" * MIB
    assert len(kept) == 40


def test_an_older_wheel_takes_memory_of_each_call(mooncake_0310: Path, tmp_path: Path) -> None:
    code = (
        "import sys, torch\n"
        "from relax_tq_rdma.payload import decode_row, plan_column\n"
        "from relax_tq_rdma.staging.client import DataplaneMooncakeStoreClient\n"
        "from tests.mooncake import backend_config\n"
        "staged = {'host_staging': True, 'host_staging_mb': 32}\n"
        "client = DataplaneMooncakeStoreClient(backend_config(sys.argv[1], settings=staged))\n"
        "rows = plan_column([{'a': torch.arange(500000)}, {'a': torch.arange(9)}]).planned()\n"
        "keys = ['0@x', '1@x', '0@y']\n"
        "got = client.get(keys, custom_backend_meta=client.put(keys, [*rows, {'a': None}]))\n"
        "counts = client.staging_counts()\n"
        "client.close()\n"
        "print(counts.misses, counts.capacity, decode_row(got[0].memory)['a'].sum().item(), got[2])\n"
    )
    binary = mooncake_0310 / "mooncake" / "mooncake_master"
    binary.chmod(0o755)
    master = MooncakeMaster(tmp_path / "old.log", binary=binary)
    path = os.pathsep.join([str(mooncake_0310), os.environ["PYTHONPATH"]])
    environ = {**os.environ, "MC_STORE_MEMCPY": "0", "RTQ_SEGMENT_MB": "64", "PYTHONPATH": path}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, master.address],
            capture_output=True,
            text=True,
            timeout=100,
            cwd=Path(__file__).parents[2],
            env=environ,
            check=False,
        )
    finally:
        master.kill()
    assert done.stdout.splitlines()[-1:] == [f"6 0 {sum(range(500000))} {{'a': None}}"], done.stderr[-2000:]


@pytest.mark.timeout(180)
def test_any_sequence_on_a_real_store(make_client: MakeClient, master: MooncakeMaster) -> None:
    client = make_client(STAGED["host_staging_mb"])
    put, get = client._store.batch_upsert_from, client._store.batch_get_into

    class Machine(StagingMachine):
        def make_client(self) -> Any:
            return client

        def close_client(self) -> None:
            """Closing takes two seconds; the machine on the fake store does it each time."""
            for keys, metas, _ in self.stored.values():
                client.clear(keys, custom_backend_meta=metas)
            self.stored.clear()

        def fail_next(self) -> None:
            client._store.batch_upsert_from = lambda keys, *_, **__: [-600] * len(keys)
            client._store.batch_get_into = lambda keys, *_, **__: [-600] * len(keys)

        def heal(self) -> None:
            client._store.batch_upsert_from, client._store.batch_get_into = put, get

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=30,
            stateful_step_count=20,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    counts = client.staging_counts()
    assert (counts.held, counts.retired) == (0, 0)
    assert master.allocated() == 64, "only the segment's mark is left"
