"""The effects of the start path on a real Ray, TransferQueue and Mooncake (RFC F10; FC-12, FC-13, FC-16)."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import psutil
import pytest
import ray
from omegaconf import OmegaConf
from transfer_queue import interface

from relax_tq_rdma.seams import tq_state
from relax_tq_rdma.section import KEY, JobSection
from relax_tq_rdma.settings import Settings
from relax_tq_rdma.transport import controller
from relax_tq_rdma.transport.port import Controller, Problem
from relax_tq_rdma.transport.ray_port import RayPort
from relax_tq_rdma.transport.report import Decision

pytestmark = [pytest.mark.integration, pytest.mark.timeout(150)]

JOB = "0123abcd"
MOONCAKE = Decision(backend="MooncakeStore", protocol="tcp")
SIMPLE = Decision(backend="SimpleStorage", protocol="zmq")
SETTINGS = Settings(storage_backend="mooncake", mooncake_auto_init="job-owned")
LIMIT = 40.0
SMALL = 64 * 2**20


@pytest.fixture(scope="module")
def cluster(ray_cluster):
    """One node with four CPUs."""
    return ray_cluster([{"RTQ_SEGMENT_MB": "64"}], cpus=4)


@pytest.fixture
def port(cluster, monkeypatch):
    # These tests drive TransferQueue's own client, which guards nothing.
    monkeypatch.setenv("MC_STORE_MEMCPY", "0")
    with RayPort(SETTINGS, JOB, interface.init, interface.close) as made:
        made.nodes()
        yield made
        made.clean(10.0)
        made.stop_master(10.0)
    assert controller.kill(10.0) is None


def conf_of(decision, master="", job=JOB):
    section = JobSection(
        job=job, settings=SETTINGS, decision=decision, plugin_version="0", master=master, nodes=1
    ).to_dict()
    backend = {"storage_backend": decision.backend, "SimpleStorage": {"num_data_storage_units": 1}}
    backend.setdefault(decision.backend, {})[KEY] = section
    if decision.backend == "MooncakeStore":
        backend["MooncakeStore"] |= {
            "auto_init": False,
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": master,
            "protocol": decision.protocol,
            "global_segment_size": SMALL,
            "local_buffer_size": SMALL,
        }
    return OmegaConf.create({"backend": backend}, flags={"allow_objects": True})


def stand_in_actor(num_cpus=0):
    """A controller as others see it; ``config`` is what it answers. (A local class: Ray ships it with its code.)"""

    class StandIn:
        def __init__(self, config=None, seconds=0.0, error=""):
            if error:
                raise RuntimeError(error)
            time.sleep(seconds)
            self.config = config

        def get_config(self):
            return self.config

    return ray.remote(num_cpus=num_cpus)(StandIn)


@pytest.fixture
def stand_in(cluster):
    """Puts a stand-in under the controller's name. The handle is kept: a name lives as long as one does."""
    handles = []

    def put(*, num_cpus=0, **arguments):
        actor = stand_in_actor(num_cpus)
        handles.append(actor.options(name=controller.NAME, namespace=controller.NAMESPACE).remote(**arguments))
        return handles[-1]

    yield put
    for handle in handles:
        with contextlib.suppress(Exception):
            ray.kill(handle)
    assert controller.kill(10.0) is None


# --- the named controller ---------------------------------------------------------------------------------------------


def look(limit=1.0):
    since = time.monotonic()
    seen = controller.look(limit, JOB)
    assert time.monotonic() - since < limit + 1.5
    return seen


def test_no_controller(port):
    assert look().state is Controller.ABSENT
    assert port.controller(1.0) is Controller.ABSENT
    assert port.kill_controller(1.0) is None


def test_a_config_that_never_comes(stand_in):
    ray.get(stand_in().get_config.remote(), timeout=60)
    seen = look()
    assert seen.state is Controller.UNFINISHED
    assert "its config did not come" in seen.reason


@pytest.mark.parametrize("cpus", [0, 4])
def test_a_constructor_that_never_ends(stand_in, cpus):
    """With all four CPUs of the cluster its own, none is free and none is lacking."""
    stand_in(seconds=600, num_cpus=cpus)
    time.sleep(1.5)  # its process is up and inside the constructor
    seen = look(1.5)
    assert seen.state is Controller.UNFINISHED
    assert "constructor has not finished" in seen.reason
    assert controller.shortage() == ""


def test_an_actor_that_cannot_be_scheduled_is_told_with_numbers(stand_in):
    hold = stand_in_actor(4).remote()
    ray.get(hold.get_config.remote(), timeout=60)
    stand_in(num_cpus=1)
    seen = look()
    ray.kill(hold)
    assert seen.state is Controller.UNFINISHED
    assert "it needs 1 CPU, and 0 of 4 CPUs of the cluster are free" in seen.reason


def test_a_dead_controller_whose_name_may_still_be_found(stand_in):
    handle = stand_in(error="boom")
    with pytest.raises(ray.exceptions.ActorDiedError):
        ray.get(handle.get_config.remote(), timeout=60)
    assert look().state in (Controller.DEAD, Controller.ABSENT)


def test_a_dead_handle_is_no_healthy_controller(stand_in, monkeypatch):
    """The window in which Ray still hands out the name of a dead actor, held open."""
    handle = stand_in()
    ray.get(handle.get_config.remote(), timeout=60)
    ray.kill(handle)
    monkeypatch.setattr(controller, "find", lambda: handle)
    seen = look(5.0)
    assert seen.state is Controller.DEAD
    assert "has died" in seen.reason


@pytest.mark.parametrize("job", [JOB, "another"])
def test_a_healthy_controller_is_ours_by_its_token_only(stand_in, job):
    stand_in(config=conf_of(SIMPLE, job=job))
    seen = look(10.0)
    assert seen.state is (Controller.OURS if job == JOB else Controller.FOREIGN)
    assert job in seen.reason or job == JOB


@pytest.mark.parametrize(
    "config", [{"backend": {"storage_backend": "SimpleStorage", "SimpleStorage": {}}}, {"x": 1}, 5]
)
def test_a_healthy_controller_without_our_section_is_foreign(stand_in, config):
    stand_in(config=config)
    assert look(10.0).state is Controller.FOREIGN


def test_a_stranger_of_that_name_is_foreign(cluster):
    class Other:
        def ping(self):
            return 1

    actor = ray.remote(num_cpus=0)(Other).options(name=controller.NAME, namespace=controller.NAMESPACE).remote()
    ray.get(actor.ping.remote(), timeout=60)
    assert look().state is Controller.FOREIGN
    ray.kill(actor)


def test_kill_waits_until_the_name_is_free(stand_in):
    for _ in range(3):
        ray.get(stand_in().get_config.remote(), timeout=60)
        assert controller.kill(10.0) is None
        assert controller.find() is None


def test_a_name_that_does_not_go_is_told_in_time(monkeypatch):
    monkeypatch.setattr(controller, "find", lambda: SimpleNamespace())
    since = time.monotonic()
    problem = controller.kill(0.5)
    assert time.monotonic() - since < 1.5
    assert "its name was not free" in problem.reason


# --- init -------------------------------------------------------------------------------------------------------------


def assert_nothing_left():
    assert controller.find() is None
    assert not [name for name in controller.own_named_actors() if name.startswith("TransferQueue")]
    assert (interface._TQ_CLIENT, interface._TQ_STORAGE, interface._TQ_CONTROLLER) == (None, None, None)


def test_an_init_that_waits_for_cpus_ends_in_time_says_so_and_can_be_repeated(port, stand_in):
    """F10: after a start that failed, also where it left a half-initialised controller, which TransferQueue's own init
    would ask for its config for ever."""
    hold = stand_in_actor(3).remote()  # leaves one for the controller, none for the storage unit
    ray.get(hold.get_config.remote(), timeout=60)
    limit = 12.0
    since = time.monotonic()
    problem = port.init(conf_of(SIMPLE), limit)
    assert time.monotonic() - since < limit + 3
    assert isinstance(problem, Problem)
    assert "did not finish within 12 s: an actor of TransferQueue has no process: it needs 1 CPU" in problem.reason
    assert "0 of 4 CPUs of the cluster are free" in problem.reason
    assert port.clean(10.0) is None
    assert_nothing_left()
    ray.kill(hold)

    ray.get(stand_in().get_config.remote(), timeout=60)
    assert port.controller(1.0) is Controller.UNFINISHED
    assert port.kill_controller(10.0) is None
    conf = port.init(conf_of(SIMPLE), LIMIT)
    assert conf.backend.storage_backend == "SimpleStorage"
    found = port.verify(SIMPLE, conf, "", LIMIT)
    assert (found.passed, found.total, found.wire, found.problems) == (1, 1, "zmq", ())
    assert port.controller(1.0) is Controller.OURS
    assert port.clean(15.0) is None
    assert_nothing_left()
    assert port.clean(15.0) is None


def test_an_init_that_fails_is_told_in_one_line(port):
    conf = conf_of(MOONCAKE, master="127.0.0.1:1")
    conf.backend.MooncakeStore.metadata_server = None
    problem = port.init(conf, LIMIT)
    assert isinstance(problem, Problem)
    assert problem.reason.startswith("transfer_queue.init failed: ValueError: ")
    assert "metadata_server" in problem.reason
    assert "\n" not in problem.reason
    assert port.controller(1.0) is Controller.OURS  # TransferQueue leaves it behind
    assert port.clean(10.0) is None
    assert_nothing_left()


def test_a_native_call_that_keeps_the_gil_ends_the_process_in_time(cluster):
    """Nothing else can: PyDLL calls keep the GIL as Mooncake's set-up does."""
    code = f"""
        import ctypes, ray
        from relax_tq_rdma.settings import Settings
        from relax_tq_rdma.transport.ray_port import RayPort
        ray.init(address={cluster.address!r}, log_to_driver=False)
        port = RayPort(Settings(), "gil", lambda conf: ctypes.PyDLL(None).sleep(60), lambda: None)
        print("begin", flush=True)
        port.init({{"backend": {{"storage_backend": "MooncakeStore"}}}}, 2.0)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while "begin" not in (line := process.stdout.readline()):
        assert line, process.communicate()[1]
    since = time.monotonic()
    _, stderr = process.communicate(timeout=30)
    assert time.monotonic() - since < 2 + 5
    assert process.returncode == 1
    assert "transfer-queue-init" in stderr or "Thread" in stderr


GONE = """
import json, os, signal, sys, time

import ray
from relax_tq_rdma.settings import Settings
from relax_tq_rdma.transport.machine import Phase, State
from relax_tq_rdma.transport.ray_port import RayPort
from relax_tq_rdma.transport.report import Decision
from relax_tq_rdma.transport.start import Started, close_job
import transfer_queue as tq

ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
settings = Settings(storage_backend="mooncake", mooncake_auto_init="job-owned")
port = RayPort(settings, "gone", tq.init, lambda: print("closed", flush=True))
port.nodes()
assert isinstance(port.start_master(30.0), str)
print(port._master.pid, flush=True)
service = ray._private.worker._global_node.all_processes["gcs_server"][0].process
service.send_signal(getattr(signal, sys.argv[1]))
if sys.argv[1] == "SIGKILL":
    service.wait(10)
decision = Decision(backend="MooncakeStore", protocol="tcp")
open_job = State(settings, phase=Phase.READY, decision=decision, master_open=True, init_open=True)
since = time.monotonic()
left = close_job(Started(None, decision, None, None, "", "", open_job), port, limit=6.0)
print(json.dumps({"left": left, "seconds": time.monotonic() - since}), flush=True)
os._exit(0)
"""


def test_a_job_whose_ray_is_gone_closes_in_time_and_takes_its_master_along():
    """Dead or frozen: Ray's calls then have no end, and after a minute Ray aborts the process."""
    said = {"SIGKILL": "Ray's control service is gone (", "SIGSTOP": "Ray did not answer within"}
    drivers = {
        number: subprocess.Popen(
            [sys.executable, "-c", GONE, number], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        for number in said
    }
    try:
        masters = [psutil.Process(int(driver.stdout.readline())) for driver in drivers.values()]
        # Not communicate(): it would miss what the first readline has taken in already.
        lines = {number: driver.stdout.read().splitlines() for number, driver in drivers.items()}
    finally:
        for driver in drivers.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(driver.pid, signal.SIGKILL)
    answers = {number: json.loads(found[-1]) for number, found in lines.items()}
    for number, answer in answers.items():
        assert said[number] in answer["left"]
        assert answer["seconds"] < 6 + 5
    assert answers["SIGKILL"]["seconds"] < answers["SIGSTOP"]["seconds"]
    assert "closed" in lines["SIGKILL"], "this process's own client is still closed"
    assert not [master for master in masters if master.is_running() and master.status() != psutil.STATUS_ZOMBIE]


# --- a healthy stranger -----------------------------------------------------------------------------------------------


def test_clean_leaves_a_controller_alone_that_is_not_ours(port, stand_in):
    """An init that lost a race attached to it; TransferQueue's close kills whatever it is attached to."""
    handle = stand_in(config=conf_of(SIMPLE, job="neighbour"))
    ray.get(handle.get_config.remote(), timeout=60)
    interface._TQ_CONTROLLER = controller.find()
    assert port.clean(10.0) is None
    time.sleep(0.5)
    assert ray.get(handle.get_config.remote(), timeout=5) is not None
    assert interface._TQ_CONTROLLER is None


# --- Mooncake ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def mooncake(port):
    """A port whose master runs; the master is job-owned."""
    port.probe(LIMIT)
    master = port.start_master(20.0)
    assert isinstance(master, str), master
    return SimpleNamespace(port=port, master=master, init=lambda: port.init(conf_of(MOONCAKE, master), LIMIT))


def test_the_whole_way_and_back(mooncake):
    port, master = mooncake.port, mooncake.master
    assert master.startswith("127.0.0.1:")
    assert port.preflight(MOONCAKE, master, LIMIT) == []
    conf = mooncake.init()
    found = port.verify(MOONCAKE, conf, master, LIMIT)
    assert (found.passed, found.total, found.wire, found.problems) == (1, 1, "local", ())
    assert interface._TQ_CLIENT.get_partition_list() == []

    # What is there is held against the decision, not against what init returned.
    manager = type(interface._TQ_CLIENT.storage_manager).__name__
    wrong = port.verify(SIMPLE, conf, "", LIMIT)
    assert (wrong.passed, [problem.reason for problem in wrong.problems]) == (
        0,
        [
            "the stored config says MooncakeStore, not SimpleStorage",
            f"the storage manager is {manager}, not a AsyncSimpleStorageManager",
        ],
    )
    rdma = Decision(backend="MooncakeStore", protocol="rdma")
    (problem,) = port.verify(rdma, conf, master, LIMIT).problems
    assert problem.reason == "the storage client uses tcp, not rdma"

    assert port.clean(15.0) is None
    assert_nothing_left()
    # The segment went with it: a put of a client that has none finds no room.
    code = (
        "import sys; from relax_tq_rdma.transport import native\n"
        "s = native.set_up(native.PeerRequest(mode='handshake', master=sys.argv[1], hostname='127.0.0.1'))\n"
        "print('put', s.put('k', b'x')); s.close()"
    )
    done = subprocess.run([sys.executable, "-c", code, master], capture_output=True, text=True, timeout=30, check=True)
    assert "put -200" in done.stdout
    port.stop_master(10.0)
    host, _, number = master.rpartition(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(number)), timeout=2)


def test_a_silent_master_fails_preflight_in_time(mooncake):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        since = time.monotonic()
        (problem,) = mooncake.port.preflight(MOONCAKE, f"127.0.0.1:{silent.getsockname()[1]}", 5.0)
        assert time.monotonic() - since < 5 + 2
    assert problem.check == "master"
    assert "does not answer" in problem.reason
    assert problem.node


def test_a_dead_master_fails_preflight_at_once(mooncake):
    os.kill(mooncake.port._master.pid, signal.SIGKILL)
    time.sleep(0.3)
    since = time.monotonic()
    (problem,) = mooncake.port.preflight(MOONCAKE, mooncake.master, LIMIT)
    assert time.monotonic() - since < 10
    assert problem.check == "master"
    assert "Connection refused" in problem.reason
    assert "SIGKILL" in mooncake.port.master_failure()


def test_a_master_that_dies_after_init_fails_verify_and_simple_storage_still_starts(mooncake):
    """The fallback of ``auto``: what is left of Mooncake must not hold the next attempt up."""
    port = mooncake.port
    conf = mooncake.init()
    os.kill(port._master.pid, signal.SIGKILL)
    found = port.verify(MOONCAKE, conf, mooncake.master, 15.0)
    assert found.passed == 0
    assert found.problems
    since = time.monotonic()
    assert port.clean(6.0) is None
    assert time.monotonic() - since < 6 + 3
    assert_nothing_left()
    port.stop_master(5.0)
    conf = port.init(conf_of(SIMPLE), LIMIT)
    assert port.verify(SIMPLE, conf, "", LIMIT).passed == 1


def test_a_frozen_master_does_not_hold_clean_up(mooncake):
    """It accepts and never answers: TransferQueue's close would wait in native code with the GIL held."""
    port = mooncake.port
    mooncake.init()
    pid = port._master.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        since = time.monotonic()
        assert port.clean(6.0) is None
        assert time.monotonic() - since < 6 + 3
    finally:
        os.kill(pid, signal.SIGCONT)
    assert_nothing_left()
    tq_state._abandoned[-1].close()  # with the master awake again it is quick; at the end of pytest it would not be
