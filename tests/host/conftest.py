"""Jobs on the stand-in host, as fixtures."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.host_jobs import SMALL, STANDIN, HostJob, HostRun

StartHost = Callable[..., HostJob]
RunHost = Callable[..., HostRun]


@pytest.fixture(scope="session")
def standin_path() -> Path:
    """Goes first on the ``PYTHONPATH`` of a process that should see the stand-in."""
    return STANDIN


@pytest.fixture(scope="module")
def host_cluster(ray_cluster: Any) -> str:
    """Address of a Ray that the jobs of a module share; a job's own processes end with it."""
    return str(ray_cluster([{}], cpus=4).address)


@pytest.fixture(scope="module")
def start_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartHost]:
    """``start(*arguments, line="new", plugin=False, address="", env={}) -> HostJob``.

    With ``plugin`` the job is started by ``relax-tq-rdma train``; without an address it starts a Ray of its own.
    """
    jobs: list[HostJob] = []

    def start(
        *arguments: str, line: str = "new", plugin: bool = False, address: str = "", env: dict[str, str] | None = None
    ) -> HostJob:
        folder = tmp_path_factory.mktemp("host")
        results, log = folder / "results.jsonl", folder / "driver.log"
        entry = ["relax_tq_rdma.cli", "train", "--"] if plugin else ["relax.entrypoints.train"]
        path = [str(STANDIN), os.environ.get("PYTHONPATH", "")]
        with open(log, "w") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", *entry, *arguments, "--standin-results", str(results)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, path)),
                    "STANDIN_LINE": line,
                    "RAY_ADDRESS": address,
                    **(env or {}),
                },
            )
        jobs.append(HostJob(process, results, log))
        return jobs[-1]

    yield start
    for job in jobs:
        if job.process.poll() is None:
            job.process.kill()
            job.process.wait(10)


@pytest.fixture(scope="module")
def run_host(start_host: StartHost, host_cluster: str) -> RunHost:
    """``run(*arguments, line="new", plugin=False, env={}, code=0, timeout=200) -> HostRun`` on the module's Ray."""

    def run(*arguments: str, code: int = 0, timeout: float = 200, **how: Any) -> HostRun:
        done = start_host(*SMALL, *arguments, address=host_cluster, **how).wait(timeout)
        assert done.code == code, done.output[-4000:]
        return done

    return run
