"""Seam R4 on a host of a few lines: the data plane ends however the host's controller does."""

from __future__ import annotations

import argparse
import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from relax_tq_rdma import SeamError, StartError
from relax_tq_rdma.seams.relax_controller import MODULE, RelaxController
from tests.host_module import modules_in

HOST = """
class Controller:
    def __init__(self, config, runtime_env=None):
        self.config = config
        config.environments.append(runtime_env)
        self._initialize_data_system()
        if config.fails:
            raise config.fails

    def _initialize_data_system(self):
        self.config.steps.append("data system")
        self.config.start()

    def shutdown(self):
        self.config.steps.append("shutdown")
        if self.config.fails_to_stop:
            raise RuntimeError("stop")

    def _global_restart(self):
        self.config.close()
        self.__init__(self.config, None)
"""


class Plane:
    """Seam T1, as far as the controller asks it."""

    def __init__(self, steps: list[str]) -> None:
        self.is_running = False
        self._steps = steps

    def start(self) -> None:
        self.is_running = True

    def close(self) -> None:
        assert self.is_running
        self.is_running = False
        self._steps.append("closed")


class Host:
    def __init__(self, module: Any, plane: Plane, steps: list[str]) -> None:
        self.Controller, self.plane, self.steps = module.Controller, plane, steps

    def config(self, **changes: Any) -> argparse.Namespace:
        calls = {"start": self.plane.start, "close": self.plane.close}
        plain = {"steps": self.steps, "environments": [], "fails": None, "fails_to_stop": False}
        return argparse.Namespace(**{**plain, **calls, **changes})


Start = Callable[..., Host]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    seams: list[RelaxController] = []
    with modules_in(tmp_path, monkeypatch) as write:

        def make(before: Callable[[], None] = lambda: None, own: bool = True) -> Host:
            write(MODULE, HOST)
            steps: list[str] = []
            plane = Plane(steps)
            after, for_actors = lambda: steps.append("compared"), lambda env: {**env, "hook": "ours"}
            seam = RelaxController(plane if own else None, before, after, for_actors)
            assert seam.check().ok
            seam.apply()
            module = importlib.import_module(MODULE)
            originals = dict(vars(module.Controller))
            seam.apply()
            seam.apply()
            assert inspect.signature(module.Controller.__init__) == inspect.signature(originals["__init__"])
            seams.append(seam)
            return Host(module, plane, steps)

        yield make
        for seam in seams:
            seam.remove()


def test_a_job_from_start_to_end(start: Start) -> None:
    host = start()
    controller = host.Controller(host.config(), runtime_env={})
    assert host.plane.is_running
    controller.shutdown()
    controller.shutdown()
    assert host.steps == ["data system", "compared", "shutdown", "closed", "shutdown"]


@pytest.mark.parametrize("how", ["by name", "by position"])
def test_the_host_s_actors_get_the_hook_with_their_environment(start: Start, how: str) -> None:
    host, theirs = start(), {"env_vars": {}}
    config = host.config()
    if how == "by name":
        host.Controller(config=config, runtime_env=theirs)
    else:
        host.Controller(config, theirs)
    assert config.environments == [{"env_vars": {}, "hook": "ours"}]
    assert theirs == {"env_vars": {}}
    host.Controller(config)
    assert config.environments[1] is None


def test_a_constructor_that_fails_leaves_no_data_plane(start: Start) -> None:
    host = start()
    with pytest.raises(ValueError, match="no GPU"):
        host.Controller(host.config(fails=ValueError("no GPU")))
    assert host.steps == ["data system", "closed"]


def test_a_shutdown_that_fails_closes_too(start: Start) -> None:
    host = start()
    controller = host.Controller(host.config(fails_to_stop=True))
    with pytest.raises(RuntimeError, match="stop"):
        controller.shutdown()
    assert not host.plane.is_running


def test_a_global_restart_runs_the_constructor_again(start: Start) -> None:
    host = start()
    controller = host.Controller(host.config())
    controller._global_restart()
    assert host.plane.is_running
    assert host.steps == ["data system", "compared", "closed", "data system", "compared"]
    controller.config.fails = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        controller._global_restart()
    assert not host.plane.is_running


def test_what_is_not_ready_stops_the_start_with_one_sentence(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    def not_ready() -> None:
        raise StartError("node b has no plugin")

    host = start(before=not_ready)
    with pytest.raises(StartError):
        host.Controller(host.config())
    assert host.steps == []
    assert capsys.readouterr().err == "[dataplane] ERROR node b has no plugin\n"


def test_a_host_that_goes_past_transfer_queue_init_is_refused(start: Start) -> None:
    host = start()
    with pytest.raises(SeamError, match=r"seam R4 .*started its data system past transfer_queue\.init"):
        host.Controller(host.config(start=lambda: None))


def test_a_data_plane_of_the_host_is_started_when_the_nodes_are_ready_and_ended_by_the_host(start: Start) -> None:
    ready: list[bool] = []
    host = start(before=lambda: ready.append(True), own=False)
    config = host.config(start=lambda: None)
    controller = host.Controller(config, {})
    assert (ready, config.environments) == ([True], [{"hook": "ours"}])
    controller.shutdown()
    assert host.steps == ["data system", "compared", "shutdown"]


def test_removed_it_is_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with modules_in(tmp_path, monkeypatch) as write:
        write(MODULE, HOST)
        module = importlib.import_module(MODULE)
        before = dict(vars(module.Controller))
        seam = RelaxController(Plane([]))
        seam.apply()
        assert dict(vars(module.Controller)) != before
        seam.remove()
        assert dict(vars(module.Controller)) == before
