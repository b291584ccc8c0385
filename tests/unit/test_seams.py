"""The seams T1 and T2: looked at, taken, given back, and never taken from a stranger."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transfer_queue as tq
from transfer_queue import interface
from transfer_queue.storage.clients.base import StorageClientFactory
from transfer_queue.storage.clients.mooncake_client import MooncakeStoreClient
from transfer_queue.storage.managers.base import StorageManager, StorageManagerFactory
from transfer_queue.storage.managers.mooncake_manager import MooncakeStorageManager
from transfer_queue.storage.managers.simple_storage_manager import AsyncSimpleStorageManager

from relax_tq_rdma import seams
from relax_tq_rdma.errors import SeamError, StartError
from relax_tq_rdma.seams import tq_init
from relax_tq_rdma.seams.base import require
from relax_tq_rdma.seams.tq_init import Guard, TqInit
from relax_tq_rdma.seams.tq_registry import TqRegistry
from relax_tq_rdma.section import KEY, JobSection
from relax_tq_rdma.settings import Settings
from relax_tq_rdma.transport.report import Decision

pytestmark = pytest.mark.tq_versions


@pytest.fixture(autouse=True)
def untouched_afterwards() -> Iterator[None]:
    """Every test gives back what it took, or fails."""
    before = everything()
    yield
    assert everything() == before


def everything() -> list[Any]:
    return [
        tq.init,
        tq.close,
        interface.init,
        interface.close,
        dict(StorageManagerFactory._registry),
        dict(StorageClientFactory._registry),
        sys.meta_path[:],
    ]


# --- T2 ---------------------------------------------------------------------------------------------------------------


def test_the_installed_transfer_queue_fits() -> None:
    reports = seams.reports(Settings(accounting="summary"))
    assert [(report.name[:2], report.ok) for report in reports] == [("T1", True), ("T2", True)]
    assert all(report.installed.startswith("TransferQueue 0.1.1") for report in reports)


def test_the_registries_are_taken_and_given_back() -> None:
    seam = TqRegistry()
    seam.apply()
    seam.apply()
    try:
        taken = {**StorageManagerFactory._registry, **StorageClientFactory._registry}
        for name, upstream in (
            ("SimpleStorage", AsyncSimpleStorageManager),
            ("MooncakeStore", MooncakeStorageManager),
            ("MooncakeStoreClient", MooncakeStoreClient),
        ):
            assert issubclass(taken[name], upstream)
            assert taken[name].__module__.startswith("relax_tq_rdma.")
        assert seam.check().ok
    finally:
        seam.remove()
        seam.remove()
    assert StorageManagerFactory._registry["SimpleStorage"] is AsyncSimpleStorageManager


def test_a_name_that_a_stranger_holds_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = type("Theirs", (AsyncSimpleStorageManager,), {"__module__": "somebody.patches"})
    monkeypatch.setitem(StorageManagerFactory._registry, "SimpleStorage", stranger)
    report = TqRegistry().check()
    assert not report.ok
    assert report.taken_by == "somebody.patches (name SimpleStorage)"
    with pytest.raises(SeamError, match=r"seam T2 .* is taken by somebody\.patches .*TransferQueue 0\.1\.1"):
        require([TqRegistry()])


def test_what_a_stranger_registers_later_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    seam = TqRegistry()
    seam.apply()
    stranger = type("Theirs", (MooncakeStorageManager,), {"__module__": "somebody.patches"})
    monkeypatch.setitem(StorageManagerFactory._registry, "MooncakeStore", stranger)
    seam.remove()
    assert StorageManagerFactory._registry["MooncakeStore"] is stranger
    assert StorageManagerFactory._registry["SimpleStorage"] is AsyncSimpleStorageManager
    monkeypatch.undo()
    StorageManagerFactory.register("MooncakeStore")(MooncakeStorageManager)


def test_a_method_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(StorageManager, "_notify_and_wait")
    report = TqRegistry().check()
    assert "no AsyncSimpleStorageManager._notify_and_wait" in report.found
    assert "TransferQueue 0.1.1" in report.text


def test_a_parameter_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MooncakeStoreClient, "get", lambda self, keys, shapes=None, dtypes=None: [])
    assert "MooncakeStoreClient.get without parameter custom_backend_meta" in TqRegistry().check().text


def test_the_check_decides_not_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_tq_rdma.seams.base.metadata.version", lambda name: "9.9")
    report = TqRegistry().check()
    assert report.ok
    assert report.installed == "TransferQueue 9.9"


# --- T1 ---------------------------------------------------------------------------------------------------------------


def test_init_and_close_are_wrapped_in_both_places_and_given_back() -> None:
    before = interface.init, interface.close
    seam = TqInit()
    seam.apply()
    seam.apply()
    try:
        assert tq.init is interface.init is not before[0]
        assert tq.close is interface.close is not before[1]
        assert inspect.signature(tq.init) == inspect.signature(before[0])
        assert tq.init.__doc__ == before[0].__doc__
        assert seam.check().ok
    finally:
        seam.remove()
        seam.remove()


def test_a_function_that_a_stranger_wrapped_is_not_wrapped_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tq, "init", lambda conf=None: None)
    report = TqInit().check()
    assert (report.ok, report.taken_by) == (False, __name__)


def test_who_wraps_our_function_later_still_reaches_the_original_after_removal() -> None:
    original, calls = interface.init, []
    seam = TqInit(Settings(accounting="summary"))
    seam.apply()
    ours = tq.init
    tq.init = theirs = lambda conf=None: ours(conf)
    try:
        seam.remove()
        assert (tq.init, interface.init) == (theirs, original)
        tq_init._guard_of(ours).original_init = calls.append
        tq.init("conf")
        assert calls == ["conf"]
    finally:
        tq.init = original


def test_a_state_variable_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(interface, "_TQ_STORAGE")
    assert "no _TQ_STORAGE in transfer_queue.interface" in TqInit().check().text


def test_transfer_queue_that_is_not_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transfer_queue.interface", None)
    with pytest.raises(SeamError, match=r"seam T1 .*ModuleNotFoundError"):
        require([TqInit()])


# --- what a worker's init does ----------------------------------------------------------------------------------------


def section(job: str = "job1") -> JobSection:
    return JobSection(
        job=job,
        settings=Settings(accounting="summary"),
        decision=Decision(backend="SimpleStorage", protocol="zmq"),
        plugin_version="0",
    )


def conf_of(job: str) -> dict[str, Any]:
    return {"backend": {"storage_backend": "SimpleStorage", "SimpleStorage": {KEY: section(job).to_dict()}}}


class World:
    """TransferQueue's module and the cluster, as a guard sees them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, settings: Settings | None = None, blocked: str = "") -> None:
        self.calls: list[Any] = []
        self.running = "job1"
        self.managers = ("DataplaneSimpleStorageManager", "_ManagerOfJob")
        self.guard = Guard(settings, self.original_init, self.original_close, blocked=blocked)
        monkeypatch.setattr(interface, "_TQ_CLIENT", None)
        monkeypatch.setattr(interface, "_TQ_CONTROLLER", "handle")
        monkeypatch.setattr(interface, "_init_from_existing", self.init_from_existing)
        monkeypatch.setattr(tq_init.attach, "prove", self.prove)
        monkeypatch.setattr(tq_init.attach, "running_section", lambda: section(self.running) if self.running else None)
        monkeypatch.setattr(tq_init.attach, "is_running", lambda job: job == self.running)
        monkeypatch.setattr(
            tq_init.tq_state, "client_facts", lambda: SimpleNamespace(manager=self.managers, protocol="")
        )

    def original_init(self, conf: Any) -> Any:
        self.calls.append(("init", conf))
        return "upstream's"

    def original_close(self) -> None:
        self.calls.append(("close", interface._TQ_CONTROLLER))
        interface._TQ_CLIENT = None

    def prove(self, section: JobSection, limit: float) -> None:
        self.calls.append(("prove", section.job, limit))

    def init_from_existing(self) -> bool:
        self.calls.append("attach")
        if not self.running:
            return False
        manager = SimpleNamespace(config={KEY: section(self.running).to_dict()})
        interface._TQ_CLIENT = SimpleNamespace(storage_manager=manager)
        return True


def test_a_config_without_our_section_goes_to_upstream_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    conf = {"backend": {"storage_backend": "SimpleStorage", "SimpleStorage": {}}}
    assert world.guard.init(conf) == "upstream's"
    world.guard.close()
    assert world.calls == [("init", conf), ("close", "handle")]


@pytest.mark.parametrize("conf", [{}, {"backend": {}}, {"controller": {"polling_mode": True}}, [], "text"])
def test_a_config_that_is_not_complete_goes_to_upstream_too(monkeypatch: pytest.MonkeyPatch, conf: Any) -> None:
    world = World(monkeypatch)
    assert world.guard.init(conf) == "upstream's"


def test_a_worker_joins_the_job_of_its_config_and_leaves_without_killing_its_controller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch)
    conf = conf_of("job1")
    assert world.guard.init(conf) is conf
    assert world.guard.init(conf) is conf  # again: it has the client already
    assert [call for call in world.calls if call[0] != "close"] == [("prove", "job1", 30.0), "attach"]
    assert world.guard.is_running
    world.guard.close()
    assert world.calls[-1] == ("close", None)
    assert not world.guard.is_running
    world.guard.close()
    assert world.calls[-1][0] == "close"


def test_a_worker_without_a_config_joins_the_job_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    assert world.guard.init(None) is None
    assert "attach" in world.calls
    world.running = ""
    other = World(monkeypatch)
    other.running = ""
    assert other.guard.init(None) == "upstream's"


def test_a_worker_that_changes_jobs_leaves_the_old_one_first(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.guard.init(conf_of("job1"))
    world.running = "job2"
    world.calls.clear()
    world.guard.init(conf_of("job2"))
    assert world.calls == [("close", None), ("prove", "job2", 30.0), "attach"]


def test_a_worker_never_creates_a_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.running = ""
    with pytest.raises(StartError, match="controller of job job1 went away while this process joined"):
        world.guard.init(conf_of("job1"))
    assert ("init", conf_of("job1")) not in world.calls


def test_a_worker_whose_manager_is_a_strangers_does_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.managers = ("AsyncSimpleStorageManager",)
    with pytest.raises(StartError, match=r"its storage manager is AsyncSimpleStorageManager.*seam T2"):
        world.guard.init(conf_of("job1"))
    assert interface._TQ_CLIENT is None


def test_a_worker_with_a_broken_seam_fails_only_when_the_job_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, blocked="seam T2 does not fit")
    assert world.guard.init({"backend": {}}) == "upstream's"
    with pytest.raises(SeamError, match="seam T2 does not fit"):
        world.guard.init(conf_of("job1"))


def test_the_driver_joins_a_running_job_whose_config_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, Settings(accounting="summary"))
    world.guard.init(conf_of("job1"))
    assert "attach" in world.calls


def test_a_close_in_the_middle_of_a_close_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler of the host closes while the host closes."""
    world = World(monkeypatch)
    guard = Guard(None, world.original_init, lambda: (world.original_close(), guard.close()))
    guard.close()
    assert [call[0] for call in world.calls] == ["close"]
    guard.close()
    assert [call[0] for call in world.calls] == ["close", "close"]


# --- readiness without an import --------------------------------------------------------------------------------------

AFTER_IMPORT = """
import sys, relax_tq_rdma
relax_tq_rdma.install()
relax_tq_rdma.install()
print("before", "torch" in sys.modules, "transfer_queue" in sys.modules)
import transfer_queue
from importlib import resources
from transfer_queue.storage.managers.base import StorageManagerFactory
print("seams", StorageManagerFactory._registry["MooncakeStore"].__name__, hasattr(transfer_queue.init, "__wrapped__"))
print("data", (resources.files("transfer_queue") / "config.yaml").is_file())
relax_tq_rdma.uninstall()
print("after", StorageManagerFactory._registry["MooncakeStore"].__name__, hasattr(transfer_queue.init, "__wrapped__"))
"""


def test_a_worker_is_ready_without_importing_anything_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", AFTER_IMPORT], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "before False False",
        "seams DataplaneMooncakeStorageManager True",
        "data True",
        "after MooncakeStorageManager False",
    ]


def test_a_worker_that_is_uninstalled_before_the_import_leaves_no_trace() -> None:
    code = (
        "import sys, relax_tq_rdma; before = sys.meta_path[:]; relax_tq_rdma.install(); relax_tq_rdma.uninstall(); "
        "print(sys.meta_path == before); import transfer_queue; print(hasattr(transfer_queue.init, '__wrapped__'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.split() == ["True", "False"], done.stderr


def test_the_guard_is_one_for_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    threads = [threading.Thread(target=world.guard.init, args=(conf_of("job1"),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert world.calls.count("attach") == 1


def test_a_forked_child_does_not_close_the_drivers_data_plane(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, Settings(accounting="summary"))
    world.guard._running, world.guard._owner = tq_init._Running("job1", None, None), os.getpid() + 1
    world.guard._at_exit()
    world.guard.close()
    assert world.calls == []


def test_a_forked_child_does_not_close_the_client_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream would kill the controller of the job."""
    world = World(monkeypatch)
    world.guard.init(conf_of("job1"))
    before, own = list(world.calls), os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: own + 1)
    world.guard.close()
    assert world.calls == before
    monkeypatch.undo()
    assert world.guard.is_running


def test_the_error_of_a_bootstrap_that_is_not_wanted_is_dropped_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    from transfer_queue import interface

    from relax_tq_rdma.seams import tq_state

    noise = "Not found available MooncakeStore storage resources, please check the config."
    interface.logger.addHandler(caplog.handler)
    try:
        with tq_state.expected_bootstrap():
            interface.logger.error(noise)
            interface.logger.error("something else")
        interface.logger.error(noise)
    finally:
        interface.logger.removeHandler(caplog.handler)
    heard = [record.getMessage() for record in caplog.records]
    assert list(dict.fromkeys(heard)) == ["something else", noise]
    assert "Not found available" in Path(interface.__file__).read_text(), "upstream words it differently now"
