"""Seam P1: the hook that every Ray worker runs, without a Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from typing import Any

import pytest
import ray
from ray import cloudpickle

from relax_tq_rdma.coverage.nodes import _question
from relax_tq_rdma.seams import worker_hook
from relax_tq_rdma.seams.worker_hook import HOOK, WorkerHook, chained

installing = sys.modules["relax_tq_rdma.install"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What ``ray.init`` was given, with the environment that it would have found of a submitted job."""
    made: list[dict[str, Any]] = []

    def init(address: str | None = None, *, runtime_env: Any = None, **named: Any) -> str:
        submitted = worker_hook.os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR")
        made.append({"address": address, "env": runtime_env, "submitted": submitted, **named})
        return "context"

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    return made


@pytest.fixture
def module_of_theirs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    ran: list[str] = []
    module = types.ModuleType("their_module")
    module.hook = lambda: ran.append("theirs")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "their_module", module)
    return ran


def test_the_job_gets_the_hook_and_the_host_s_own_environment_stays_as_it_is(calls: list[dict[str, Any]]) -> None:
    seam = WorkerHook({"RTQ_SEGMENT_MB": "7", "B": "2"})
    assert seam.check().ok
    before = ray.init
    seam.apply()
    seam.apply()
    theirs = {"env_vars": {"A": "1", "B": "9"}}
    assert ray.init("auto", runtime_env=theirs, log_to_driver=False) == "context"
    ray.init(runtime_env=theirs)  # a global restart uses the same dictionary
    seam.remove()
    assert ray.init is before
    assert theirs == {"env_vars": {"A": "1", "B": "9"}}
    assert len(calls) == 2
    for call in calls:
        assert call["env"]["env_vars"] == {"RTQ_SEGMENT_MB": "7", "A": "1", "B": "9"}
        assert callable(call["env"][HOOK])
    assert (calls[0]["address"], calls[0]["log_to_driver"]) == ("auto", False)


def test_actors_get_the_hook_of_the_job_that_runs_now_and_a_restart_gets_a_new_one(
    calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_job = {"env_vars": {"__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR": "key of this job", "X": "1"}}
    monkeypatch.setattr(ray, "get_runtime_context", lambda: types.SimpleNamespace(runtime_env=of_job))
    seam = WorkerHook()
    theirs = {"env_vars": {"A": "1"}, "working_dir": "here"}
    given = seam.for_actors(theirs)
    assert given == {
        "env_vars": {"A": "1", "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR": "key of this job"},
        "working_dir": "here",
    }
    assert theirs["env_vars"] == {"A": "1"}
    seam.apply()
    ray.init(runtime_env=given)
    seam.remove()
    assert calls[0]["env"]["env_vars"] == {"A": "1"}, "Ray refuses two hooks that differ"
    of_job["env_vars"].clear()
    assert seam.for_actors(theirs) == theirs, "Ray was there before the plugin"


@pytest.mark.parametrize("form", ["function", "name"])
def test_a_hook_that_the_job_had_runs_after_ours(
    calls: list[dict[str, Any]], module_of_theirs: list[str], monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    order: list[str] = []
    monkeypatch.setattr(installing, "install", lambda: order.append("ours"))
    seam = WorkerHook()
    seam.apply()
    ray.init(runtime_env={HOOK: "their_module.hook" if form == "name" else lambda: order.append("theirs")})
    seam.remove()
    calls[0]["env"][HOOK]()
    assert order + module_of_theirs == ["ours", "theirs"]


def test_a_hook_of_the_submitted_job_is_taken_over_and_ray_sees_one(
    calls: list[dict[str, Any]], module_of_theirs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted = {
        "runtime_env": {HOOK: "their_module.hook", "env_vars": {"RTQ_SEGMENT_MB": "5"}},
        "metadata": {"x": "y"},
    }
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(submitted))
    seam = WorkerHook({"RTQ_SEGMENT_MB": "7"})
    seam.apply()
    ray.init(runtime_env={"env_vars": {"A": "1"}})
    seam.remove()
    seen = json.loads(calls[0]["submitted"])
    assert HOOK not in seen["runtime_env"]
    assert seen["metadata"] == {"x": "y"}
    assert calls[0]["env"]["env_vars"] == {"A": "1"}, "Ray refuses a variable that both set"
    assert json.loads(worker_hook.os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"]) == submitted
    monkeypatch.setattr(installing, "install", lambda: None)
    calls[0]["env"][HOOK]()
    assert module_of_theirs == ["theirs"]


def test_two_hooks_of_the_job_s_own_are_left_for_ray_to_refuse(
    calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted = json.dumps({"runtime_env": {HOOK: "a.b"}})
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", submitted)
    seam = WorkerHook()
    seam.apply()
    ray.init(runtime_env={HOOK: "c.d"})
    seam.remove()
    assert calls[0]["submitted"] == submitted


def test_where_the_plugin_is_not_installed_the_worker_lives_and_says_so() -> None:
    hook = cloudpickle.dumps(chained(None))
    code = f"import pickle\nhook = pickle.loads({hook!r})\nhook()\nprint('alive', sys.relax_tq_rdma_hook_failed)"
    done = subprocess.run(
        [sys.executable, "-I", "-c", "import sys\nsys.modules['relax_tq_rdma'] = None\n" + code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("alive ModuleNotFoundError: ")
    assert "[dataplane] ERROR relax-tq-rdma cannot be loaded in this process (ModuleNotFoundError" in done.stderr


def test_a_hook_that_raises_ends_the_worker_as_without_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installing, "install", lambda: None)

    def raises() -> None:
        raise RuntimeError("theirs")

    with pytest.raises(RuntimeError, match="theirs"):
        chained(raises)()


def test_what_goes_wrong_in_our_own_part_never_ends_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installing, "install", lambda: 1 / 0)
    monkeypatch.setattr(sys, "relax_tq_rdma_hook_failed", "", raising=False)
    chained(None)()
    assert _question()() == {"problem": "ZeroDivisionError: division by zero"}
    with open(os.devnull, "w") as closed:
        monkeypatch.setattr(sys, "stderr", closed)
    chained(None)()  # nobody can be told


def test_a_ray_that_has_no_such_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray.runtime_env.RuntimeEnv, "known_fields", {"env_vars"})
    report = WorkerHook().check()
    assert not report.ok
    assert f"found no key {HOOK}; install Ray 2.40 or later" in report.text
