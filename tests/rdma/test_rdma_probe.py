"""The probe on a real ``/sys/class/infiniband``, healthy and broken in every way a soft-RoCE device can be."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from relax_tq_rdma.settings import Settings
from relax_tq_rdma.transport.probe import ProbeRequest, probe_node
from relax_tq_rdma.transport.report import NodeReport

DEVICE = "rxe0"
ROCE_V2_OF_IPV4 = 1
"""GID index: soft-RoCE has the link-local one at 0 and the one of the IPv4 address after it."""

PROBE_AS_JSON = """
import msgspec, sys
from relax_tq_rdma.settings import Settings
from relax_tq_rdma.transport.probe import ProbeRequest, probe_node
settings = Settings.from_flags(sys.argv[1:])
print(msgspec.json.encode(probe_node(settings, node="here", request=ProbeRequest(limit_seconds=120))).decode())
"""
FLAGS = ["--tq-storage-backend", "mooncake", "--tq-mooncake-auto-init", "job-owned", "--tq-transport", "rdma"]
FLAGS += ["--tq-rdma-mode", "required"]

PATIENT = ProbeRequest(limit_seconds=120)
"""The agent imports at the same time, under emulation."""

breaks_devices = pytest.mark.breaks_devices
guest_only = pytest.mark.guest_only
Shell = Callable[[str], str]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RTQ_SEGMENT_MB", "128")
    monkeypatch.setenv("RTQ_LOCAL_BUFFER_MB", "32")


@pytest.fixture
def shell() -> Shell:
    def run(command: str) -> str:
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    return run


@pytest.fixture
def netdev(shell: Shell) -> Iterator[str]:
    """The network interface of ``rxe0``; afterwards device, link, address and route are as before."""
    name = next(link["netdev"] for link in json.loads(shell("rdma -j link")) if link["ifname"] == DEVICE)
    address = next(
        one["local"]
        for one in json.loads(shell(f"ip -j addr show dev {name}"))[0]["addr_info"]
        if one["family"] == "inet"
    )
    yield name
    shell(f"ip addr replace {address}/24 dev {name}; ip link set {name} up; ip route replace default dev {name}")
    if not Path(f"/sys/class/infiniband/{DEVICE}").exists():
        shell(f"rdma link add {DEVICE} type rxe netdev {name}")
    _await(lambda: "ACTIVE" in Path(f"/sys/class/infiniband/{DEVICE}/ports/1/state").read_text())


def probe(*flags: str) -> NodeReport:
    return probe_node(Settings.from_flags([*FLAGS, *flags]), node="here", request=PATIENT)


def status(report: NodeReport, *names: str) -> list[str]:
    return [report.check(name).status for name in names]  # type: ignore[union-attr]


def test_a_healthy_device_passes_every_check_of_rdma() -> None:
    report = probe()
    asked = [check for check in report.checks if check.status != "skipped"]
    assert {check.name for check in asked} >= {"mooncake", "rdma_device", "rdma_port", "rdma_gid", "memlock", "memory"}
    assert [check for check in asked if check.status != "ok"] == []
    assert report.devices != ()


@breaks_devices
def test_a_link_that_is_down_is_named(netdev: str, shell: Shell) -> None:
    shell(f"ip link set {netdev} down")
    _await(lambda: "DOWN" in Path(f"/sys/class/infiniband/{DEVICE}/ports/1/state").read_text())
    report = probe()
    check = report.check("rdma_port")
    assert check is not None
    assert (check.status, check.evidence) == ("missing", f"{DEVICE}: port 1 is DOWN")
    assert "ip link set" in check.fix
    assert status(report, "rdma_device", "rdma_gid") == ["ok", "missing"]
    assert report.devices == ()


@breaks_devices
def test_a_device_without_a_routable_gid_is_refused(netdev: str, shell: Shell) -> None:
    shell(f"ip addr flush dev {netdev}")
    _await(lambda: set(Path(f"/sys/class/infiniband/{DEVICE}/ports/1/gids/1").read_text().strip()) <= set("0:"))
    report = probe()
    check = report.check("rdma_gid")
    assert check is not None
    assert check.status == "missing"
    assert "no routable RoCE v2 GID" in check.evidence
    assert status(report, "rdma_device", "rdma_port") == ["ok", "ok"]


@breaks_devices
def test_a_removed_device_is_missed(netdev: str, shell: Shell) -> None:
    shell(f"rdma link delete {DEVICE}")
    check = probe().check("rdma_device")
    assert check is not None
    assert (check.status, check.evidence) == ("missing", "no RDMA device: /sys/class/infiniband is empty")


@breaks_devices
def test_of_two_devices_the_named_one_is_taken_and_an_unknown_one_is_refused(netdev: str, shell: Shell) -> None:
    shell(
        "ip link add pair0 type veth peer name pair1; ip addr add 10.79.0.1/24 dev pair0;"
        "ip link set pair0 up; ip link set pair1 up; rdma link add rxe1 type rxe netdev pair0"
    )
    try:
        both = probe()
        assert [device.name for device in both.devices] == [DEVICE, "rxe1"]
        first = both.devices[0]
        assert (first.port, first.gid_index, first.link_layer) == (1, ROCE_V2_OF_IPV4, "Ethernet")
        gid = both.check("rdma_gid")
        assert gid is not None
        assert gid.status == "degraded"  # nothing says that one reaches the other
        assert "different subnets" in gid.evidence
        assert [device.name for device in probe("--tq-rdma-device", "rxe1").devices] == ["rxe1"]
        unknown = probe("--tq-rdma-device", "rxe7").check("rdma_device")
        assert unknown is not None
        assert (unknown.status, unknown.fix) == ("missing", "did you mean rxe1?")
    finally:
        shell("rdma link delete rxe1; ip link delete pair0")


@guest_only
def test_a_low_limit_of_locked_memory_is_seen_and_the_kernel_enforces_it() -> None:
    """Without ``CAP_IPC_LOCK``, as an ordinary user; the limit is the process's own, so it is probed in a child."""
    low = "ulimit -l 1024 && exec setpriv --bounding-set=-ipc_lock --inh-caps=-ipc_lock "

    def limited(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", low + '"$@"', "bash", *command], capture_output=True, text=True, timeout=120
        )

    four_mib = limited("ibv_rc_pingpong", "--ib-dev", DEVICE, "--gid-idx", str(ROCE_V2_OF_IPV4), "--size", str(2**22))
    assert four_mib.returncode == 1
    assert "Couldn't register MR" in four_mib.stderr
    done = limited(sys.executable, "-c", PROBE_AS_JSON, *FLAGS)
    checks = {check["name"]: check for check in json.loads(done.stdout.splitlines()[-1])["checks"]}
    assert checks["memlock"]["status"] == "missing", done.stderr
    assert "limit 1 MiB" in checks["memlock"]["evidence"]
    assert checks["rdma_device"]["status"] == "ok"


@guest_only
def test_gpu_direct_is_reported_as_not_there() -> None:
    gdr = probe("--tq-use-gdr").check("gdr")
    assert gdr is not None
    assert gdr.status == "missing"
    assert gdr.evidence


def _await(condition: Callable[[], bool], limit: float = 10.0) -> None:
    ends = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.1)
