"""Device tensors in TransferQueue's threads, where current stream and current device are not the caller's."""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from relax_tq_rdma.payload import decode_row, plan_column
from relax_tq_rdma.staging import payload_mixin
from relax_tq_rdma.staging.devices import DeviceStaging, settle
from relax_tq_rdma.transport.memory import MIB
from tests.strict_store import StrictStore
from tests.unit.conftest import MakeClient
from tests.unit.test_client import TENSORS, bits
from tests.unit.test_payload_device import SLEEP_CYCLES
from tests.unit.test_payload_mixin import Manager, Unit, batch, get, meta
from tests.unit.test_staging import STAGED, pictures, put_rows

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


# --- a put waits for what makes its tensors ---------------------------------------------------------------------------


def test_settling_waits_for_cuda_devices_only(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    settle({torch.device("cpu"), torch.device("meta")})
    assert waited == []
    settle([torch.device("cuda", 1), torch.device("cpu")])
    assert waited == [torch.device("cuda", 1)]


def test_rows_are_settled_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"x": torch.zeros(70_000), "raw": [1]}
    settled: list[set[torch.device]] = []

    def kernel_ends(found: set[torch.device]) -> None:
        settled.append(found)
        row["x"].fill_(7)

    monkeypatch.setattr(payload_mixin, "settle", kernel_ends)
    manager = Manager(Unit())
    in_a_thread(manager, batch([row]))
    assert settled == [{torch.device("cpu")}]
    assert bool((get(manager, [0])[0]["x"] == 7).all())


def in_a_thread(manager: Manager, data: TensorDict) -> None:
    """Put as TransferQueue's synchronous calls do: from the thread of its loop."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, manager.put_data(data, meta(list(range(data.batch_size[0]))))).result()


@cuda
@pytest.mark.parametrize("as_rows", [True, False])
def test_a_put_waits_for_the_stream_that_makes_its_tensors(as_rows: bool) -> None:
    made = torch.zeros(2, 1 << 20, device="cuda")
    torch.cuda.synchronize()
    unit = Unit()
    manager = Manager(unit)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(SLEEP_CYCLES)
        made.fill_(7)
        data = batch([{"x": row} for row in made]) if as_rows else TensorDict({"x": made}, batch_size=2)
        in_a_thread(manager, data)
        made.fill_(9)
    stored = [row["x"] for row in get(manager, [0, 1])] if as_rows else unit.get(["x"], [0, 1])["x"]
    assert [bool((row == 7).all()) for row in stored] == [True, True]


# --- what a get gave can be sent to the device and let go of ----------------------------------------------------------


@cuda
def test_lent_memory_may_be_let_go_of_while_its_copy_to_the_device_runs(make_client: MakeClient) -> None:
    """The fake pool overwrites memory that comes back at once."""
    store = StrictStore()
    store.mounts = [256 * MIB]
    client = make_client(store, settings=STAGED)
    rows = pictures(2, 1 << 20)
    metas = put_rows(client, rows)
    got = client.get(["0@mm", "1@mm"], custom_backend_meta=metas)
    assert client.staging_counts().moved("get", "lend").values == 2
    decoded = [decode_row(row.memory) for row in got]
    torch.cuda._sleep(SLEEP_CYCLES)
    there = [row["pixels"].to("cuda", non_blocking=True) for row in decoded if row is not None]
    del got, decoded
    gc.collect()
    assert client.staging_counts().held == 0
    assert [bool((copy == row["pixels"].cuda()).all()) for copy, row in zip(there, rows, strict=True)] == [True, True]


# --- TransferQueue's GPU staging buffer -------------------------------------------------------------------------------


class DeviceStore(StrictStore):
    """A store whose NIC reads and writes GPU memory."""

    def _read(self, pointer: int, size: int) -> bytes:
        value = bytearray(size)
        _copy(ctypes.addressof(ctypes.c_char.from_buffer(value)), pointer, size)
        return bytes(value)

    def _write(self, pointer: int, value: bytes) -> None:
        _copy(pointer, ctypes.cast(ctypes.c_char_p(value), ctypes.c_void_p).value or 0, len(value))


def _copy(target: int, source: int, nbytes: int) -> None:
    from cuda.bindings import runtime

    stream = torch.cuda.Stream()  # of its own: a NIC waits for no stream
    kind = runtime.cudaMemcpyKind.cudaMemcpyDefault
    (code,) = runtime.cudaMemcpyAsync(target, source, nbytes, kind, stream.cuda_stream)
    assert code == runtime.cudaError_t.cudaSuccess
    stream.synchronize()


MakeGdr = Callable[[], Any]


@pytest.fixture
def store() -> DeviceStore:
    made = DeviceStore()
    made.mounts = [256 * MIB]  # some producer's
    return made


@pytest.fixture
def make_gdr(make_client: MakeClient, store: DeviceStore, monkeypatch: pytest.MonkeyPatch) -> MakeGdr:
    """A client with a GPU buffer of 4 MiB on the device that is current now, whatever the NICs of this machine."""
    pytest.importorskip("cuda.bindings", reason="needs the package cuda-python")
    from cuda.bindings import driver

    monkeypatch.setattr(driver, "cuDeviceGetAttribute", lambda *_: (driver.CUresult.CUDA_SUCCESS, 1))

    def make() -> Any:
        client = make_client(store)
        client.use_gdr, client._gdr_staging = True, DeviceStaging(4 * MIB)
        return client

    return make


@cuda
@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_comes_back_through_the_gpu_buffer(
    make_gdr: MakeGdr, store: DeviceStore, name: str, there: bool
) -> None:
    client = make_gdr()
    value = TENSORS[name]
    metas = client.put(["0@x"], [value.detach().cuda() if there else value])
    [got] = client.get(["0@x"], custom_backend_meta=metas)
    assert (got.device.type, got.dtype, got.shape) == ("cuda", value.dtype, value.shape)
    assert bits(got.cpu()) == bits(value)
    assert store.refused == []


@cuda
def test_rows_and_large_tensors_come_back_through_the_gpu_buffer(make_gdr: MakeGdr) -> None:
    client = make_gdr()
    rows = pictures(3, 300_000)
    large = torch.arange(3 << 20, device="cuda")
    keys = ["0@mm", "1@mm", "2@mm", "0@x"]
    metas = client.put(keys, [*plan_column(rows).planned(), large])
    *back, tensor = client.get(keys, custom_backend_meta=metas)
    assert metas[3]["n_chunks"] == 6
    assert torch.equal(tensor, large)
    for found, row in zip(back, rows, strict=True):
        decoded = decode_row(found.memory)
        assert decoded is not None
        assert {key: value.device.type for key, value in decoded.items()} == dict.fromkeys(row, "cuda")
        assert all(torch.equal(decoded[key].cpu(), row[key]) for key in row)


@cuda
def test_a_get_does_not_write_to_memory_that_queued_work_still_reads(make_gdr: MakeGdr) -> None:
    """The allocator hands a freed block on at once, to be used after the work queued on its stream."""
    client = make_gdr()
    metas = client.put(["0@x"], [torch.full((1 << 19,), 5.0)])
    freed = torch.full((1 << 19,), 1.0, device="cuda")
    read = freed + 1  # a kernel's first use waits for the device: it is loaded then
    torch.cuda.synchronize()
    address = freed.data_ptr()
    torch.cuda._sleep(SLEEP_CYCLES)
    torch.add(freed, 1, out=read)
    del freed
    [got] = client.get(["0@x"], custom_backend_meta=metas)
    assert got.data_ptr() == address, "the test has not met the case"
    assert bool((read == 2).all())
    assert bool((got == 5).all())


@two
def test_the_gpu_buffer_is_on_the_callers_device(make_gdr: MakeGdr) -> None:
    with torch.cuda.device(1):
        client = make_gdr()
        metas = client.put(["0@x", "1@x"], [torch.ones(5), torch.ones(5, device="cuda:1")])
        got = client.get(["0@x", "1@x"], custom_backend_meta=metas)
    assert [tensor.device for tensor in got] == [torch.device("cuda", 1)] * 2
    assert all(torch.equal(tensor.cpu(), torch.ones(5)) for tensor in got)
