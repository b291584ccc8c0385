"""Native Mooncake clients in children that can be killed: handshake, ring, and what can go wrong (FC-06, FC-16)."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from relax_tq_rdma.transport import peer
from relax_tq_rdma.transport.master import Master
from relax_tq_rdma.transport.native import PeerRequest, Ring
from relax_tq_rdma.transport.peer import HOLDING, Peer, run_peer
from relax_tq_rdma.transport.process import ProcessId
from relax_tq_rdma.transport.report import RdmaDevice
from relax_tq_rdma.transport.verdict import judge_ring

pytestmark = [pytest.mark.integration, pytest.mark.timeout(90)]


@pytest.fixture(scope="module")
def master():
    running = Master("peers")
    running.start(20)
    yield running
    running.stop()


@pytest.fixture
def silent():
    """A socket that listens and never answers."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        yield f"127.0.0.1:{held.getsockname()[1]}"


def request(master, **changed):
    return PeerRequest(**{"mode": "handshake", "master": master, "hostname": "127.0.0.1", **changed})


def run_ring(address, size, limit=30.0, token="ring", **changed):
    """All peers of a ring at once, as on as many nodes."""

    def one(index):
        place = Ring(token=token, index=index, size=size, payload_bytes=2**20)
        return run_peer(request(address, mode="ring", ring=place, **changed), limit)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def own_children():
    import psutil

    return [p for p in psutil.Process().children(recursive=True) if "relax_tq_rdma.transport.peer" in p.cmdline()]


# --- handshake --------------------------------------------------------------------------------------------------------


def test_handshake(master):
    result = run_peer(request(master.address), 30.0)
    assert (result.reason, result.check) == ("", "")
    assert result.mooncake_version


def test_a_refused_master_is_found_by_a_plain_socket():
    since = time.monotonic()
    result = run_peer(request("127.0.0.1:1"), 30.0)
    assert result.check == "master"
    assert "127.0.0.1:1 cannot be reached (Connection refused)" in result.reason
    assert time.monotonic() - since < 5


def test_a_master_that_never_answers_ends_in_time(silent):
    since = time.monotonic()
    result = run_peer(request(silent), 3.0)
    assert time.monotonic() - since < 3 + 2
    assert result.check == "master"
    assert "does not answer" in result.reason
    assert "set-up" in result.reason
    assert own_children() == []


def test_the_child_ends_also_when_its_parent_is_killed(silent):
    code = (
        "import sys; from relax_tq_rdma.transport.native import PeerRequest\n"
        "from relax_tq_rdma.transport.peer import HOLDING, Peer, run_peer\n"
        f"run_peer(PeerRequest(mode='handshake', master={silent!r}, hostname='127.0.0.1'), 3.0)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 10
    while not (children := own_children()) and time.monotonic() < deadline:
        time.sleep(0.05)
    (child,) = (ProcessId.of(c.pid) for c in children if c.ppid() == parent.pid)
    time.sleep(0.5)
    parent.kill()
    parent.wait()
    assert child.alive()
    assert child.wait(3.0 + 1.0 + 1.0)


def test_an_address_that_is_none(master):
    result = run_peer(request("::1:5"), 10.0)
    assert result.check == "master"
    assert "brackets" in result.reason


def test_a_crash_is_told_with_its_signal(master, monkeypatch, tmp_path):
    """A wheel that dies in native code."""
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "store.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    monkeypatch.syspath_prepend(str(tmp_path))
    result = run_peer(request(master.address), 20.0)
    assert result.check == "mooncake"
    assert "SIGSEGV during set-up" in result.reason


def test_a_wheel_that_cannot_be_imported_is_told(master, monkeypatch, tmp_path):
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "store.py").write_text("raise ImportError('libibverbs.so.1: cannot open shared object file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    result = run_peer(request(master.address), 20.0)
    assert result.check == "mooncake"
    assert "libibverbs.so.1" in result.reason


def test_the_memcpy_hazard_is_refused_in_the_process_that_would_use_it(master, monkeypatch, mooncake_0310):
    monkeypatch.setenv("MC_STORE_MEMCPY", "1")
    assert run_peer(request(master.address), 20.0).reason == ""
    monkeypatch.syspath_prepend(str(mooncake_0310))
    result = run_peer(request(master.address), 20.0)
    assert result.check == "memcpy_hazard"
    assert "0.3.10" in result.reason


def put_of_a_client_without_a_segment(address):
    """Code of a put that can only go to somebody else's segment."""
    code = (
        "import sys; from relax_tq_rdma.transport import native\n"
        "s = native.set_up(native.PeerRequest(mode='handshake', master=sys.argv[1], hostname='127.0.0.1'))\n"
        "print('put', s.put(f'k{sys.argv[2]}', b'x')); s.close()"
    )
    command = [sys.executable, "-c", code, address, str(time.monotonic())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    return int(done.stdout.split("put ")[1])


def test_a_holder_keeps_a_segment_as_long_as_it_is_wanted(master):
    with Peer(request(master.address, mode="hold"), 30.0) as holder:
        assert holder.reached(HOLDING)
        assert put_of_a_client_without_a_segment(master.address) == 0
        assert holder.finish().reason == ""
    assert put_of_a_client_without_a_segment(master.address) == -200
    with Peer(request("127.0.0.1:1", mode="hold"), 30.0) as holder:
        assert not holder.reached(HOLDING)
        assert holder.finish().check == "master"


def test_a_holder_that_is_let_go_of_in_an_error_is_gone():
    own = Master("interrupted")  # it is killed, so its segment stays in the master's books

    def interrupted(address):
        with Peer(request(address, mode="hold"), 30.0) as holder:
            assert holder.reached(HOLDING)
            raise KeyboardInterrupt

    try:
        address = own.start(20)
        with pytest.raises(KeyboardInterrupt):
            interrupted(address)
        assert own_children() == []
    finally:
        own.stop()


# --- versions (FC-16) -------------------------------------------------------------------------------------------------


def test_an_older_client_is_told_from_a_newer_master(master, monkeypatch, mooncake_0310):
    monkeypatch.syspath_prepend(str(mooncake_0310))
    monkeypatch.delenv("MC_STORE_MEMCPY", raising=False)
    result = run_peer(request(master.address), 20.0)
    assert result.check == "master"
    assert "gave -900" in result.reason
    assert "another version" in result.reason
    assert result.mooncake_version.startswith("0.3.10")
    assert result.mooncake_version in result.reason


def test_a_newer_client_is_told_from_an_older_master(mooncake_0310):
    binary = mooncake_0310 / "mooncake" / "mooncake_master"
    binary.chmod(0o755)
    older = Master("older", binary=binary)
    try:
        result = run_peer(request(older.start(20)), 20.0)
    finally:
        older.stop()
    assert result.check == "master"
    assert "gave -900" in result.reason


def test_the_older_wheel_passes_with_its_own_master(monkeypatch, mooncake_0310):
    """It cannot mount a segment after set-up."""
    monkeypatch.syspath_prepend(str(mooncake_0310))
    monkeypatch.delenv("MC_STORE_MEMCPY", raising=False)
    binary = mooncake_0310 / "mooncake" / "mooncake_master"
    binary.chmod(0o755)
    older = Master("older-pair", binary=binary)
    try:
        results = run_ring(older.start(20), 2)
    finally:
        older.stop()
    assert [result.reason for result in results] == ["", ""]
    assert judge_ring(["a", "b"], results, "tcp", one_host=False).passed == 1
    assert results[0].mooncake_version.startswith("0.3.10")


# --- RDMA that is not there (FC-06) -----------------------------------------------------------------------------------


def test_rdma_without_an_hca_is_not_taken_for_success(master):
    result = run_peer(request(master.address, protocol="rdma"), 20.0)
    assert result.check == "rdma_device"
    assert "silently set up TCP" in result.reason


def test_a_named_device_that_is_not_there_ends_in_time(master):
    since = time.monotonic()
    result = run_peer(request(master.address, protocol="rdma", device="mlx5_77"), 3.0)
    assert time.monotonic() - since < 3 + 2
    assert result.check == "rdma_device"
    assert "mlx5_77" in result.reason


def test_the_gid_index_of_the_report_reaches_the_engine(master, monkeypatch):
    monkeypatch.delenv("MC_GID_INDEX", raising=False)
    monkeypatch.delenv("NCCL_IB_GID_INDEX", raising=False)
    code = (
        "import os, sys, msgspec\n"
        "from relax_tq_rdma.transport import native\n"
        "request = msgspec.json.decode(sys.argv[1], type=native.PeerRequest)\n"
        "store = native.set_up(request); print('index', os.environ.get('MC_GID_INDEX')); store.close()"
    )
    device = RdmaDevice(name="mlx5_0", port=1, gid_index=3, gid="::ffff:10.0.0.1", link_layer="Ethernet")
    asked = msgspec.json.encode(request(master.address, protocol="rdma", devices=(device,))).decode()
    done = subprocess.run([sys.executable, "-c", code, asked], capture_output=True, text=True, timeout=30, check=True)
    assert "index 3" in done.stdout


# --- ring -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
def test_ring(master, size):
    results = run_ring(master.address, size, token=f"ring{size}")
    assert [(result.reason, result.unread, result.unacknowledged) for result in results] == [("", {}, {})] * size
    assert len({result.endpoint for result in results}) == size
    found = judge_ring([f"n{i}" for i in range(size)], results, "tcp", one_host=False)
    assert (found.passed, found.total, found.problems) == ((1, 1, ()) if size == 2 else (size, size, ()))


def test_a_ring_leaves_nothing_in_the_store():
    own = Master("leftovers")  # other tests kill peers, and a killed peer's segment stays in the master's books
    try:
        address = own.start(20)
        run_ring(address, 2, token="leftovers")
        # No segment of anybody is left, and with the segments went the keys in them.
        assert put_of_a_client_without_a_segment(address) == -200
    finally:
        own.stop()


def test_a_neighbour_that_never_comes_is_named_in_time(master):
    since = time.monotonic()
    place = Ring(token="alone", index=0, size=2, payload_bytes=2**20)
    result = run_peer(request(master.address, mode="ring", ring=place), 6.0)
    assert time.monotonic() - since < 6 + 1
    assert result.unread == {1: "its pattern did not appear in time"}
    assert 1 in result.unacknowledged


def test_a_master_that_dies_during_the_ring_is_told_at_once():
    dying = Master("dying")
    dying.start(20)
    try:
        place = Ring(token="dying", index=0, size=2, payload_bytes=2**20)
        results = []
        thread = threading.Thread(
            target=lambda: results.append(run_peer(request(dying.address, mode="ring", ring=place), 30.0))
        )
        thread.start()
        time.sleep(2.0)  # it waits for its neighbour by now
        since = time.monotonic()
        os.kill(dying.pid, signal.SIGKILL)
        thread.join(10)
        assert time.monotonic() - since < 5
    finally:
        dying.stop()
    assert results[0].check == "master"
    assert "stopped answering" in results[0].reason


def test_bytes_that_differ_are_found(master, monkeypatch):
    """One peer puts another pattern than it should: the reader must see it, and the writer must learn of it."""
    honest = Ring(token="forged", index=0, size=2, payload_bytes=2**20)
    forged = Ring(token="forged", index=1, size=2, payload_bytes=2**20 - 7)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(
            lambda place: run_peer(request(master.address, mode="ring", ring=place), 20.0), (honest, forged)
        )
    assert first.unread == {1: "1048569 bytes came instead of 1048576"}
    assert second.unacknowledged == {0: "it could not read this peer's pattern"}


def test_the_result_survives_what_native_code_prints(master):
    """Whatever lands on the child's stdout must not be taken for its answer."""
    child = subprocess.run(
        [sys.executable, "-m", "relax_tq_rdma.transport.peer", "20"],
        input=msgspec.json.encode(request(master.address)),
        capture_output=True,
        timeout=40,
        check=True,
    )
    lines = child.stdout.decode().splitlines()
    assert lines[:-1] == ["reaching the master", "set-up", "close"]
    assert peer._result(lines) is not None
    assert b".cpp:" in child.stderr, "the native library logged nothing: the test proves nothing"
