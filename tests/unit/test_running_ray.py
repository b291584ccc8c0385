"""Joining a Ray cluster that is not there, or that does not let us in: one sentence each. Ray itself is replaced."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from relax_tq_rdma import StartError
from relax_tq_rdma.transport import running_ray

RAY_S_OWN = "Could not find any running Ray instance. Please specify the one to connect to by setting `--address` flag."
MISMATCH = "Version mismatch: The cluster was started with:\n    Ray: 2.9.0\n    Python: 3.10.1\nThis process: 2.60.0\n"


class FakeRay(SimpleNamespace):
    """Notes what is asked of it; ``init`` raises what it is given."""

    def __init__(self, error: Exception | None = None, *, connected: bool = False) -> None:
        super().__init__(error=error, connected=connected, calls=[])

    def is_initialized(self) -> bool:
        return bool(self.connected)

    def init(self, **arguments: Any) -> None:
        self.calls.append(arguments)
        if self.error is not None:
            raise self.error

    def shutdown(self) -> None:
        self.calls.append("shutdown")


@pytest.fixture
def listener() -> Iterator[str]:
    """An address where somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def refusal(
    monkeypatch: pytest.MonkeyPatch, ray: object, where: str = running_ray.AUTO, given: str = "", flag: str = ""
) -> str:
    monkeypatch.setenv("RAY_ADDRESS", given)
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(StartError) as error:
        running_ray.join(where, flag)
    said = str(error.value)
    assert "\n" not in said
    assert "Please" not in said, "Ray's own advice does not know how this command is told"
    return said


@pytest.mark.parametrize("given", ["", "auto"])
def test_no_cluster_on_this_machine(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    said = refusal(monkeypatch, FakeRay(ConnectionError(RAY_S_OWN)), given=given)
    assert said == "no Ray cluster answers on this machine: start one (ray start --head), or set RAY_ADDRESS"


def test_somebody_listens_who_is_no_cluster(monkeypatch: pytest.MonkeyPatch, listener: str) -> None:
    said = refusal(monkeypatch, FakeRay(ConnectionError(RAY_S_OWN)), given=listener)
    assert said == (f"no Ray cluster answers at {listener}: start one (ray start --head), or correct RAY_ADDRESS")


@pytest.mark.parametrize(
    ("named", "why"),
    [
        ("127.0.0.1:1", "127.0.0.1:1: connection refused"),
        ("local", "'local' is not HOST:PORT"),  # Ray would start a cluster of its own
        ("host:port", "the port must be a number from 1 to 65535"),
        (":6379", "is not HOST:PORT"),
    ],
)
@pytest.mark.parametrize("name", ["RAY_ADDRESS", "--ray-address"])
def test_what_is_named_is_dialled_before_ray_is_asked(
    monkeypatch: pytest.MonkeyPatch, name: str, named: str, why: str
) -> None:
    ray = FakeRay()
    if name == "RAY_ADDRESS":
        said = refusal(monkeypatch, ray, given=named)
    else:
        said = refusal(monkeypatch, ray, named, flag=name)
    assert said.startswith(f"{name} names no running Ray cluster: ")
    assert why in said
    assert said.endswith(f"start one (ray start --head), or correct {name}")
    assert ray.calls == []


def test_another_version_is_told_whole_and_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    said = refusal(monkeypatch, FakeRay(RuntimeError(MISMATCH)))
    assert said.startswith("this process cannot join the Ray cluster: Version mismatch")
    assert "Ray: 2.9.0 Python: 3.10.1" in said


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "cannot be joined without Ray" in refusal(monkeypatch, None)


def test_a_connection_is_closed_by_whoever_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "")
    for connected, calls in ((False, 2), (True, 0)):
        ray = FakeRay(connected=connected)
        monkeypatch.setitem(sys.modules, "ray", ray)
        with pytest.raises(KeyError), running_ray.joined():
            raise KeyError
        assert len(ray.calls) == calls


def test_a_cluster_that_falls_silent_ends_the_process_with_the_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ray's call does not return, so nothing can be raised: here the exit is only noted, and the call let go."""
    codes: list[int] = []
    ray = FakeRay()
    ray.init = lambda **_: time.sleep(0.5)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("RAY_ADDRESS", "")
    monkeypatch.setattr(running_ray, "_JOIN_SECONDS", 0.05)
    monkeypatch.setattr(running_ray.os, "_exit", codes.append)
    running_ray.join()
    assert codes == [1]
    assert capsys.readouterr().err.startswith(
        "relax-tq-rdma: error: no Ray cluster answers on this machine within 0.05 s: start one"
    )
    with open(os.devnull, "w") as closed:
        monkeypatch.setattr(sys, "stderr", closed)
    running_ray.join()
    assert codes == [1, 1]  # also where nobody can be told
