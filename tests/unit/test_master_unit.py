import os
import subprocess
import sys

import msgspec
import pytest

from relax_tq_rdma.errors import StartError
from relax_tq_rdma.transport import master
from relax_tq_rdma.transport.master import Master, master_binary, reap
from relax_tq_rdma.transport.master_supervisor import Record, Request, Supervisor, log_tail, master_command
from relax_tq_rdma.transport.process import ProcessId, own_id
from relax_tq_rdma.transport.rundir import run_dir


@pytest.fixture(autouse=True)
def own_run_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("RTQ_RUN_DIR", str(tmp_path / "run"))


@pytest.fixture
def sleepers():
    """Makes processes that sleep."""
    made = []

    def sleeper():
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        made.append(child)
        return child

    yield sleeper
    for child in made:
        child.kill()
        child.wait()


def ended(child):
    """Identity of a process that has been and gone."""
    identity = ProcessId.of(child.pid)
    child.kill()
    child.wait()
    return identity


def write_record(job, **processes):
    record = Record(job=job, **processes)
    path = run_dir("masters") / f"{job}.json"
    path.write_bytes(msgspec.json.encode(record))
    return path


def test_every_port_is_named_and_unknown_flags_are_tolerated():
    command = master_command("/x/mooncake_master", "10.0.0.1", 21000, 21001)
    flags = dict(part.removeprefix("--").split("=", 1) for part in command[1:])
    assert command[0] == "/x/mooncake_master"
    assert (flags["rpc_address"], flags["rpc_port"]) == ("10.0.0.1", "21000")
    assert (flags["metrics_host"], flags["metrics_port"]) == ("127.0.0.1", "21001")
    assert float(flags["eviction_ratio"]) == 0.0
    assert float(flags["eviction_high_watermark_ratio"]) == 1.0
    assert int(flags["client_ttl"]) > 10
    assert set(flags["undefok"].split(",")) == set(flags) - {"undefok"}


def test_the_log_tail_is_one_plain_line_without_noise(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "WARNING: Logging before InitGoogleLogging() is written to STDERR\n"
        "I1129 Master service started on port 1, max_threads=2\n\n"
        "\x1b[91m2026 ERROR    \x1b[0m\x1b[0K[1] bind port: 9003 error: Address already in use\n"
        "E1129 Failed to start master admin server\n"
    )
    tail = log_tail(str(log))
    assert tail.endswith("bind port: 9003 error: Address already in use | E1129 Failed to start master admin server")
    assert "\x1b" not in tail
    assert "InitGoogleLogging" not in tail


def test_the_tail_of_an_empty_or_missing_log(tmp_path):
    (tmp_path / "empty").write_text("")
    assert log_tail(str(tmp_path / "empty")) == "nothing was logged"
    assert "unreadable" in log_tail(str(tmp_path / "missing"))


@pytest.mark.parametrize("job", ["", "../x", "a/b", "x" * 65])
def test_a_token_that_cannot_name_a_file_is_refused(job):
    with pytest.raises(StartError, match="cannot name a file"):
        Master(job)


def test_stop_without_start_does_nothing():
    Master("job").stop()


def test_a_log_that_cannot_be_written_is_one_sentence(tmp_path):
    (run_dir("masters") / "job.log").mkdir()
    with pytest.raises(
        StartError, match=r"could not be started: .*job\.log cannot be written \(Is a directory\): set RTQ"
    ):
        Master("job", binary=tmp_path / "mooncake_master").start(5.0)


def test_a_record_that_cannot_be_written_is_one_sentence_and_nothing_is_left(tmp_path):
    binary = tmp_path / "mooncake_master"
    binary.write_text("#!/bin/sh\nexec sleep 60\n")
    binary.chmod(0o755)
    request = Request(
        job="job",
        host="127.0.0.1",
        binary=str(binary),
        record=str(tmp_path / "gone" / "job.json"),
        log=str(tmp_path / "log"),
        locks=str(run_dir("ports")),
        limit_seconds=5.0,
        driver=own_id(),
    )
    told = []
    supervisor = Supervisor(request, lambda seconds: True)
    assert supervisor.run(told.append) == 1
    assert [event.kind for event in told] == ["failed"]
    assert "gone/job.tmp cannot be written (No such file or directory)" in told[0].reason
    assert supervisor._child.poll() is not None
    assert list(run_dir("ports").iterdir()) == []


# --- reaping ----------------------------------------------------------------------------------------------------------


def test_a_dead_jobs_processes_are_ended_and_the_record_goes(sleepers):
    supervisor, child = sleepers(), sleepers()
    path = write_record(
        "dead",
        driver=ended(sleepers()),
        supervisor=ProcessId.of(supervisor.pid),
        master=ProcessId.of(child.pid),
    )
    (told,) = reap(10.0)
    assert f"pid {child.pid}" in told
    assert (supervisor.wait(5), child.wait(5)) == (-15, -15)
    assert not path.exists()
    assert reap(10.0) == []


def test_a_living_jobs_processes_are_left_alone(sleepers):
    supervisor, child = sleepers(), sleepers()
    path = write_record(
        "alive", driver=own_id(), supervisor=ProcessId.of(supervisor.pid), master=ProcessId.of(child.pid)
    )
    assert reap(10.0) == []
    assert (supervisor.poll(), child.poll(), path.exists()) == (None, None, True)


def test_a_pid_that_was_given_to_a_stranger_is_left_alone(sleepers):
    stranger = sleepers()
    then = msgspec.structs.replace(ProcessId.of(stranger.pid), start_ticks=1)
    path = write_record("old", driver=ended(sleepers()), supervisor=then, master=then)
    assert reap(10.0) == []
    assert stranger.poll() is None
    assert not path.exists()


def test_a_record_of_another_container_is_left_alone():
    boot, _, _ = own_id().boot.partition(":")
    there = ProcessId(pid=1, start_ticks=1, boot=f"{boot}:pid:[99]")
    path = write_record("elsewhere", driver=there, supervisor=there, master=there)
    assert reap(10.0) == []
    assert path.exists()


def test_a_record_of_an_earlier_boot_goes():
    then = ProcessId(pid=1, start_ticks=1, boot="earlier:pid:[1]")
    path = write_record("earlier", driver=then, supervisor=then, master=then)
    assert reap(10.0) == []
    assert not path.exists()


def test_a_record_nobody_can_read_goes():
    path = run_dir("masters") / "broken.json"
    path.write_text("{")
    assert reap(10.0) == []
    assert not path.exists()


def test_only_the_last_logs_are_kept():
    folder = run_dir("masters")
    for number in range(12):
        log = folder / f"job{number:02}.log"
        log.write_text("")
        os.utime(log, (number, number))
    write_record("job00", driver=own_id(), supervisor=own_id(), master=own_id())
    master._prune_logs()
    assert sorted(path.stem for path in folder.glob("*.log")) == ["job00", *(f"job{n:02}" for n in range(4, 12))]


# --- the binary -------------------------------------------------------------------------------------------------------


def test_the_wheels_binary_is_made_executable_as_its_own_script_does(monkeypatch, tmp_path):
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").write_text("")
    binary = package / "mooncake_master"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o644)
    for name in [name for name in sys.modules if name.partition(".")[0] == "mooncake"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert master_binary() == binary
    assert os.access(binary, os.X_OK)


def test_no_binary_is_one_sentence_with_a_way_out(monkeypatch):
    monkeypatch.setattr(master.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(StartError, match=r"not installed.*mooncake-cpu.*--tq-mooncake-master-address"):
        master_binary()
