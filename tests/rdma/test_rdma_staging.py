"""L5 on real verbs: no registration after the first step, and no byte of a reader changes under it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.rdma.jobs import CALL_SECONDS, MIB, Job


def spec(seed: int) -> dict[str, Any]:
    return {"kind": "tier", "mib": 4, "rows": 4, "seed": seed}


@pytest.fixture(scope="module")
def warm(rdma_job: Job) -> Job:
    """The job after one step, its registrations counted from here on."""
    assert rdma_job.move("warm up", spec(100))["wrong"] == []
    for member in (rdma_job.producer, rdma_job.consumer):
        member.call("count_registrations", CALL_SECONDS)
    return rdma_job


def test_steps_register_nothing(warm: Job) -> None:
    for step in range(3):
        assert warm.move(f"step {step}", spec(step))["wrong"] == []
        warm.producer.call("clear", CALL_SECONDS, partition=f"step {step}")
    for member in (warm.producer, warm.consumer):
        assert member.call("registered", CALL_SECONDS) == 0
        counts = member.call("staging", CALL_SECONDS)
        assert (counts["misses"], counts["retired"]) == (0, 0)
    assert warm.consumer.call("staging", CALL_SECONDS)["rungs"]["get lend"] >= 3 * 4


def test_what_a_reader_holds_is_never_written_again(warm: Job) -> None:
    consumer = warm.consumer
    assert warm.move("held", spec(7), keep="held")["wrong"] == []
    assert consumer.call("poison_spare_memory", CALL_SECONDS) >= 16 * MIB
    assert consumer.call("check_kept", CALL_SECONDS, keep="held", spec=spec(7)) == []
    assert warm.move("next", spec(8), keep="next")["wrong"] == []  # read into memory full of poison
    assert consumer.call("check_kept", CALL_SECONDS, keep="held", spec=spec(7)) == []
    consumer.call("drop_kept", CALL_SECONDS, keep="held")
    consumer.call("poison_spare_memory", CALL_SECONDS)
    assert consumer.call("check_kept", CALL_SECONDS, keep="next", spec=spec(8)) == []
    assert warm.move("last", spec(9))["wrong"] == []  # into what was held and poisoned
    consumer.call("drop_kept", CALL_SECONDS, keep="next")
    assert consumer.call("staging", CALL_SECONDS)["held"] == 0
