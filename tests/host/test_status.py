"""``relax-tq-rdma status`` on a running job of the stand-in: a person, or the driver, sees every process of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from relax_tq_rdma import __version__
from tests.host.conftest import StartHost
from tests.host_jobs import ASYNC, SMALL, HostJob

pytestmark = [pytest.mark.host, pytest.mark.timeout(300)]

LAYERS = [
    *("--tq-storage-backend", "mooncake", "--tq-mooncake-auto-init", "job-owned", "--tq-init-timeout-seconds", "90"),
    *("--tq-normalize-multimodal", "--tq-host-staging", "--tq-host-staging-mb", "128"),
    "--rollout-group-share-processor",
]
SLOW = ["--num-rollout", "40", "--standin-token-seconds", "1"]
"""The job is ended by the test."""


def status(address: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "relax_tq_rdma.cli", "status", *arguments],
        env={**os.environ, "RAY_ADDRESS": address},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def report(address: str) -> dict[str, Any]:
    done = status(address, "--json")
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (1 if found["differences"] else 0)
    return found


def until(address: str, job: HostJob, condition: Callable[[dict[str, Any]], bool], seconds: float) -> dict[str, Any]:
    ends = time.monotonic() + seconds
    while not condition(found := report(address)):
        assert job.process.poll() is None, job.log.read_text()[-4000:]
        assert time.monotonic() < ends, json.dumps(found, indent=1)
        time.sleep(0.5)
    return found


@pytest.fixture(scope="module")
def running(start_host: StartHost, host_cluster: str) -> Iterator[tuple[str, HostJob]]:
    """A job that has trained a step, and the address of its Ray."""
    job = start_host(*SMALL, *ASYNC, *SLOW, *LAYERS, plugin=True, address=host_cluster)
    ends = time.monotonic() + 150
    while not any(record["kind"] == "step" for record in job.records()):
        assert job.process.poll() is None, job.log.read_text()[-4000:]
        assert time.monotonic() < ends, job.log.read_text()[-4000:]
        time.sleep(0.2)
    yield host_cluster, job
    if job.process.poll() is None:
        job.process.send_signal(signal.SIGTERM)
        job.process.wait(60)


def test_every_process_with_data_is_listed_and_all_are_alike(running: tuple[str, HostJob]) -> None:
    address, job = running
    found = until(address, job, lambda found: len(found["processes"]) >= 7, 60)
    assert found["schema"] == 1
    assert found["differences"] == []
    assert found["job"]["start_line"] in job.log.read_text()
    assert found["job"]["decision"]["backend"] == "MooncakeStore"
    by_role = {process["role"]: process for process in found["processes"]}
    pids = {record["role"]: record["pid"] for record in job.records() if record["kind"] == "process"}
    manager = next(process for process in found["processes"] if process["pid"] == pids["rollout_manager"])
    rank = next(process for process in found["processes"] if process["pid"] == pids["actor"])
    assert by_role["driver"]["pid"] == job.process.pid
    for process in found["processes"]:
        assert (process["plugin"], process["backend"], process["protocol"]) == (__version__, "MooncakeStore", "tcp")
        assert {"T1", "T2"} <= {seam for seam, state in process["seams"].items() if state == "taken"}
        assert process["silent_s"] < 20
    assert manager["seams"]["R2"] == "taken"
    assert rank["seams"]["R3"] == "taken"
    assert manager["pool"]["capacity"] > 0
    assert manager["pool"]["misses"] == 0


def test_people_get_a_table_and_the_start_line(running: tuple[str, HostJob]) -> None:
    address, job = running
    done = status(address)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[dataplane] backend=MooncakeStore protocol=tcp" in done.stdout
    assert f"{job.process.pid}" in done.stdout
    assert done.stdout.rstrip().endswith(", all alike")


def test_the_driver_has_compared_them_at_the_start(running: tuple[str, HostJob]) -> None:
    said = running[1].log.read_text()
    assert "[dataplane] coverage: " in said
    assert ", all alike" in said


def test_a_process_that_stands_still_is_named(running: tuple[str, HostJob]) -> None:
    """A rank that is stopped writes no more; its record stays, and says for how long."""
    address, job = running
    rank = next(record["pid"] for record in job.records() if record.get("rank") == 1)
    os.kill(rank, signal.SIGSTOP)
    try:
        found = until(address, job, lambda found: bool(found["differences"]), 60)
    finally:
        os.kill(rank, signal.SIGCONT)
    [sentence] = found["differences"]
    assert f"pid {rank} on " in sentence
    assert "has said nothing for " in sentence


def test_the_end_of_the_job_leaves_nothing_on_the_board(running: tuple[str, HostJob]) -> None:
    address, job = running
    job.process.send_signal(signal.SIGTERM)
    job.process.wait(60)
    done = status(address)
    assert done.returncode == 1
    assert "no job with the plugin runs on this Ray cluster" in done.stderr
