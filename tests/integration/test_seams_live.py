"""The plugin installed in real TransferQueue on real Ray: driver, workers, closing, restarting."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import psutil
import pytest
import ray
import torch
import transfer_queue as tq
from tensordict import NonTensorStack, TensorDict
from transfer_queue import interface
from transfer_queue.dataloader import StreamingDataset
from transfer_queue.storage.managers.base import StorageManagerFactory

import relax_tq_rdma
from relax_tq_rdma import Settings, StartError, TransferError
from relax_tq_rdma.coverage import board
from relax_tq_rdma.coverage import cli as status
from relax_tq_rdma.seams import tq_init
from relax_tq_rdma.section import KEY
from relax_tq_rdma.transport import controller
from relax_tq_rdma.transport import start as start_path

pytestmark = [pytest.mark.integration, pytest.mark.timeout(170)]

PATIENCE = 90.0
"""Seconds: a slow machine is not what these tests are about."""

COUNTING = Settings(accounting="summary", init_timeout_seconds=PATIENCE)
MOONCAKE = Settings(
    storage_backend="mooncake",
    mooncake_auto_init="job-owned",
    fallback_backend="none",
    init_timeout_seconds=PATIENCE,
)
HOST_CONF = {"controller": {"polling_mode": True}, "backend": {"SimpleStorage": {"num_data_storage_units": 1}}}


@pytest.fixture(scope="module", autouse=True)
def cluster(ray_cluster: Any) -> Any:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this file
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RTQ_SEGMENT_MB", "128")
        yield ray_cluster([{"RTQ_SEGMENT_MB": "128"}], cpus=4)


@pytest.fixture(autouse=True)
def closed_afterwards() -> Iterator[None]:
    registries = dict(StorageManagerFactory._registry)
    yield
    tq.close()
    relax_tq_rdma.uninstall()
    assert controller.find() is None
    assert StorageManagerFactory._registry == registries


@ray.remote(num_cpus=0)
class Worker:
    """A process of the job that is not its driver."""

    def init(self, conf: Any) -> Any:
        import relax_tq_rdma

        relax_tq_rdma.install()
        return tq.init(conf)

    def runs_on(self) -> Any:
        return relax_tq_rdma.current_decision(), relax_tq_rdma.current_start_line()

    def read(self, partition: str, fields: list[str], rows: int) -> Any:
        client = tq.get_client()
        meta = client.get_meta(data_fields=fields, batch_size=rows, partition_id=partition, task_name="worker")
        got = client.get_data(meta)
        return type(client.storage_manager).__name__, {field: list(rows_of(got[field])) for field in fields}

    def close(self) -> None:
        tq.close()


def rows_of(column: Any) -> Any:
    return column.unbind() if isinstance(column, torch.Tensor) else column


def batch(rows: int = 3) -> TensorDict:
    pictures = [{"pixel_values": torch.full((4, 3), float(i)), "fps": None} if i else None for i in range(rows)]
    jagged = [torch.arange(i + 1) for i in range(rows)]
    return TensorDict(
        {
            "tokens": torch.arange(rows * 5).reshape(rows, 5),
            "reward": torch.arange(rows) / 2,
            "loss_mask": torch.nested.as_nested_tensor(jagged, layout=torch.jagged),
            "pictures": NonTensorStack(*pictures),
        },
        batch_size=rows,
    )


FIELDS = ["tokens", "reward", "loss_mask", "pictures"]


def check(got: dict[str, list[Any]], rows: int = 3) -> None:
    want = batch(rows)
    for field in ("tokens", "reward", "loss_mask"):
        for row, wanted in zip(got[field], want[field].unbind(), strict=True):
            assert (row.dtype, row.shape) == (wanted.dtype, wanted.shape)
            assert torch.equal(row, wanted)
    for row, wanted in zip(got["pictures"], want["pictures"], strict=True):
        assert (row is None) == (wanted is None)
        if row is not None:
            assert list(row) == list(wanted)
            assert torch.equal(row["pixel_values"], wanted["pixel_values"])


def actors() -> set[str]:
    """Ids of every actor this cluster has ever had."""
    from ray._private import state

    return set(state.actors())


def start(settings: Settings) -> Any:
    relax_tq_rdma.install(settings)
    return tq.init(conf=HOST_CONF)


# --- without a flag ---------------------------------------------------------------------------------------------------


def test_without_a_flag_a_run_makes_no_actor_more_and_gives_the_same() -> None:
    made = []
    for install in (lambda: None, lambda: relax_tq_rdma.install(Settings())):
        before = actors()
        install()
        conf = tq.init(HOST_CONF)
        tq.get_client().put(batch(), partition_id="train_0")
        meta = tq.get_client().get_meta(FIELDS, batch_size=3, partition_id="train_0", task_name="t")
        got = tq.get_client().get_data(meta)
        assert KEY not in conf.backend.SimpleStorage
        assert type(tq.get_client().storage_manager).__module__.startswith("transfer_queue.")
        tq.close()
        made.append((len(actors() - before), {field: list(rows_of(got[field])) for field in FIELDS}))
    assert made[0][0] == made[1][0] == 2  # the controller and one storage unit
    for _, got in made:
        check(got)


# --- a job ------------------------------------------------------------------------------------------------------------


@pytest.mark.tq_versions
@pytest.mark.parametrize("settings", [COUNTING, MOONCAKE], ids=["simple", "mooncake"])
def test_a_job_from_start_to_restart(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    conf = start(settings)
    backend = conf.backend.storage_backend
    section = conf.backend[backend][KEY]
    assert tq.init(HOST_CONF) is conf  # again, without closing
    assert tq.init(conf) is conf

    client = tq.get_client()
    client.put(batch(), partition_id="train_0")
    worker = Worker.remote()
    ray.get(worker.init.remote(conf))
    name, got = ray.get(worker.read.remote("train_0", FIELDS, 3))
    assert name.startswith("Dataplane")
    check(got)
    assert ray.get(worker.runs_on.remote()) == (relax_tq_rdma.current_decision(), "")
    ray.get(worker.close.remote())
    assert ray.get(worker.runs_on.remote()) == (None, "")
    assert controller.look(2, section.job).state.value == "ours"  # a worker's close leaves the job alone
    with pytest.raises(ray.exceptions.RayTaskError, match="initialize"):
        ray.get(worker.read.remote("train_0", FIELDS, 3))

    dataset = StreamingDataset(
        conf, batch_size=3, micro_batch_size=3, data_fields=FIELDS, partition_id="train_0", task_name="s", dp_rank=0
    )
    data, _ = next(iter(dataset))
    check({field: list(rows_of(data[field])) for field in FIELDS})
    assert type(dataset._tq_client.storage_manager).__name__.startswith("Dataplane")
    dataset._tq_client.close()

    tq.kv_put("a", "kv", fields={"x": torch.ones(4)})
    tq.kv_put("a", "kv", fields={"x": torch.full((4,), 2.0)})
    assert torch.equal(tq.kv_batch_get(["a"], "kv")["x"].unbind()[0], torch.full((4,), 2.0))
    tq.kv_clear("a", "kv")
    client.clear_partition("train_0")

    lines = capsys.readouterr().err
    assert lines.count(f"[dataplane] backend={backend} ") == 1
    assert relax_tq_rdma.current_start_line() in lines.splitlines()
    decision = relax_tq_rdma.current_decision()
    assert decision is not None
    assert decision.backend == backend
    started = time.monotonic()
    tq.close()
    assert time.monotonic() - started < 30
    assert controller.find() is None
    assert ray.util.list_named_actors(all_namespaces=True) == []
    assert (relax_tq_rdma.current_decision(), relax_tq_rdma.current_start_line()) == (None, "")
    tq.close()

    again = tq.init(HOST_CONF)  # the host's global restart, in the same process
    assert again.backend[backend][KEY].job != section.job
    with pytest.raises(
        ray.exceptions.RayTaskError, match=rf"cannot join job {section.job}: a healthy controller of job "
    ):
        ray.get(worker.init.remote(conf))  # the config of the job that has ended
    ray.get(worker.init.remote(again))
    ray.kill(worker)


def test_a_clear_leaves_nothing_in_the_store_and_a_close_no_process() -> None:
    start(MOONCAKE)
    port = tq_init._guard_of(tq.init)._running.port
    master = psutil.Process(port._master.pid)
    store = tq.get_client().storage_manager.storage_client._store
    client = tq.get_client()
    meta = client.put(batch(), partition_id="train_0")
    client.put(TensorDict({"tokens": torch.ones(3, 9).long()}, batch_size=3), metadata=meta)  # an overwrite
    generations = [
        (f"{index}@{field}", found["generation"])
        for index, fields in zip(meta.global_indexes, meta._custom_backend_meta, strict=True)
        for field, found in fields.items()
    ]
    job = tq_init._guard_of(tq.init)._running.job
    assert set(store.batch_is_exist([f"{job}/{generation}/{key}" for key, generation in generations])) == {1}
    client.clear_partition("train_0")
    assert set(store.batch_is_exist([f"{job}/{generation}/{key}" for key, generation in generations])) == {0}
    tq.close()
    assert not master.is_running() or master.status() == psutil.STATUS_ZOMBIE


def test_a_put_that_the_controller_cannot_record_fails() -> None:
    """Upstream reports success, and the consumer then reads with the dtype of the first put."""
    start(COUNTING)
    client = tq.get_client()
    client.put(TensorDict({"x": torch.ones(2, 2)}, batch_size=2), partition_id="train_0")
    with pytest.raises(TransferError, match=r"put of partition train_0: stored, but .* refused to record it"):
        client.put(TensorDict({"x": torch.ones(2, 2, dtype=torch.int64)}, batch_size=2), partition_id="train_0")


def test_a_master_that_dies_after_the_start_fails_the_job_and_changes_no_backend() -> None:
    start(MOONCAKE)
    running = tq_init._guard_of(tq.init)._running
    client = tq.get_client()
    client.put(batch(), partition_id="train_7")
    meta = client.get_meta(FIELDS, batch_size=3, partition_id="train_7", task_name="t")
    psutil.Process(running.port._master.pid).kill()
    for call, verb in (
        (lambda: client.get_data(meta), "get"),
        (lambda: client.put(batch(), partition_id="train_7"), "put"),
    ):
        started = time.monotonic()
        with pytest.raises(
            TransferError, match=rf"{verb} of partition train_7: field .* \(rows .*master at .* is dead or"
        ) as told:
            call()
        assert "restart the job; a running job never changes its backend" in str(told.value)
        assert time.monotonic() - started < 20
    assert type(client.storage_manager).__name__ == "DataplaneMooncakeStorageManager"


DRIVER = """
import json, sys, time, ray, relax_tq_rdma as r, transfer_queue as tq
from relax_tq_rdma.seams import tq_init
r.install(r.Settings.from_dict(json.loads(sys.argv[2]))[0])
ray.init(address=sys.argv[1], log_to_driver=False)
tq.init({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}})
print(tq_init._guard_of(tq.init)._running.port._master.pid, flush=True)
time.sleep(100)
"""


def test_a_driver_that_is_told_to_end_leaves_nothing(cluster: Any) -> None:
    command = [sys.executable, "-c", DRIVER, cluster.address, json.dumps(MOONCAKE.to_dict())]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert driver.stdout is not None
        master = psutil.Process(int(driver.stdout.readline()))
        driver.terminate()
        assert driver.wait(40) == signal.SIGTERM  # Ray turns it into an orderly exit
        assert not master.is_running() or master.status() == psutil.STATUS_ZOMBIE
        assert controller.find() is None
    finally:
        driver.kill()
        driver.wait()
        driver.stdout.close()


# --- joining what is not there ----------------------------------------------------------------------------------------


class _NeverFinished:
    def get_config(self) -> None:
        return None


def test_a_worker_does_not_create_and_does_not_wait_for_ever() -> None:
    conf = start(COUNTING)
    conf.backend.SimpleStorage[KEY].settings.init_timeout_seconds = 3.0
    tq.close()
    relax_tq_rdma.uninstall()
    relax_tq_rdma.install()
    with pytest.raises(StartError, match="there is no controller: start the driver first; a worker never creates"):
        tq.init(conf)
    assert controller.find() is None

    unfinished = ray.remote(num_cpus=0)(_NeverFinished).options(name=controller.NAME, namespace=controller.NAMESPACE)
    handle = unfinished.remote()
    started = time.monotonic()
    with pytest.raises(StartError, match="its config did not come within 3 s: its init never finished"):
        tq.init(conf)
    assert time.monotonic() - started < 10
    assert controller.find() is not None  # only the owner may remove it
    ray.kill(handle)
    controller.kill(5)
    assert interface._TQ_CLIENT is None


def test_a_start_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StorageManagerFactory, "create", classmethod(lambda cls, *a, **k: 1 / 0))
    with pytest.raises(StartError):
        start(msgspec.structs.replace(COUNTING, fallback_backend="none"))
    monkeypatch.undo()
    assert controller.find() is None
    assert ray.util.list_named_actors(all_namespaces=True) == []
    assert interface._TQ_CLIENT is None


def test_a_job_is_seen_from_the_beginning_of_its_start_and_a_failed_start_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    really = start_path.start_job
    seen: list[board.Board] = []

    def look_then_start(*args: Any, **named: Any) -> Any:
        seen.append(board.read())
        if len(seen) == 1:
            raise StartError("not today")
        return really(*args, **named)

    monkeypatch.setattr(start_path, "start_job", look_then_start)
    relax_tq_rdma.install(COUNTING)
    with pytest.raises(StartError, match="not today"):
        tq.init(HOST_CONF)
    with pytest.raises(StartError, match="no job with the plugin runs on this Ray cluster, and none is starting"):
        status.look()
    tq.init(HOST_CONF)
    for at_the_time in seen:
        with pytest.raises(StartError, match=r"job \w{16} has been starting for \d+ s \(driver pid \d+ on "):
            status.of_the_running_job(at_the_time, time.time())
    found = status.look()
    assert found.job.start_line == relax_tq_rdma.current_start_line()
    assert [process.role for process in found.processes] == ["driver"]
