"""Whole jobs as processes: several on one host, each with its master, and every way a driver can end (RFC §4.8, F8)."""

import json
import os
import select
import signal
import subprocess
import sys
import time

import psutil
import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

JOB = """
import json, sys
import ray, torch
from tensordict import TensorDict
import relax_tq_rdma
from relax_tq_rdma import Settings, StartError

relax_tq_rdma.install(Settings.from_flags(
    "--tq-storage-backend mooncake --tq-mooncake-auto-init job-owned --tq-init-timeout-seconds 90".split()))
ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
import transfer_queue as tq

conf = tq.init()
section = conf["backend"]["MooncakeStore"]["relax_tq_rdma"]
raylet = ray._private.worker._global_node.all_processes["raylet"][0].process.pid
print(json.dumps({"master": section["master"], "job": section["job"], "raylet": raylet}), flush=True)
for number, line in enumerate(sys.stdin):
    if line.strip() == "end":
        break
    payload = torch.full((1 << 20,), number, dtype=torch.uint8)
    meta = tq.kv_batch_put([f"row{number}"], "train", fields=TensorDict({"x": payload[None]}, batch_size=1))
    back = tq.kv_batch_get(f"row{number}", "train")["x"]
    print(json.dumps({"equal": bool((back == number).all())}), flush=True)
tq.close()
ray.shutdown()
print(json.dumps({"closed": True}), flush=True)
"""


class Job:
    """A driver in a process of its own, told what to do line by line."""

    def __init__(self) -> None:
        environment = {**os.environ, "RTQ_SEGMENT_MB": "64", "RTQ_LOCAL_BUFFER_MB": "64"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", JOB],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self.facts = {}

    def wait_until_ready(self) -> None:
        self.facts = self.answer(120)

    def answer(self, limit: float) -> dict:
        """The next JSON line; other lines are Ray's and Mooncake's."""
        ends = time.monotonic() + limit
        while time.monotonic() < ends:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, ends - time.monotonic()))
            line = self.process.stdout.readline() if ready else ""
            if line.startswith("{"):
                return json.loads(line)
            if ready and not line:
                break
        pytest.fail(f"the job said nothing within {limit:g} s (exit status {self.process.poll()})")

    def tell(self, line: str, limit: float = 30.0) -> dict:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.answer(limit)

    def master(self) -> psutil.Process:
        """This job's mooncake_master, found by the port it was told to listen on."""
        port = self.facts["master"].rpartition(":")[2]
        for process in psutil.process_iter(["name", "cmdline"]):
            if process.info["name"] == "mooncake_master" and f"--rpc_port={port}" in (process.info["cmdline"] or []):
                return process
        pytest.fail("this job has no master")


@pytest.fixture(scope="module")
def jobs():
    """Four jobs on this host, started at the same time; each test has its own, and some look at a neighbour."""
    started = {name: Job() for name in ("killed", "terminated", "stranded", "untouched")}
    try:
        for job in started.values():
            job.wait_until_ready()
        yield started
    finally:
        for job in started.values():
            job.process.kill()
            job.process.wait(10)


def gone(process: psutil.Process, limit: float) -> bool:
    return not psutil.wait_procs([process], timeout=limit)[1]


def test_jobs_on_one_host_do_not_meet_and_one_is_killed(jobs):
    killed, untouched = jobs["killed"], jobs["untouched"]
    for fact in ("master", "job"):
        assert len({job.facts[fact] for job in jobs.values()}) == len(jobs)
    assert killed.tell("go") == untouched.tell("go") == {"equal": True}

    its_master, others_master = killed.master(), untouched.master()
    killed.process.kill()
    assert gone(its_master, 15)
    assert untouched.tell("go") == {"equal": True}
    assert others_master.is_running()

    assert untouched.tell("end", 60) == {"closed": True}
    assert untouched.process.wait(30) == 0
    assert gone(others_master, 5)


def test_sigterm_of_the_driver_takes_its_master_along(jobs):
    job = jobs["terminated"]
    master = job.master()
    job.process.send_signal(signal.SIGTERM)
    job.process.wait(60)
    assert gone(master, 15)


def test_a_driver_whose_node_has_vanished_still_ends_in_time_with_its_master(jobs):
    job = jobs["stranded"]
    master = job.master()
    psutil.Process(job.facts["raylet"]).kill()
    job.process.stdin.close()  # the host ends the job: it closes the data plane and Ray
    job.process.wait(90)
    assert gone(master, 15)
