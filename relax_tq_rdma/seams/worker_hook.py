"""Seam P1: every Ray worker of the job loads the plugin before it does anything else (design §2).

Ray runs a hook at the start of each worker when the job's runtime environment names one, and only then. The host builds
that environment and hands it to ``ray.init``, in a global restart once more, so that is where the hook is added. A hook
that raises, or that cannot be imported, would kill every worker of the job with the cause in a log only (FC-14). So
ours travels by value, imports inside a ``try``, and then runs the hook that the job had already.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from relax_tq_rdma.seams.base import SeamReport, installed, missing_parameters
from relax_tq_rdma.seams.wrapping import Wrappers

HOOK = "worker_process_setup_hook"
_HOOK_VARIABLE = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"
_SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Where ``ray job submit`` leaves the environment it was given. Ray refuses a key that it shares with ``ray.init``."""


class WorkerHook:
    """See :class:`relax_tq_rdma.seams.base.Seam`.

    Args:
        variables: environment variables that every worker needs, unless the job sets them to something else.
    """

    name = "P1 (Ray's worker_process_setup_hook)"
    _expected = f"ray.init(runtime_env) and the key {HOOK} in a runtime environment"

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        self._variables = dict(variables or {})
        self._wrappers = Wrappers()

    def check(self) -> SeamReport:
        found = ""
        try:
            import ray
            from ray.runtime_env import RuntimeEnv

            if missing_parameters(ray.init, ("runtime_env",)):
                found = "ray.init without parameter runtime_env"
            elif HOOK not in RuntimeEnv.known_fields:
                found = f"no key {HOOK}"
        except Exception as exc:  # a broken Ray must become a sentence, whatever it raises
            found = f"{type(exc).__name__}: {exc}"
        return SeamReport(
            name=self.name,
            ok=not found,
            installed=installed("ray", "Ray"),
            expected=self._expected,
            found=found,
            way_out="install Ray 2.40 or later, or drop the flags of relax-tq-rdma",
        )

    def apply(self) -> None:
        import ray

        self._wrappers.put(ray, "init", self._with_hook)

    def remove(self) -> None:
        self._wrappers.take_back()

    def for_actors(self, runtime_env: Mapping[str, Any]) -> dict[str, Any]:
        """The environment that the host gives to its actors one by one, with the hook of the job that runs now.

        An actor inherits it from whoever creates it, and Serve replicas are created by a controller that an earlier job
        may have left on the cluster.
        """
        import ray

        of_job = ray.get_runtime_context().runtime_env.get("env_vars") or {}
        hook = {_HOOK_VARIABLE: of_job[_HOOK_VARIABLE]} if _HOOK_VARIABLE in of_job else {}
        return {**runtime_env, "env_vars": {**(runtime_env.get("env_vars") or {}), **hook}}

    def _with_hook(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def init(*args: Any, runtime_env: Any = None, **named: Any) -> Any:
            own = dict(runtime_env or getattr(named.get("job_config"), "runtime_env", None) or {})
            with _submitted_environment(own) as submitted:
                return original(*args, runtime_env=self._completed(own, submitted), **named)

        return init

    def _completed(self, own: dict[str, Any], submitted: Mapping[str, Any]) -> dict[str, Any]:
        # A global restart comes with what :meth:`for_actors` gave: the hook of the Ray connection before.
        named = {name: value for name, value in (own.get("env_vars") or {}).items() if name != _HOOK_VARIABLE}
        taken = {**(submitted.get("env_vars") or {}), **named}
        ours = {name: value for name, value in self._variables.items() if name not in taken}
        hook = chained(own.get(HOOK) or submitted.get(HOOK))
        return {**own, HOOK: hook, "env_vars": {**ours, **named}}


def chained(theirs: Any) -> Callable[[], None]:
    """The plugin's hook, and after it the one that the job had: a function, or where one is to be found.

    It holds no reference to this package and can be unpickled where the package is not installed.
    """

    def relax_tq_rdma_worker_hook() -> None:
        import contextlib
        import importlib
        import sys

        try:
            from relax_tq_rdma.install import install

            install()
        except Exception as exc:
            text = f"{type(exc).__name__}: {exc}"
            # For the check of the nodes, and for the first manager, should there be one.
            sys.relax_tq_rdma_hook_failed = text  # type: ignore[attr-defined]
            said = f"[dataplane] ERROR relax-tq-rdma cannot be loaded in this process ({text})"
            with contextlib.suppress(OSError, ValueError):  # nobody can be told on a full disk or a closed stream
                print(f"{said}: install the same version on every node", file=sys.stderr, flush=True)
        hook = theirs
        if isinstance(hook, str):
            module, _, name = hook.rpartition(".")
            hook = getattr(importlib.import_module(module), name)
        if hook is not None:
            hook()  # if it raises, the worker ends: as without us

    return relax_tq_rdma_worker_hook


@contextmanager
def _submitted_environment(own: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The environment that the job was submitted with. Inside the block Ray does not see the hook in it, since ours
    runs it; a job that has set two of its own is told so by Ray."""
    text = os.environ.get(_SUBMITTED)
    config = json.loads(text) if text else {}
    submitted: dict[str, Any] = config.get("runtime_env") or {}
    if text is None or HOOK in own or HOOK not in submitted:
        yield submitted
        return
    rest = {key: value for key, value in submitted.items() if key != HOOK}
    rest["env_vars"] = {k: v for k, v in (submitted.get("env_vars") or {}).items() if k != _HOOK_VARIABLE}
    os.environ[_SUBMITTED] = json.dumps({**config, "runtime_env": rest})
    try:
        yield submitted
    finally:
        os.environ[_SUBMITTED] = text
