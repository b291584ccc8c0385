"""The Mooncake client on a real store over TCP, and what it says when things die (FC-22, FC-24, FC-27, FC-28)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from relax_tq_rdma.staging.client import DataplaneMooncakeStoreClient
from relax_tq_rdma.staging.connect import mounts_later
from relax_tq_rdma.staging.errors import StoreFault
from relax_tq_rdma.transport.memory import MIB
from tests.mooncake import Holder, MooncakeMaster, backend_config

pytestmark = pytest.mark.integration

StartMaster = Callable[..., MooncakeMaster]
MakeClient = Callable[..., Any]


@pytest.fixture
def start_master(tmp_path: Path) -> Iterator[StartMaster]:
    started: list[MooncakeMaster] = []

    def start(**flags: Any) -> MooncakeMaster:
        started.append(MooncakeMaster(tmp_path / "master.log", **flags))
        return started[-1]

    yield start
    for master in started:
        master.kill()


@pytest.fixture
def make_client(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeClient]:
    made: list[Any] = []
    monkeypatch.setenv("MC_STORE_MEMCPY", "0")
    monkeypatch.setenv("RTQ_SEGMENT_MB", "64")

    def make(master: MooncakeMaster) -> Any:
        made.append(DataplaneMooncakeStoreClient(backend_config(master.address)))
        return made[-1]

    yield make
    for client in made:
        client.close()


def test_values_of_every_kind_cross_between_two_processes_worth_of_clients(
    start_master: StartMaster, make_client: MakeClient
) -> None:
    master = start_master()
    producer, consumer = make_client(master), make_client(master)
    shared = torch.arange(1000.0)
    values: list[Any] = [
        torch.randn(700, 1176),
        torch.randn(3, 4).to(torch.bfloat16).t(),
        torch.tensor(2.5),
        torch.empty(0, 5),
        shared,
        shared,
        shared[100:300],
        None,
        {"pixel_values": torch.randn(16, 8), "image_grid_thw": torch.tensor([[1, 2, 3]]), "fps": None},
        "text",
    ]
    keys = [f"{i}@field" for i in range(len(values))]
    metas = producer.put(keys, values)
    got = consumer.get(keys, custom_backend_meta=metas)
    for value, back in zip(values, got, strict=True):
        if isinstance(value, torch.Tensor):
            assert (back.dtype, back.shape) == (value.dtype, value.shape)
            assert torch.equal(back, value)
    assert got[7] is None
    assert torch.equal(got[8]["pixel_values"], values[8]["pixel_values"])
    assert got[8]["fps"] is None
    assert got[9] == "text"
    consumer.clear(keys, custom_backend_meta=metas)
    mounted = 1 if mounts_later() else 2
    assert len(master.segments()) == mounted  # a consumer mounts nothing, where the wheel lets it choose
    assert master.allocated() == 64 * mounted  # their marks


def test_an_overwrite_is_a_new_value_and_the_old_one_stays_readable(
    start_master: StartMaster, make_client: MakeClient
) -> None:
    client = make_client(start_master())
    old, new = client.put(["0@x"], [torch.ones(4)]), client.put(["0@x"], [torch.full((2, 3), 7)])
    assert torch.equal(client.get(["0@x"], custom_backend_meta=old)[0], torch.ones(4))
    client.clear(["0@x"], custom_backend_meta=old)
    assert torch.equal(client.get(["0@x"], custom_backend_meta=new)[0], torch.full((2, 3), 7))
    with pytest.raises(StoreFault, match=r"field x \(row 0\): lost: .*cleared or overwritten after"):
        client.get(["0@x"], custom_backend_meta=old)


def test_close_leaves_no_segment_behind(start_master: StartMaster, make_client: MakeClient) -> None:
    master = start_master()
    client = make_client(master)
    client.put(["0@x"], [torch.zeros(20 * MIB, dtype=torch.uint8)])
    assert len(master.segments()) == 1
    client.close()
    client.close()
    assert master.segments() == []


def test_close_while_other_threads_put(start_master: StartMaster, make_client: MakeClient) -> None:
    """The native store crashes the process when it is closed under a running call."""
    master = start_master()
    client = make_client(master)
    client.put(["0@x"], [torch.zeros(20 * MIB, dtype=torch.uint8)])
    told: list[str] = []

    def put(no: int) -> None:
        try:
            while True:
                metas = client.put([f"{no}@x"], [torch.ones(4 * MIB, dtype=torch.uint8)])
                client.clear([f"{no}@x"], custom_backend_meta=metas)
        except StoreFault as fault:
            told.append(str(fault))

    threads = [threading.Thread(target=put, args=(no,), daemon=True) for no in range(1, 4)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    client.close()
    for thread in threads:
        thread.join(20)
    assert len(told) == 3
    assert all("the connection to the Mooncake store is closed" in text for text in told)
    assert master.segments() == []


def test_a_put_waits_for_room_that_another_thread_makes(start_master: StartMaster, make_client: MakeClient) -> None:
    client = make_client(start_master())
    held = client.put(["0@x"], [torch.zeros(40 * MIB, dtype=torch.uint8)])
    timer = threading.Timer(1.0, client.clear, (["0@x"],), {"custom_backend_meta": held})
    timer.start()
    started = time.monotonic()
    metas = client.put(["1@x"], [torch.ones(40 * MIB, dtype=torch.uint8)])
    assert 0.9 < time.monotonic() - started < 10
    assert int(client.get(["1@x"], custom_backend_meta=metas)[0].sum()) == 40 * MIB
    timer.join()


def test_a_store_that_stays_full_and_a_value_that_never_fits(
    start_master: StartMaster, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RTQ_STORE_WAIT_SECONDS", "2")
    master = start_master()
    client = make_client(master)
    client.put(["0@x"], [torch.zeros(40 * MIB, dtype=torch.uint8)])
    before, started = master.allocated(), time.monotonic()
    with pytest.raises(StoreFault, match=r"row 1\): no room for 40 MiB: .*segment has 64 MiB"):
        client.put(["1@x", "2@x"], [torch.zeros(40 * MIB, dtype=torch.uint8), torch.ones(5)])
    assert 1.9 < time.monotonic() - started < 10
    started = time.monotonic()
    with pytest.raises(StoreFault, match=r"row 3\): a value of 80 MiB can never fit: a segment holds 64 MiB"):
        client.put(["3@x"], [torch.zeros(80 * MIB, dtype=torch.uint8)])
    assert time.monotonic() - started < 1
    assert master.allocated() == before


def test_data_of_a_killed_holder_is_called_lost_and_puts_go_on_when_its_segment_is_dropped(
    start_master: StartMaster, make_client: MakeClient
) -> None:
    master = start_master(client_ttl=3)
    meta = {"generation": "g", "dtype": "uint8", "shape": [1000]}
    holder = Holder(master, "job1/g/0@x", 1000)
    client = make_client(master)
    assert int(client.get(["0@x"], custom_backend_meta=[meta])[0].sum()) == 7000
    holder.kill()
    started = time.monotonic()
    with pytest.raises(StoreFault, match=r"field x \(row 0\): lost: the process that holds it is dead.*\(-800\)"):
        client.get(["0@x"], custom_backend_meta=[meta])
    assert time.monotonic() - started < 15
    metas = client.put([f"{i}@y" for i in range(8)], list(range(8)))  # some go to the dead segment first
    assert client.get([f"{i}@y" for i in range(8)], custom_backend_meta=metas) == list(range(8))
    assert time.monotonic() - started < 40
    with pytest.raises(StoreFault, match=r"lost: the store no longer has what was put, not found \(-704\)"):
        client.get(["0@x"], custom_backend_meta=[meta])


def test_a_frozen_holder_costs_a_bounded_time(
    start_master: StartMaster, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine itself takes 30 s (0.3.13) or 60 s (0.3.10) to give up."""
    monkeypatch.setenv("RTQ_STORE_CALL_SECONDS", "2")
    master = start_master(client_ttl=60)
    holder = Holder(master, "job1/g/0@x", 1000)
    client = make_client(master)
    os.kill(holder.process.pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(StoreFault, match=r"field x \(row 0\): batch_get_into did not return within 2 s"):
        client.get(["0@x"], custom_backend_meta=[{"generation": "g", "dtype": "uint8", "shape": [1000]}])
    assert time.monotonic() - started < 6
    holder.kill()


def test_an_older_wheel_that_cannot_mount_later(
    start_master: StartMaster, mooncake_0310: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import sys, torch\n"
        "from relax_tq_rdma.staging.client import DataplaneMooncakeStoreClient\n"
        "from relax_tq_rdma.staging.connect import mounts_later\n"
        "from tests.mooncake import backend_config\n"
        "client = DataplaneMooncakeStoreClient(backend_config(sys.argv[1]))\n"
        "metas = client.put(['0@x', '0@y'], [torch.arange(9), {'a': None}])\n"
        "got = client.get(['0@x', '0@y'], custom_backend_meta=metas)\n"
        "client.close()\n"
        "print(mounts_later(), torch.equal(got[0], torch.arange(9)), got[1])\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(mooncake_0310), prepend=os.pathsep)
    binary = mooncake_0310 / "mooncake" / "mooncake_master"
    binary.chmod(0o755)
    master = start_master(binary=binary)  # master and clients must be of one version (FC-16)
    environ = {**os.environ, "MC_STORE_MEMCPY": "0", "RTQ_SEGMENT_MB": "64"}
    command = [sys.executable, "-c", code, master.address]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, cwd=Path(__file__).parents[2], env=environ, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["False True {'a': None}"], done.stderr[-2000:]
    assert master.segments() == []


def test_a_process_that_was_declared_dead_is_told_so_by_its_next_put(start_master: StartMaster) -> None:
    code = (
        "import sys\n"
        "from relax_tq_rdma.staging.client import DataplaneMooncakeStoreClient\n"
        "from tests.mooncake import backend_config\n"
        "client = DataplaneMooncakeStoreClient(backend_config(sys.argv[1]))\n"
        "print(client.put(['0@x'], [1])[0]['generation'], flush=True)\n"
        "sys.stdin.readline()\n"
        "try:\n    client.put(['1@x'], [2])\nexcept Exception as exc:\n    print(type(exc).__name__, exc, flush=True)\n"
    )
    master = start_master(client_ttl=2)
    child = subprocess.Popen(
        [sys.executable, "-c", code, master.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "MC_STORE_MEMCPY": "0", "RTQ_SEGMENT_MB": "64"},
    )
    try:
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.readline().strip()
        os.kill(child.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 20
        while master.segments() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert master.segments() == []
        os.kill(child.pid, signal.SIGCONT)
        while not master.segments() and time.monotonic() < deadline:
            time.sleep(0.2)  # the engine mounts again by itself
        child.stdin.write("\n")
        child.stdin.flush()
        assert "StoreFault the master has dropped this process's segment" in child.stdout.readline()
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()
