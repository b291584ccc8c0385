"""The job-owned master with the real binary: it lives exactly as long as its job, whatever happens (FC-17, FC-19)."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from relax_tq_rdma.errors import StartError
from relax_tq_rdma.transport.master import Master, master_binary, reap
from relax_tq_rdma.transport.master_supervisor import Request, Supervisor
from relax_tq_rdma.transport.process import ProcessId, own_id
from relax_tq_rdma.transport.rundir import run_dir

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]

SECONDS = 6.0
"""What "gone within seconds" means here; the supervisor gives the master 3 s to end by itself."""

DRIVER = """
import json, os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has the programs of its background ignore it
from relax_tq_rdma.transport.master import Master
master = Master(sys.argv[1])
address = master.start(20)
if sys.argv[2:] == ["fork"] and os.fork() == 0:
    time.sleep(30)
    os._exit(0)
print(json.dumps({"address": address, "master": master.pid, "supervisor": master._process.pid}), flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def own_run_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("RTQ_RUN_DIR", str(tmp_path / "run"))


@pytest.fixture
def driver():
    """Starts a driver process with a master of its own; returns the process and what it says."""
    started = []

    def start(job, *arguments):
        process = subprocess.Popen([sys.executable, "-c", DRIVER, job, *arguments], stdout=subprocess.PIPE)
        started.append(process)
        return process, json.loads(process.stdout.readline())

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def master():
    """A running master of this process."""
    running = Master("job-under-test")
    running.start(20)
    yield running
    running.stop()


def answers(address):
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=2):
            return True
    except OSError:
        return False


def is_gone(identity, seconds=SECONDS):
    return identity.wait(seconds)


def records():
    return sorted(path.name for path in run_dir("masters").glob("*.json"))


def test_start_proves_both_ports_and_stop_ends_it(master):
    assert answers(master.address)
    assert answers(master.metrics_address)
    assert master.address.startswith("127.0.0.1:")
    assert master.failure() == ""
    identity = ProcessId.of(master.pid)
    assert records() == ["job-under-test.json"]
    address = master.address
    master.stop()
    master.stop()
    assert is_gone(identity, 0.5)
    assert not answers(address)
    assert records() == []
    assert list(run_dir("ports").iterdir()) == []


def test_it_listens_on_loopback_only(master):
    import psutil

    listening = {c.laddr.ip for c in psutil.Process(master.pid).net_connections("tcp") if c.status == "LISTEN"}
    assert listening == {"127.0.0.1"}


def test_nothing_unread_can_be_evicted(master):
    started = master.log.read_text()
    for flag in ("eviction_ratio=0,", "eviction_high_watermark_ratio=1,", "client_ttl=60,"):
        assert flag in started


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_it_ends_with_its_driver(driver, signum):
    process, told = driver("job-a")
    found, supervisor = ProcessId.of(told["master"]), ProcessId.of(told["supervisor"])
    process.send_signal(signum)
    process.wait(5)
    assert is_gone(found)
    assert is_gone(supervisor)
    assert records() == []


def test_a_forked_child_that_holds_the_pipe_open_does_not_keep_it(driver):
    process, told = driver("job-a", "fork")
    found = ProcessId.of(told["master"])
    process.kill()
    process.wait(5)
    assert is_gone(found)


def test_it_ends_with_its_supervisor_and_the_job_learns_of_it(master):
    found = ProcessId.of(master.pid)
    os.kill(master._process.pid, signal.SIGKILL)
    assert is_gone(found, 2.0)
    assert "supervisor of mooncake_master is gone" in master.failure()
    assert str(master.log) in master.failure()
    master.stop()


def test_a_master_that_ends_by_itself_is_noticed(master):
    os.kill(master.pid, signal.SIGKILL)
    deadline = time.monotonic() + 3
    while not master.failure() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "ended with signal SIGKILL" in master.failure()
    assert str(master.log) in master.failure()


def test_the_ctrl_c_of_a_terminal_reaches_neither(master):
    # A terminal signals the foreground process group; both are outside of it.
    assert os.getpgid(master.pid) not in (os.getpgid(0), 0)
    assert os.getsid(master.pid) == master._process.pid != os.getsid(0)


def test_two_jobs_side_by_side_do_not_touch_each_other(driver, master):
    process, other = driver("job-b")
    _, third = driver("job-c")
    assert len({other["address"], third["address"], master.address}) == 3
    found = ProcessId.of(other["master"])
    process.kill()
    process.wait(5)
    assert is_gone(found)
    assert answers(master.address)
    master.stop()
    assert answers(third["address"])


def test_a_master_of_somebody_else_is_never_looked_at(driver, master):
    """A stranger's master, not started by us and without a record."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(master_binary()), "--rpc_address=127.0.0.1", f"--rpc_port={port}", f"--metrics_port={port + 1}"]
    stranger = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        process, _ = driver("job-d")
        process.kill()
        process.wait(5)
        reap(10)
        master.stop()
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_the_next_start_reaps_what_a_dead_job_left(driver, master):
    """Driver and supervisor are stopped where they stand, so that neither can clean up; then the driver dies."""
    process, told = driver("job-e")
    os.kill(told["supervisor"], signal.SIGSTOP)
    process.kill()
    process.wait(5)
    left = ProcessId.of(told["master"])
    assert left.alive()
    with_next = Master("job-f")
    with_next.start(20)
    try:
        assert is_gone(left, 0.5)
        assert ProcessId.of(told["supervisor"]) is None
        assert records() == ["job-f.json", "job-under-test.json"]
        assert answers(master.address)
    finally:
        with_next.stop()


# --- ports ------------------------------------------------------------------------------------------------------------


def for_ever(seconds):
    time.sleep(seconds)
    return True


def supervisor(wanted=for_ever):
    folder = run_dir("masters")
    return Supervisor(
        Request(
            job="ports",
            host="127.0.0.1",
            binary=str(master_binary()),
            record=str(folder / "ports.json"),
            log=str(folder / "ports.log"),
            locks=str(run_dir("ports")),
            limit_seconds=10.0,
            driver=own_id(),
        ),
        wanted,
    )


@pytest.mark.parametrize("held", ["rpc", "metrics"])
def test_a_port_taken_in_the_last_moment_is_named(held):
    with socket.socket() as taken, socket.socket() as probe:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        probe.bind(("127.0.0.1", 0))
        ports = {held: taken.getsockname()[1]}
        other = probe.getsockname()[1]
        probe.close()
        chosen = (ports.get("rpc", other), ports.get("metrics", other))
        owner, since = supervisor(), time.monotonic()
        owner.launch(*chosen)
        while not owner._exited():
            assert time.monotonic() - since < 5
            assert not owner.ready(*chosen)
            time.sleep(0.05)
        reason, again = owner.why_exited(*chosen)
        owner.stop()
    assert reason == f"port {ports[held]} taken"
    assert again


def test_other_ports_are_tried_when_one_is_taken(monkeypatch):
    """The first port is grabbed between lease and use, as a stranger would."""
    from relax_tq_rdma.transport import master_supervisor

    grabbed = []
    real = master_supervisor.lease_port

    def lease(host, folder):
        found = real(host, folder)
        if not grabbed:
            thief = socket.socket()
            thief.bind((host, found.port))
            thief.listen()
            grabbed.append((thief, found.port))
        return found

    monkeypatch.setattr(master_supervisor, "lease_port", lease)
    events = []
    assert supervisor(lambda seconds: for_ever(seconds) and not events).run(events.append) == 0
    thief, port = grabbed[0]
    thief.close()
    (event,) = events
    assert event.kind == "ready"
    assert port not in (event.rpc_port, event.metrics_port)


def script(tmp_path, body):
    path = tmp_path / "mooncake_master"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_an_early_end_is_noticed_at_once_with_its_last_words(tmp_path):
    broken = Master(
        "job-g", binary=script(tmp_path, "echo 'error while loading shared libraries: libx.so.1' >&2; exit 3")
    )
    since = time.monotonic()
    with pytest.raises(StartError) as told:
        broken.start(20)
    assert time.monotonic() - since < 3
    assert "exit status 3" in str(told.value)
    assert "libx.so.1" in str(told.value)
    assert str(broken.log) in str(told.value)
    assert records() == []


def test_a_master_that_never_gets_ready_is_stopped_in_time(tmp_path):
    marker = tmp_path / "pid"
    broken = Master("job-h", binary=script(tmp_path, f"echo $$ > {marker}; exec sleep 60"))
    since = time.monotonic()
    with pytest.raises(StartError, match="not ready within"):
        broken.start(3)
    assert time.monotonic() - since < 3 + 2
    assert ProcessId.of(int(marker.read_text())) is None


def test_a_binary_that_cannot_be_run_is_one_sentence(tmp_path):
    with pytest.raises(StartError, match="cannot be run"):
        Master("job-i", binary=Path(script(tmp_path, "").parent)).start(10)


def test_an_address_of_another_machine_is_refused(tmp_path):
    with pytest.raises(StartError, match=r"198\.51\.100\.7.*not an address of this node"):
        Master("job-j", "198.51.100.7").start(10)


def test_an_older_master_is_tolerated(mooncake_0310):
    """0.3.10 does not know every flag of ours."""
    binary = mooncake_0310 / "mooncake" / "mooncake_master"
    binary.chmod(0o755)
    older = Master("job-k", binary=binary)
    older.start(20)
    assert answers(older.metrics_address)
    older.stop()


def test_stop_in_a_forked_child_leaves_it_running(master):
    pid = os.fork()
    if pid == 0:
        master.stop()
        os._exit(0)
    os.waitpid(pid, 0)
    assert answers(master.address)
