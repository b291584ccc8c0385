import os
import socket
import subprocess
import sys

import pytest

from relax_tq_rdma.errors import StartError
from relax_tq_rdma.transport import ports
from relax_tq_rdma.transport.rundir import run_dir

LOOPBACK = "127.0.0.1"


@pytest.fixture
def locks(tmp_path):
    folder = tmp_path / "ports"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def only(monkeypatch):
    """Narrows the choice to the given ports."""

    def narrow(*chosen):
        monkeypatch.setattr(ports, "_candidates", lambda: iter(chosen))

    return narrow


@pytest.fixture
def taken():
    """A port somebody listens on."""
    with socket.socket() as held:
        held.bind((LOOPBACK, 0))
        held.listen()
        yield held.getsockname()[1]


def free_port():
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]


def test_the_kernels_ephemeral_ports_are_left_out():
    assert not set(ports.usable_ports(range(32768, 61000))) & set(range(32768, 61000))
    assert min(ports.usable_ports(range(1024, 30000))) == 30000


def test_rays_worker_ports_are_left_out():
    assert not set(ports.usable_ports(range(0))) & set(range(10002, 20000))


def test_a_host_that_makes_every_port_ephemeral_still_gets_one():
    assert ports.usable_ports(range(1024, 65536))


def test_a_leased_port_is_outside_the_ephemeral_range(locks):
    lease = ports.lease_port(LOOPBACK, locks)
    assert lease.port not in ports.ephemeral_range()
    lease.release()


def test_a_port_somebody_listens_on_is_skipped(locks, only, taken):
    free = free_port()
    only(taken, free)
    lease = ports.lease_port(LOOPBACK, locks)
    assert lease.port == free
    lease.release()
    assert list(locks.iterdir()) == []


def test_a_leased_port_is_skipped_also_by_another_process(locks, only):
    first, second = free_port(), free_port()
    only(first, second)
    lease = ports.lease_port(LOOPBACK, locks)
    code = (
        "import sys; from pathlib import Path; from relax_tq_rdma.transport import ports\n"
        f"ports._candidates = lambda: iter([{first}, {second}])\n"
        f"print(ports.lease_port({LOOPBACK!r}, Path({str(locks)!r})).port)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert (lease.port, int(told.stdout)) == (first, second)
    lease.release()


def test_a_released_port_can_be_leased_again(locks, only):
    port = free_port()
    for _ in range(3):
        only(port)
        lease = ports.lease_port(LOOPBACK, locks)
        assert lease.port == port
        lease.release()
        lease.release()


def test_the_lock_of_a_killed_process_holds_nobody_up(locks, only):
    port = free_port()
    code = (
        "import os, signal; from pathlib import Path; from relax_tq_rdma.transport import ports\n"
        f"ports._candidates = lambda: iter([{port}])\n"
        f"ports.lease_port({LOOPBACK!r}, Path({str(locks)!r}))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], timeout=30, check=False)
    assert (locks / f"{port}.lock").exists()
    only(port)
    lease = ports.lease_port(LOOPBACK, locks)
    assert lease.port == port
    lease.release()


def test_no_port_left_is_said(locks, only, taken):
    only(taken)
    with pytest.raises(StartError, match="no free port"):
        ports.lease_port(LOOPBACK, locks)


@pytest.mark.parametrize("host", ["198.51.100.7", "no-such-host.invalid"])
def test_an_address_of_somebody_else_is_refused(locks, host):
    with pytest.raises(StartError, match=f"cannot listen on {host}.*RTQ_LOCAL_HOSTNAME"):
        ports.lease_port(host, locks)


# --- the run folder ---------------------------------------------------------------------------------------------------


def test_the_folder_of_the_environment_is_made_for_this_user_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("RTQ_RUN_DIR", str(tmp_path / "a" / "b"))
    assert run_dir("masters") == tmp_path / "a" / "b" / "masters"
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "a" / "b" / "masters").stat().st_mode & 0o777 == 0o700


def test_the_session_folder_is_preferred_to_tmp(monkeypatch, tmp_path):
    monkeypatch.setenv("RTQ_RUN_DIR", "")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert run_dir() == tmp_path / f"relax-tq-rdma-{os.getuid()}"


def test_a_session_folder_that_is_gone_is_not_used(monkeypatch, tmp_path):
    monkeypatch.setenv("RTQ_RUN_DIR", "")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run_dir() == tmp_path / f"relax-tq-rdma-{os.getuid()}"


def test_a_full_disk_everywhere_is_one_sentence(monkeypatch):
    """tempfile tries each candidate by writing to it."""
    monkeypatch.setenv("RTQ_RUN_DIR", "")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: ["/dev/null"])
    with pytest.raises(StartError, match=r"no place for a run folder \(No usable temporary directory.*set RTQ_RUN_DIR"):
        run_dir()


def refusal(monkeypatch, folder):
    monkeypatch.setenv("RTQ_RUN_DIR", str(folder))
    with pytest.raises(StartError) as told:
        run_dir()
    return str(told.value)


def test_a_folder_of_another_user_is_refused(monkeypatch, tmp_path):
    folder = tmp_path / "theirs"
    folder.mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    assert "belongs to uid" in refusal(monkeypatch, folder)


def test_a_folder_others_can_write_to_is_refused(monkeypatch, tmp_path):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    assert "chmod 700" in refusal(monkeypatch, folder)


def test_a_link_is_refused(monkeypatch, tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    assert "is a link or a file" in refusal(monkeypatch, tmp_path / "link")


def test_a_path_that_cannot_be_made_is_one_sentence(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot be made" in refusal(monkeypatch, tmp_path / "file" / "below")
