"""``relax-tq-rdma bench path`` for real, on the smallest tier; and what a Ctrl-C leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.integration

COMMAND = [sys.executable, "-m", "relax_tq_rdma.cli", "bench", "path"]


@pytest.mark.timeout(300)
def test_one_round_on_the_smallest_tier(tmp_path: Path) -> None:
    cases = ["engine", "mooncake_dict", "mooncake_jagged", "simple_dict", "simple_l2"]
    chosen = [word for case in cases for word in ("--case", case)]
    done = subprocess.run(
        [*COMMAND, "--tier", "1", "--repeats", "1", "--json", "-o", str(tmp_path / "out.json"), *chosen],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    whole = json.loads(done.stdout)
    assert whole == json.loads((tmp_path / "out.json").read_text())
    found = {case["case"]: case for case in whole["cases"]}
    assert list(found) == cases
    assert all(case["put"]["gbs"] > 0 and case["get"]["gbs"] > 0 for case in found.values())
    # What is known of each way: copies, registrations, what is stored, what moves.
    size = found["engine"]["payload_bytes"]
    assert [found["engine"][way][key] for way in ("put", "get") for key in ("copies", "registrations")] == [0] * 4
    assert found["engine"]["get"]["moved_bytes"] == size
    assert found["mooncake_dict"]["put"]["copies"] == pytest.approx(1, abs=0.05)
    assert found["mooncake_dict"]["get"]["registrations"] == 1
    assert found["mooncake_jagged"]["put"]["copies"] == 0
    assert found["mooncake_jagged"]["get"]["copies"] == pytest.approx(1, abs=0.05)
    assert found["simple_l2"]["encoded_rows"] == 64
    assert found["simple_l2"]["get"]["copies"] == 0
    for case in ("mooncake_dict", "simple_dict", "simple_l2"):
        assert found[case]["stored_bytes"] == pytest.approx(size, rel=0.05)
    assert whole["ratios"]["simple_get_vs_upstream_dict"] == pytest.approx(
        found["simple_l2"]["get"]["gbs"] / found["simple_dict"]["get"]["gbs"]
    )
    assert whole["ratios"]["mooncake_get_vs_engine"] is None  # its case was not asked for


@pytest.mark.timeout(180)
def test_a_ctrl_c_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    run = subprocess.Popen(
        [*COMMAND, "--tier", "1", "--case", "engine"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    try:
        assert run.stderr is not None
        while "joining engine" not in run.stderr.readline():
            assert run.poll() is None
        time.sleep(0.5)  # in the middle of it
        children = psutil.Process(run.pid).children(recursive=True)
        assert len(children) >= 6
        run.send_signal(signal.SIGINT)
        assert run.wait(30) == 130
        assert psutil.wait_procs(children, timeout=5)[1] == []
        assert list(tmp_path.glob("rtq-bench-*")) == []
    finally:
        run.kill()
        run.wait()
        assert run.stderr is not None
        run.stderr.close()
