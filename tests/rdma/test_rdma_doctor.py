"""``relax-tq-rdma doctor`` on a node with a real RDMA device, and with that device taken away.

It runs before the job that other files share: that job would not survive the loss of its device.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.rdma.jobs import CALL_SECONDS, RDMA
from tests.rdma.nodes import Process

StartProcess = Callable[..., Process]


def test_the_doctor_says_that_a_job_would_run_on_rdma(process: StartProcess) -> None:
    found = process(0).call("doctor", CALL_SECONDS, flags=list(RDMA))
    assert found["code"] == 0
    decision = found["said"]["decision"]
    assert (decision["backend"], decision["protocol"]) == ("MooncakeStore", "rdma")


@pytest.mark.breaks_devices
def test_without_the_device_required_is_refused_and_auto_would_run_on_tcp(process: StartProcess) -> None:
    here = process(0)
    here.call("shell", CALL_SECONDS, command="rdma link delete rxe0")
    try:
        required = here.call("doctor", CALL_SECONDS, flags=list(RDMA))
        assert required["code"] == 1
        assert "required rules out anything less: rdma_device on" in required["said"]["refusal"]
        assert required["said"]["decision"]["backend"] is None
        auto = here.call("doctor", CALL_SECONDS, flags=[*RDMA, "--tq-rdma-mode", "auto"])
        assert auto["code"] == 0
        assert auto["said"]["decision"]["protocol"] == "tcp"
        assert auto["said"]["decision"]["fallbacks"][0]["check"] == "rdma_device"
    finally:
        here.call("shell", CALL_SECONDS, command="rdma link add rxe0 type rxe netdev data0")
