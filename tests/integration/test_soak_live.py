"""``relax-tq-rdma bench soak`` for real: half a minute that must hold, an interrupted one, one that loses an end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.integration

COMMAND = [sys.executable, "-m", "relax_tq_rdma.cli", "bench", "soak", "--json"]
SMALL = ["--pool-mib", "64", "--max-row-kib", "4096", "--keep", "24", "--linger-ms", "100"]


@contextmanager
def soaking(tmp_path: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """A run in the middle of it: the first rows have been read."""
    run = subprocess.Popen(
        [*COMMAND, *SMALL, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    try:
        assert run.stderr is not None
        while not re.search(r"[1-9]\d* rows", run.stderr.readline()):
            assert run.poll() is None
        yield run
    finally:
        run.kill()
        run.communicate()


def checks(whole: dict[str, Any]) -> dict[str, tuple[bool | None, str]]:
    return {check["name"]: (check["ok"], check["found"]) for check in whole["verdict"]["checks"]}


@pytest.mark.timeout(240)
def test_half_a_minute_holds(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, *SMALL, "--seconds", "30", "-o", str(tmp_path / "out.json")],
        capture_output=True,
        text=True,
        timeout=230,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert done.stdout, done.stderr
    whole = json.loads(done.stdout)
    assert [(name, *found) for name, found in checks(whole).items() if not found[0]] == []
    assert (done.returncode, whole["verdict"]["ok"], whole["faults"]) == (0, True, [])
    assert whole == json.loads((tmp_path / "out.json").read_text())
    assert set(whole["final"]["processes"]) == {"producer", "consumer0", "consumer1", "controller", "master", "driver"}
    totals = whole["totals"]
    assert totals["rows_read"] == totals["rows_put"] > 500
    assert totals["bytes_checked"] == totals["bytes_put"] > 100_000_000
    stored = sum(moved for rung, (_, moved) in whole["final"]["ends"]["producer"]["rungs"].items() if "put" in rung)
    assert stored < 0.7 * totals["bytes_put"], "copies of a group are stored once"
    assert len(whole["samples"]) > 30
    assert not list(tmp_path.glob("rtq-*"))


@pytest.mark.timeout(120)
def test_a_ctrl_c_leaves_no_process_and_tells_what_was_measured(tmp_path: Path) -> None:
    with soaking(tmp_path, "--seconds", "600") as run:
        children = psutil.Process(run.pid).children(recursive=True)
        assert len(children) >= 5
        run.send_signal(signal.SIGINT)
        out, _ = run.communicate(timeout=30)
        assert run.returncode == 130
        assert psutil.wait_procs(children, timeout=5)[1] == []
    whole = json.loads(out)
    assert (whole["verdict"]["interrupted"], whole["verdict"]["ok"], whole["faults"]) == (True, False, [])
    assert whole["totals"]["bytes_checked"] > 0
    assert whole["samples"]
    assert whole["final"] is None
    assert checks(whole)["every lease back"] == (None, "the run did not come to its end")
    assert not list(tmp_path.glob("rtq-*"))


@pytest.mark.timeout(120)
def test_an_end_that_dies_fails_the_run_at_once(tmp_path: Path) -> None:
    with soaking(tmp_path, "--seconds", "600", "--consumers", "1") as run:
        children = psutil.Process(run.pid).children(recursive=True)
        [consumer] = [child for child in children if "consumer0" in child.cmdline()]
        consumer.kill()
        out, err = run.communicate(timeout=30)
        assert run.returncode == 1
        assert psutil.wait_procs(children, timeout=5)[1] == []
    whole = json.loads(out)
    assert whole["faults"][0].startswith("consumer0 ended with exit status -9")
    assert checks(whole)["errors"][0] is False
    [logs] = tmp_path.glob("rtq-soak-*")
    assert f"the logs of the processes are in {logs}" in err
    assert (logs / "producer.log").exists()
