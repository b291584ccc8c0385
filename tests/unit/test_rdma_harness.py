"""The harness of the RDMA tests on this machine: calls, forked processes, tokens, hosts files."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path

import pytest

from tests.rdma.channel import Caller, Gone, RemoteError, serve
from tests.rdma.conftest import read_hosts
from tests.rdma.nodes import TestNode, named

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "a token of the tests"
AGENT = f"""
import os, socket
from tests.rdma import agent
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
agent._accept(server, {TOKEN!r}, {{"add": lambda a, b: a + b, "env": os.environ.get}})
"""


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[TestNode]:
    monkeypatch.setenv("RTQ_RDMA_TOKEN", TOKEN)
    agent = subprocess.Popen([sys.executable, "-c", AGENT], stdout=subprocess.PIPE, cwd=ROOT, text=True)
    assert agent.stdout is not None
    yield TestNode("here", "127.0.0.1", int(agent.stdout.readline()))
    agent.kill()
    agent.wait()
    agent.stdout.close()


def test_a_process_of_its_own_does_the_duties(node: TestNode) -> None:
    with node.process(environment={"RTQ_SOMETHING": "1"}) as one, node.process() as other:
        assert one.pid != other.pid
        assert one.call("add", 10, a=1, b=2) == 3
        assert one.call("env", 10, key="RTQ_SOMETHING") == "1"
        assert other.call("env", 10, key="RTQ_SOMETHING") is None


def test_a_killed_process_is_told_from_a_slow_one(node: TestNode) -> None:
    with node.process() as one:
        future = one.begin("add", a=1, b="x")
        with pytest.raises(RemoteError, match="unsupported operand") as failure:
            future.result(10)
        assert failure.value.kind == "TypeError"
        with pytest.raises(RemoteError, match="nothing of that name"):
            one.call("nothing of that name", 10)
        one.kill()
        with pytest.raises(Gone):
            one.call("add", 10, a=1, b=2)
        assert one.exit_status(10) == -signal.SIGKILL
        with pytest.raises(AssertionError, match="is gone already"):
            one.kill()


def test_a_process_can_be_found_by_its_name(node: TestNode, tmp_path: Path) -> None:
    path = str(tmp_path / "actors" / "controller")
    with pytest.raises(FileNotFoundError):
        named(path)
    with node.process(name=path) as one:
        one.call("add", 10, a=1, b=2)
        with contextlib.closing(named(path)) as found:
            assert found.call("add", 10, a=2, b=2) == 4
        one.kill()
        one.exit_status(10)
        with pytest.raises(Gone):
            named(path)


def test_without_the_token_nothing_is_done(node: TestNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RTQ_RDMA_TOKEN", "another one")
    with pytest.raises(Gone, match="RTQ_RDMA_TOKEN"):
        node.process()


def test_an_answer_that_does_not_come_is_a_time_out() -> None:
    here, there = socket.socketpair()
    caller = Caller(here, "the other side")
    with pytest.raises((TimeoutError, FutureTimeoutError), match=r"the other side did not answer wait within 0\.1 s"):
        caller.call("wait", 0.1)
    there.close()
    caller.close()


def test_calls_end_when_the_connection_is_closed() -> None:
    here, there = socket.socketpair()
    caller = Caller(here)
    pending = caller.begin("wait")
    there.close()
    with pytest.raises(Gone):
        pending.result(10)
    with pytest.raises(Gone):
        caller.begin("wait").result(10)
    serve(here, {})  # a closed connection ends the serving side at once
    caller.close()


def test_hosts_files_are_read_and_refused(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# the first is this one\na 10.0.0.1\n\nb 10.0.0.2:99  # the other\n")
    assert [(node.name, node.address, node.agent) for node in read_hosts(path)] == [
        ("a", "10.0.0.1", ("10.0.0.1", 18700)),
        ("b", "10.0.0.2", ("10.0.0.2", 99)),
    ]
    path.write_text("a\n")
    with pytest.raises(pytest.UsageError, match="'a' is not 'NAME ADDRESS"):
        read_hosts(path)
    path.write_text("\n")
    with pytest.raises(pytest.UsageError, match="names no node"):
        read_hosts(path)
    with pytest.raises(pytest.UsageError, match=r"the hosts file cannot be read: .*No such file"):
        read_hosts(tmp_path / "hots")


def test_an_agent_without_a_real_secret_does_not_start() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.rdma.agent"],
        cwd=ROOT,
        env={**os.environ, "RTQ_RDMA_TOKEN": "short"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "at least 16 characters" in done.stderr
