"""Results: the JSON document, and what --compare calls different."""

import json

import pytest

from relax_tq_rdma.demo.job import _agreed_digests
from relax_tq_rdma.demo.mesh import Mesh
from relax_tq_rdma.demo.options import Options
from relax_tq_rdma.demo.output import JobResult, StepRecord, differences, step_line
from relax_tq_rdma.demo.rollout import Produced
from relax_tq_rdma.demo.trainer import Trained
from relax_tq_rdma.errors import TransferError
from relax_tq_rdma.summary import UNTOUCHED


def record(step, digest="00"):
    return StepRecord(step, 16, 2_000_000, 500_000, 0.1, 0.2, 0.3, 0.4, digest, 0.5)


def result(losses=(0.1, 0.2), digests=("aa", "bb"), total="cc"):
    return JobResult("[dataplane] x=y", UNTOUCHED, list(losses), total, [record(i, d) for i, d in enumerate(digests)])


def test_the_document_has_the_promised_fields_and_keeps_every_bit():
    third = 1 / 3
    document = json.loads(json.dumps(result(losses=(third, 0.2)).to_json()))
    assert document["schema"] == "relax-tq-rdma/demo/1"
    assert document["losses"][0] == third
    assert document["decision"]["backend"] == "SimpleStorage"
    assert {"step", "rows", "bytes_total", "bytes_unique", "put_s", "get_s", "fanout_s", "step_s"} <= set(
        document["steps"][0]
    )
    assert {"summary_line", "payload_digest"} <= set(document)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (result(), []),
        (result(losses=(0.1, 0.2000000000000001)), ["loss of step 1: 0.2 against 0.2000000000000001"]),
        (result(digests=("aa", "bc")), ["payload digest of step 1: bb against bc"]),
        (result(total="dd"), ["payload digest: cc against dd"]),
        (result(losses=(0.1,)), ["number of steps: 2 against 1"]),
    ],
)
def test_differences_are_named(other, said):
    assert differences(result().to_json(), other.to_json()) == said


def test_a_step_line_shows_loss_bytes_and_times():
    line = step_line(record(1), 4, -0.125)
    for part in ("step 2/4", "loss -0.125000", "2.0 MB (0.5 unique)", "put 0.10 s", "fan-out 0.30 s"):
        assert part in line


OPTIONS = Options(prompts=2, samples_per_prompt=1, mesh=Mesh(tp=2))


def received(rank, digests):
    return Trained(rank, 0.0, digests, {}, 0.0, 0.0, [])


def produced(step=1):
    return Produced(step, 2, 0, 0, 0.0, 0.0, [])


def test_all_ranks_of_a_cohort_must_hold_the_same_bytes():
    good = {2: b"x", 3: b"y"}
    assert _agreed_digests(OPTIONS, produced(), [received(0, good), received(1, dict(good))]) == good
    with pytest.raises(TransferError, match="step 1: rank 1 received other bytes for sample 3 than its cohort"):
        _agreed_digests(OPTIONS, produced(), [received(0, good), received(1, {2: b"x", 3: b"z"})])


def test_missing_and_doubled_rows_are_found():
    with pytest.raises(TransferError, match="2 rows were put"):
        _agreed_digests(OPTIONS, produced(), [received(0, {2: b"x"}), received(1, {2: b"x"})])
    split = Options(prompts=2, samples_per_prompt=1, mesh=Mesh(dp=2))
    with pytest.raises(TransferError, match="2 rows were put"):
        _agreed_digests(split, produced(), [received(0, {2: b"x"}), received(1, {2: b"x"})])
