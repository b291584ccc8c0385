"""L4 on a cohort of four gloo ranks of the stand-in host: the same bytes as by broadcast, and never a split."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.host_jobs import STANDIN

pytestmark = [pytest.mark.host, pytest.mark.timeout(330)]

INTERLEAVINGS = {"mid": 1000, "new": 100}
"""Batches of four ranks that poll a slow producer at random moments. The newer line brings an agreement of its own."""

SHAPES, PATHS = ("2x1x2", "2x2x1"), ("batch", "stream")


@pytest.fixture(scope="module", params=["mid", "new"])
def cohort(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Line of the host, and the document of ``tests/fanout_cohort.py``."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.fanout_cohort", str(INTERLEAVINGS[request.param])],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(STANDIN), os.getcwd(), os.environ["PYTHONPATH"]]),
            "STANDIN_LINE": request.param,
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    document = json.loads(done.stdout.splitlines()[-1])
    assert sorted(document["ranks"]) == ["0", "1", "2"], done.stderr[-3000:]  # the last one ends by dying
    return request.param, document


def results(document: dict[str, Any], scenario: str) -> list[Any]:
    """Of ranks 0, 1 and 2."""
    return [document["ranks"][rank][scenario] for rank in sorted(document["ranks"])]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_rank_gets_the_bytes_that_a_broadcast_brings(cohort: Any, shape: str, path: str) -> None:
    line, document = cohort
    broadcast = results(document, f"{shape} {path} broadcast")
    per_rank = results(document, f"{shape} {path} per rank")
    batches = INTERLEAVINGS[line] // 4
    assert len({tuple(result["digests"]) for result in broadcast}) == 1
    assert len({tuple(result["digests"]) for result in per_rank}) == 1
    assert len(set(per_rank[0]["digests"])) == batches
    assert per_rank[0]["digests"][:10] == broadcast[0]["digests"]


def test_the_host_s_loader_fetches_per_rank_too(cohort: Any) -> None:
    """``create_stream_dataloader``: TransferQueue's own loader over the host's fetch."""
    _, document = cohort
    (known, *_) = results(document, "2x1x2 stream broadcast")
    assert results(document, "loader") == [known["digests"][:3]] * 3


def test_a_producer_slower_than_its_consumers_never_splits_the_cohort(cohort: Any) -> None:
    line, document = cohort
    scenarios = [f"{shape} {path} per rank" for shape in SHAPES for path in PATHS]
    assert [sum(result["splits"] for result in results(document, name)) for name in scenarios] == [0] * 4
    contested = sum(document["contested"][f"{shape} {path} p"] for shape in SHAPES for path in PATHS)
    assert contested > INTERLEAVINGS[line] / 5, "hardly any rank was told less than another: this run proves nothing"


def test_the_older_line_is_split_without_the_plugin(cohort: Any) -> None:
    """So the test above can fail."""
    line, document = cohort
    splits = {result["splits"] for result in results(document, "without the plugin")}
    assert document["contested"]["host"] > 10
    assert splits == {0} if line == "new" else min(splits) > 10


def test_ranks_agree_on_what_kind_of_nothing_it_is(cohort: Any) -> None:
    line, document = cohort
    asked = [result[0] for result in results(document, "kinds")]
    acted_on = [result[1] for result in results(document, "kinds")]
    assert asked == [1, 2, 1]
    assert acted_on == [{"dummy_round": True} if line == "new" else None] * 3


def test_one_failure_ends_the_fetch_of_all(cohort: Any) -> None:
    _, document = cohort
    said = results(document, "failures")
    asking = (
        "TransferError: another rank of this cohort failed to ask for partition failing ask: "
        "OSError: storage is gone for rank 1"
    )
    getting = (
        "TransferError: another rank of this cohort failed to get rows of partition failing get: "
        "OSError: storage is gone for rank 2"
    )
    assert [one["ask"] for one in said] == [asking, "OSError: storage is gone for rank 1", asking]
    assert [one["get"] for one in said] == [getting, getting, "OSError: storage is gone for rank 2"]


def test_a_rank_that_dies_in_its_fetch_leaves_nobody_waiting(cohort: Any) -> None:
    _, document = cohort
    for said in results(document, "a rank died"):
        assert said.startswith("RuntimeError: ")
        assert "peer" in said


def test_both_modes_are_timed(cohort: Any) -> None:
    """Per rank on every rank; by broadcast on those that fetch: rank 0, and rank 2 where stages stream alone."""
    line, document = cohort
    first, second, third = results(document, "fanout_seconds")
    per_rank = INTERLEAVINGS[line] // 4 * 4 + 3
    assert first == {"rank0": 40, "per_rank": per_rank}
    assert second == {"per_rank": per_rank}
    assert third == {"rank0": 10, "per_rank": per_rank}
