"""One node, many processes, one endpoint: real processes, real HTTP scrapes, real SIGKILL (FC-48)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.integration

WORKER = """
import sys
from relax_tq_rdma import accounting
from relax_tq_rdma.transport.report import Decision
accounting.configure("summary", job=sys.argv[1], node="n")
accounting.set_backend(Decision(backend="SimpleStorage", protocol="zmq"))
for line in sys.stdin:
    size = int(line)
    stats = accounting.FieldStats(name="mm", path="slow", rows=1, bytes=size, unique_bytes=size)
    ledger = accounting.ledger()
    ledger.end(ledger.begin("put", "train_0"), "ok", accounting.Batch(rows=1, fields=(stats,)))
    with accounting.stage("encode"):
        pass
    accounting.flush()
    print("done", flush=True)
"""


class Worker:
    """A process of a job; ``put(n)`` returns when n bytes were counted and published."""

    def __init__(self, job, env):
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, job],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **env},
        )

    def put(self, size):
        self.process.stdin.write(f"{size}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n", self.process.stderr.read()

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=30)

    def end(self):
        """Returns what it said on standard error."""
        if self.process.returncode is not None:
            return ""
        _, err = self.process.communicate(timeout=30)
        assert self.process.returncode == 0
        return err


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def node(tmp_path, port):
    """``start(job="job", **env)`` starts a worker on this node."""
    workers = []

    def start(job="job", **env):
        worker = Worker(job, {"RTQ_RUN_DIR": str(tmp_path / "run"), "RTQ_METRICS_PORT": str(port), **env})
        workers.append(worker)
        return worker

    yield start
    for worker in workers:
        if worker.process.poll() is None:
            worker.kill()
        else:
            worker.process.communicate()


def scrape(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.values()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def bytes_put(port):
    return scrape(port).get(("dataplane_bytes_total", ("mm", "put", "slow")), 0)


def backends(port):
    return [labels for name, labels in scrape(port) if name == "dataplane_backend_info"]


def until(check, seconds=20):
    """The first true answer; a refused connection is no answer yet."""
    ends = time.monotonic() + seconds
    while True:
        try:
            if found := check():
                return found
        except (urllib.error.URLError, ConnectionError):
            pass
        assert time.monotonic() < ends, "not within the deadline"
        time.sleep(0.1)


def listener(port):
    """Pid of the process that listens on the port."""
    import psutil

    return next(
        (
            c.pid
            for c in psutil.net_connections("tcp")
            if c.status == psutil.CONN_LISTEN and c.laddr.port == port and c.laddr.ip == "127.0.0.1"
        ),
        None,
    )


def test_processes_of_a_node_share_one_endpoint_through_kills_and_takeover(node, port):
    workers = [node() for _ in range(3)]
    for n, worker in enumerate(workers):
        worker.put(10 ** (n + 2))
    assert until(lambda: bytes_put(port) == 11_100)

    server = until(lambda: listener(port))
    follower = next(w for w in workers if w.process.pid != server)
    follower.kill()  # a worker that is killed: what it counted stays
    assert bytes_put(port) == 11_100

    leader = next(w for w in workers if w.process.pid == server)
    leader.kill()  # the server is killed: another one takes over, nothing goes backwards
    assert until(lambda: bytes_put(port) == 11_100)
    (rest,) = [w for w in workers if w not in (leader, follower)]
    assert listener(port) == rest.process.pid

    rest.put(1)
    late = node()
    late.put(5)
    assert until(lambda: bytes_put(port) == 11_106)
    assert scrape(port)["dataplane_stage_seconds_count", ("encode",)] == 5
    assert backends(port) == [("-", "SimpleStorage", "off", "zmq")]


def test_a_job_sees_only_its_own_processes(node, port):
    ours, theirs = node("ours"), node("theirs", RTQ_METRICS_PORT="")
    theirs.put(7)
    ours.put(5)
    assert until(lambda: bytes_put(port)) == 5


def test_a_taken_port_is_one_sentence_and_the_work_goes_on(node, port):
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", port))
        stranger.listen()
        workers = [node() for _ in range(2)]
        for worker in workers:
            worker.put(5)
        time.sleep(2.5)  # several attempts
        said = "".join(worker.end() for worker in workers)
    complaints = [line for line in said.splitlines() if "metrics are not served" in line]
    assert len(complaints) in (1, 2)  # the second one only when it outlived the first
    assert all(str(port) in line and "Traceback" not in said for line in complaints)
    assert said.count("put_bytes=5") == 2


def test_prometheus_multiproc_dir_of_the_host_changes_nothing(node, port, tmp_path):
    folder = tmp_path / "multiproc"
    folder.mkdir()
    worker = node(PROMETHEUS_MULTIPROC_DIR=str(folder))
    worker.put(5)
    assert until(lambda: bytes_put(port)) == 5
    assert os.listdir(folder) == []


def test_without_a_port_nothing_listens(node, port):
    import psutil

    worker = node(RTQ_METRICS_PORT="")
    worker.put(5)
    time.sleep(1.5)
    connections = psutil.Process(worker.process.pid).net_connections("all")
    assert [c for c in connections if c.status == psutil.CONN_LISTEN] == []


def test_a_forked_child_does_not_keep_the_port(tmp_path, port):
    """The child inherits the listening socket: when the parent dies, the endpoint must be free for others."""
    code = """
import os, sys, time
from relax_tq_rdma import accounting
accounting.configure("summary", job="job", node="n")
with accounting.stage("encode"):
    pass
time.sleep(1.0)
pid = os.fork()
if pid == 0:
    time.sleep(30)
    os._exit(0)
print(pid, flush=True)
time.sleep(30)
"""
    env = {**os.environ, "RTQ_RUN_DIR": str(tmp_path / "run"), "RTQ_METRICS_PORT": str(port)}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env)
    child = None
    try:
        child = int(parent.stdout.readline())
        assert until(lambda: scrape(port))
        parent.kill()
        parent.wait(30)
        assert os.path.exists(f"/proc/{child}")
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            probe.listen()
    finally:
        if child:
            os.kill(child, signal.SIGKILL)  # first: it holds the parent's end of the pipe
        parent.kill()
        parent.communicate(timeout=30)
