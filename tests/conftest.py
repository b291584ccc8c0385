"""Shared fixtures, and two promises about the whole run: nothing it started is left running, nothing it wrote stays.

Every process of a run inherits a random ``RTQ_TEST_SESSION`` from pytest, also one that outlives its parent. At the end
exactly the processes that carry this run's token are looked at, so a neighbour's Ray or Mooncake is never touched.

With ``-n 2`` (pytest-xdist) each of its workers is such a run, with a token and a run folder of its own; the process in
front runs no test and passes on what they found.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest

import tests.fast_start.sitecustomize  # noqa: F401 (this process has started already)

TOKEN = "RTQ_TEST_SESSION"
FAST_START = Path(__file__).with_name("fast_start")
"""On ``PYTHONPATH`` of all that a test starts: see its ``sitecustomize.py``."""

GRACE_SECONDS = 15.0
"""Ray's processes end by themselves a few seconds after the driver lets go."""

_LEFTOVERS: list[str] = []
_KEY_RUN_DIR: pytest.StashKey[str] = pytest.StashKey()


# --- the run as a whole -----------------------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    if _only_distributes(config):
        return
    os.environ[TOKEN] = secrets.token_hex(16)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that needs a hub is wrong
    path = [str(FAST_START), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, path)))
    if not os.environ.get("RTQ_RUN_DIR"):
        run_dir = tempfile.mkdtemp(prefix="rtq-test-")
        os.environ["RTQ_RUN_DIR"] = config.stash[_KEY_RUN_DIR] = run_dir
    expected = os.environ.get("RTQ_TEST_EXPECT_TQ")
    if expected and expected != _version("TransferQueue"):
        raise pytest.UsageError(f"this run is for TransferQueue {expected}, but {_version('TransferQueue')} is first")


def pytest_report_header() -> str:
    return (
        f"data plane under test: TransferQueue {_version('TransferQueue')}, Ray {_version('ray')}, "
        f"Mooncake {_version('mooncake-transfer-engine-non-cuda')}"
    )


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if not _only_distributes(session.config):
        _end_what_is_left()
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["leftovers"] = _LEFTOVERS
    if _LEFTOVERS and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    """In the process in front: a worker has ended."""
    _LEFTOVERS.extend(getattr(node, "workeroutput", {}).get("leftovers", []))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _LEFTOVERS:
        terminalreporter.section("processes left behind by the tests (ended now)", red=True, bold=True)
        for line in _LEFTOVERS:
            terminalreporter.line(line)


def pytest_unconfigure(config: pytest.Config) -> None:
    run_dir = config.stash.get(_KEY_RUN_DIR, None)
    if run_dir:
        shutil.rmtree(run_dir, ignore_errors=True)


def _only_distributes(config: pytest.Config) -> bool:
    """Whether this is the process in front of pytest-xdist's workers."""
    return bool(getattr(config.option, "numprocesses", None)) and not hasattr(config, "workerinput")


def _end_what_is_left() -> None:
    alive = _own_processes()
    if alive:
        _, alive = psutil.wait_procs(alive, timeout=GRACE_SECONDS)
    for process in alive:
        _LEFTOVERS.append(_describe(process))
        _kill(process)


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _own_processes() -> list[psutil.Process]:
    """Every other live process that carries this run's token. ``psutil`` checks pid and start time before a signal."""
    token, own = os.environ[TOKEN], os.getpid()
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid == own or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(TOKEN) == token and not _is_helper_of_python(process):
                found.append(process)
        except psutil.Error:
            continue
    return found


def _is_helper_of_python(process: psutil.Process) -> bool:
    """multiprocessing's resource tracker lives exactly as long as pytest itself."""
    return process.ppid() == os.getpid() and any("resource_tracker" in part for part in process.cmdline())


def _describe(process: psutil.Process) -> str:
    try:
        return f"pid {process.pid}: {' '.join(process.cmdline())[:160]}"
    except psutil.Error:
        return f"pid {process.pid}"


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
        process.wait(timeout=5)
    except psutil.Error:
        pass


# --- other versions of the libraries, unpacked by scripts/setup.sh --test ---------------------------------------------


@pytest.fixture(scope="session")
def tq_0110() -> Path:
    """Folder with TransferQueue 0.1.10: put it first on a child's ``PYTHONPATH``."""
    return _unpacked("RTQ_TEST_TQ_0110", "transfer_queue")


@pytest.fixture(scope="session")
def mooncake_0310() -> Path:
    """Folder with Mooncake 0.3.10.post2: put it first on a child's ``PYTHONPATH``."""
    return _unpacked("RTQ_TEST_MOONCAKE_0310", "mooncake")


def _unpacked(variable: str, package: str) -> Path:
    folder = os.environ.get(variable)
    if folder and (Path(folder) / package).is_dir():
        return Path(folder)
    problem = f"{variable}={folder!r} holds no {package!r}: run the tests through scripts/test.sh"
    if os.environ.get("CI") == "true":
        pytest.fail(problem)
    pytest.skip(problem)


# --- Ray --------------------------------------------------------------------------------------------------------------

StartCluster = Callable[..., Any]


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[StartCluster]:
    """``start(node_envs, cpus=1, deadline_s=90) -> ray.cluster_utils.Cluster``: a real cluster, one raylet a mapping.

    Each mapping is the environment of that node and of its workers (``{"RTQ_SYSTEM_ROOT": ...}`` fakes a node's
    hardware). The driver is connected to the first node. All is ended with the module.
    """
    clusters: list[Any] = []

    def start(node_envs: Sequence[Mapping[str, str]], cpus: int = 1, deadline_s: float = 90.0) -> Any:
        import ray
        from ray.cluster_utils import Cluster

        ends = time.monotonic() + deadline_s
        cluster = Cluster()
        clusters.append(cluster)
        for env in node_envs:
            cluster.add_node(num_cpus=cpus, env_vars=dict(env), include_dashboard=False, wait=False)
        ray.init(address=cluster.address, log_to_driver=False)
        while sum(node["Alive"] for node in ray.nodes()) < len(node_envs):
            if time.monotonic() > ends:
                pytest.fail(f"the {len(node_envs)}-node Ray cluster was not up within {deadline_s:g} s")
            time.sleep(0.1)
        return cluster

    yield start
    if clusters:
        import ray

        ray.shutdown()
        for cluster in clusters:
            cluster.shutdown()
