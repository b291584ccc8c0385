"""RDMA devices of a node, on made-up trees: FC-01, FC-03, FC-04, FC-06, FC-10."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_tq_rdma import Settings
from relax_tq_rdma.transport.hca import DeviceRequest, EngineEnv, parse_request
from relax_tq_rdma.transport.rdma_checks import check_rdma
from relax_tq_rdma.transport.report import Check, RdmaDevice
from relax_tq_rdma.transport.sysfs import Tree, natural_key, read_hcas
from relax_tq_rdma.transport.verbs import VerbsDevice, VerbsFacts
from tests.fake_tree import V1, V2, FakeTree, as_nobody, healthy, public_folder

GIB = 2**30


def look(
    tree: FakeTree,
    devices: str | None = "",
    environ: dict[str, str] | None = None,
    region: int = 4 * GIB,
    splits: bool = True,
    verbs: VerbsFacts | None = None,
) -> tuple[Check, Check, Check, list[RdmaDevice]]:
    checks, usable = check_rdma(
        Tree(tree.root),
        parse_request(devices),
        environ or {},
        largest_region=region,
        splits_regions=splits,
        verbs=verbs,
    )
    device, port, gid = checks
    assert [c.name for c in checks] == ["rdma_device", "rdma_port", "rdma_gid"]
    for check in checks:
        assert check.evidence
        follows = check.evidence.startswith("no device passed rdma_")  # the way out is that of the check it names
        assert check.status == "ok" or bool(check.fix) != follows, f"{check.name} has no way out"
    return device, port, gid, list(usable)


def test_a_healthy_device(tmp_path: Path) -> None:
    device, port, gid, usable = look(healthy(tmp_path, ip="10.77.3.20"))
    assert [device.status, port.status, gid.status] == ["ok"] * 3
    (found,) = usable
    assert (found.name, found.port, found.gid_index, found.link_layer) == ("mlx5_0", 1, 3, "Ethernet")
    assert (found.netdev, found.numa_node, found.max_mr_bytes) == ("eth0", 0, None)
    assert "GID 3 (10.77.3.20)" in gid.evidence


# --- FC-01: the index is per device ---


def test_each_device_has_its_own_index(tmp_path: Path) -> None:
    tree = FakeTree(tmp_path).hca("mlx5_0", ip="10.0.0.1")
    tree.hca("mlx5_1", gids={0: ("fe80::1", V2, "eth1"), 1: ("::ffff:10.0.0.2", V2, "eth1")})
    *_, usable = look(tree)
    assert {d.name: d.gid_index for d in usable} == {"mlx5_0": 3, "mlx5_1": 1}


def test_interfaces_of_this_namespace_decide(tmp_path: Path) -> None:
    gids = {3: ("::ffff:10.0.0.3", V2, "eth9"), 7: ("::ffff:10.0.0.7", V2, "eth0")}
    tree = FakeTree(tmp_path).hca(gids=gids).netdevs("lo", "eth0")
    *_, usable = look(tree)
    assert usable[0].gid_index == 7


@pytest.mark.parametrize(
    ("gids", "reason"),
    [
        ({0: ("::ffff:169.254.1.2", V2, "eth0")}, "no routable RoCE v2 GID (0: 169.254.1.2 link-local)"),
        ({0: ("::ffff:10.0.0.1", V1, "eth0")}, "not RoCE v2"),
        ({}, "are zero"),
        ({0: ("what is this", V2, "eth0")}, "not a GID"),
    ],
)
def test_no_routable_gid_is_said(tmp_path: Path, gids: dict[int, tuple[str, str, str]], reason: str) -> None:
    device, port, gid, usable = look(FakeTree(tmp_path).hca(gids=gids))
    assert [device.status, port.status, gid.status] == ["ok", "ok", "missing"]
    assert reason in gid.evidence
    assert usable == []


@pytest.mark.parametrize("variable", ["MC_GID_INDEX", "NCCL_IB_GID_INDEX"])
def test_a_bad_index_forced_by_the_environment_is_found(tmp_path: Path, variable: str) -> None:
    *_, gid, usable = look(healthy(tmp_path), environ={variable: "1"})
    assert gid.status == "missing"
    assert "index 3 would be right" in gid.evidence
    assert variable in gid.fix
    assert usable == []


def test_a_variable_that_forces_tcp_is_found(tmp_path: Path) -> None:
    device, *_, usable = look(healthy(tmp_path), environ={"MC_FORCE_TCP": "0"})
    assert device.status == "missing"
    assert "MC_FORCE_TCP is set" in device.evidence
    assert usable == []


def test_the_environment_is_read_as_the_engine_reads_it() -> None:
    assert EngineEnv.read({}) == EngineEnv(port=1, pkey_index=0, gid_index=None)
    assert EngineEnv.read({"MC_GID_INDEX": ""}).gid_index == 0  # atoi("") is 0: the engine takes index 0
    assert EngineEnv.read({"NCCL_IB_GID_INDEX": "-1"}).gid_index is None
    both = EngineEnv.read({"MC_GID_INDEX": "3", "NCCL_IB_GID_INDEX": "5"})
    assert (both.gid_index, both.gid_variable) == (3, "MC_GID_INDEX")
    assert EngineEnv.read({"MC_IB_PORT": "2", "MC_PKEY_INDEX": "999999"}) == EngineEnv(port=2)


# --- FC-03: the verbs node ---


def test_a_device_without_its_verbs_node_does_not_count(tmp_path: Path) -> None:
    device, port, gid, usable = look(FakeTree(tmp_path).hca(verbs_node=False))
    assert [device.status, port.status, gid.status] == ["missing"] * 3
    assert "/dev/infiniband/uverbs0 is missing" in device.evidence
    assert "--device=/dev/infiniband" in device.fix
    assert usable == []


def test_a_device_without_verbs_class_entry_does_not_count(tmp_path: Path) -> None:
    tree = healthy(tmp_path)
    tree.remove("sys/class/infiniband_verbs")
    device, *_ = look(tree)
    assert device.status == "missing"
    assert "ib_uverbs" in device.fix


@pytest.mark.parametrize("mode", [0o000, 0o444], ids=["no access", "read only"])
def test_a_node_this_user_may_not_open_is_not_permitted(mode: int) -> None:
    with public_folder() as folder:
        tree = healthy(folder / "node")
        (folder / "node/dev/infiniband/uverbs0").chmod(mode)

        def status_evidence_fix() -> list[str]:
            device = look(tree)[0]
            return [device.status, device.evidence, device.fix]

        status, evidence, fix = as_nobody(status_evidence_fix)
    assert status == "missing"
    assert "/dev/infiniband/uverbs0 is not permitted" in evidence
    assert "read and write access" in fix


def test_some_of_several_devices_open(tmp_path: Path) -> None:
    tree = FakeTree(tmp_path).hca("mlx5_0").hca("mlx5_1", ip="10.0.0.2", verbs_node=False)
    device, _, _, usable = look(tree)
    assert device.status == "ok"
    assert "mlx5_1: /dev/infiniband/uverbs1 is missing" in device.evidence
    assert [d.name for d in usable] == ["mlx5_0"]


def test_what_libibverbs_says_counts(tmp_path: Path) -> None:
    tree = healthy(tmp_path)
    assert look(tree, verbs=VerbsFacts(devices={"mlx5_0": VerbsDevice(max_mr_bytes=2**40)}))[3][0].max_mr_bytes == 2**40
    no_driver = look(tree, verbs=VerbsFacts())[0]
    assert no_driver.status == "missing"
    assert "ibverbs-providers" in no_driver.fix
    closed = look(tree, verbs=VerbsFacts(devices={"mlx5_0": VerbsDevice(problem="Cannot allocate memory")}))[0]
    assert "Cannot allocate memory" in closed.evidence
    silent = look(tree, verbs=VerbsFacts(problem="libibverbs did not answer within 5 s"))[0]
    assert (silent.status, "did not answer" in silent.evidence) == ("missing", True)


# --- FC-04: devices that must not be used ---


def fabric(root: Path) -> FakeTree:
    tree = FakeTree(root).hca("mlx5_0", ip="10.1.0.1")
    tree.hca("mlx5_1", link_layer="Unknown")
    tree.hca("mlx5_2", pkeys=("0x7fff",))
    tree.hca("mlx5_3", state="1: DOWN")
    return tree.hca("mlx5_10", ip="10.2.0.1")


def test_each_refused_device_has_its_own_reason(tmp_path: Path) -> None:
    device, port, gid, usable = look(fabric(tmp_path))
    assert [d.name for d in usable] == ["mlx5_0", "mlx5_10"]
    assert (device.status, port.status) == ("ok", "ok")
    assert "mlx5_1: link layer Unknown" in port.evidence
    assert "mlx5_2: limited partition key 0x7fff at index 0" in port.evidence
    assert "mlx5_3: port 1 is DOWN" in port.evidence
    assert gid.status == "degraded"


def test_several_subnets_are_said_and_not_claimed_usable_together(tmp_path: Path) -> None:
    *_, gid, _ = look(fabric(tmp_path))
    assert "mlx5_0 in 10.1.0.0/24, mlx5_10 in 10.2.0.0/24" in gid.evidence
    assert "Mooncake would also use mlx5_1, mlx5_2" in gid.evidence  # it skips a DOWN port by itself
    assert gid.fix.endswith("--tq-rdma-device mlx5_0")
    *_, named, usable = look(fabric(tmp_path / "again"), "mlx5_0,mlx5_10")
    assert named.status == "ok"  # the user chose
    assert len(usable) == 2


def test_subnets_come_from_the_routes_when_there_are_any(tmp_path: Path) -> None:
    tree = FakeTree(tmp_path).hca("mlx5_0", ip="10.1.0.1").hca("mlx5_1", ip="10.1.7.1")
    assert look(tree)[2].status == "degraded"
    header = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT"
    wide = "\t0000010A\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0"  # 10.1.0.0/16, little endian
    tree.write("proc/net/route", "\n".join([header, "eth0" + wide, "eth1" + wide, "eth1\tgarbage"]))
    assert look(tree)[2].status == "ok"


def test_natural_order() -> None:
    names = ["mlx5_10", "mlx5_2", "mlx5_bond_0", "mlx5_0", "rxe0", "10", "9a"]
    assert sorted(names, key=natural_key) == ["9a", "10", "mlx5_0", "mlx5_2", "mlx5_10", "mlx5_bond_0", "rxe0"]


@pytest.mark.parametrize(
    ("state", "evidence", "fix"),
    [
        ("1: DOWN", "port 1 is DOWN", "link up"),
        ("2: INIT", "port 1 is INIT", "subnet manager"),
        ("3: ARMED", "port 1 is ARMED", "link up"),
        ("", "unreadable state", "link up"),
        ("\x00\xff garbage", "garbage", "link up"),
    ],
)
def test_ports_that_are_not_active(tmp_path: Path, state: str, evidence: str, fix: str) -> None:
    device, port, gid, usable = look(healthy(tmp_path).port_state(state))
    assert [device.status, port.status, gid.status] == ["ok", "missing", "missing"]
    assert evidence in port.evidence
    assert fix in port.fix
    assert usable == []


def test_the_port_the_engine_opens_is_the_one_judged(tmp_path: Path) -> None:
    tree = FakeTree(tmp_path).hca(state="1: DOWN", port=1).hca(ip="10.0.0.9", port=2)
    _, port, _, usable = look(tree)
    assert port.status == "missing"
    assert "MC_IB_PORT=2" in port.fix
    assert usable == []
    *_, usable = look(tree, environ={"MC_IB_PORT": "2"})
    assert [d.port for d in usable] == [2]
    _, port, *_ = look(tree, environ={"MC_IB_PORT": "3"})
    assert "has no port 3" in port.evidence


def test_full_membership_at_another_index(tmp_path: Path) -> None:
    tree = FakeTree(tmp_path).hca(pkeys=("0x7fff", "0x8005"))
    _, port, *_ = look(tree)
    assert port.fix == "set MC_PKEY_INDEX=1"
    assert look(tree, environ={"MC_PKEY_INDEX": "1"})[1].status == "ok"


def test_native_infiniband(tmp_path: Path) -> None:
    gids = {0: ("fe80::0002:c903:00a1:b2c3", V1, "")}
    *_, gid, usable = look(FakeTree(tmp_path).hca(link_layer="InfiniBand", gids=gids))
    assert gid.status == "ok"
    assert (usable[0].link_layer, usable[0].gid_index) == ("InfiniBand", 0)


def test_infiniband_rails_of_two_fabrics(tmp_path: Path) -> None:
    tree = FakeTree(tmp_path)
    tree.hca("mlx5_0", link_layer="InfiniBand", gids={0: ("fec0:0:0:1::1", V1, "")})
    tree.hca("mlx5_1", link_layer="InfiniBand", gids={0: ("fec0:0:0:2::2", V1, "")})
    *_, gid, _ = look(tree)
    assert gid.status == "degraded"
    assert "mlx5_0 in fec0:0:0:1::/64, mlx5_1 in fec0:0:0:2::/64" in gid.evidence


# --- FC-06: device names ---


@pytest.mark.parametrize(
    ("text", "requests"),
    [
        ("mlx5_0, mlx5_1", ["mlx5_0", "mlx5_1"]),
        (" mlx5_0,", ["mlx5_0"]),
        ("mlx5_0:1", ["mlx5_0:1"]),
        ("mlx5_0,mlx5_0", ["mlx5_0"]),
        ("mlx5_0, mlx5_0:1", ["mlx5_0:1"]),
        ("", []),
        (" , ", []),
        (None, []),
        (":1", [":1"]),
    ],
)
def test_requests_are_trimmed_and_deduplicated(text: str | None, requests: list[str]) -> None:
    assert [str(r) for r in parse_request(text)] == requests
    names = tuple(r.name for r in parse_request(text))
    assert Settings(rdma_device=text or "").rdma_devices == names, "the engine gets the same names, without ports"


@pytest.mark.parametrize(
    ("text", "evidence", "fix"),
    [
        ("ports", "ports: does not exist on this node", "use one of: mlx5_0, mlx5_1"),
        ("MLX5_0", "MLX5_0: does not exist", "did you mean mlx5_0?"),
        ("mlx5_01", "does not exist", "did you mean mlx5_"),
        ("eth1", "eth1: is a network interface, not an RDMA device", "use --tq-rdma-device mlx5_1"),
        ("eth5", "eth5: is a network interface without an RDMA device", "use one of"),
        ("../../etc", "does not exist", "use one of"),
        ("mlx5_0,mlx5_7", "opens: mlx5_0; mlx5_7: does not exist", "did you mean"),
    ],
)
def test_names_are_proved_before_the_engine_sees_them(tmp_path: Path, text: str, evidence: str, fix: str) -> None:
    tree = FakeTree(tmp_path).hca("mlx5_0").hca("mlx5_1", ip="10.0.0.2").netdevs("eth0", "eth1", "eth5")
    device, *_ = look(tree, text)
    assert device.status == "missing"
    assert evidence in device.evidence
    assert fix in device.fix


def test_a_port_suffix(tmp_path: Path) -> None:
    tree = healthy(tmp_path)
    *_, usable = look(tree, "mlx5_0:1")
    assert [d.name for d in usable] == ["mlx5_0"]
    _, port, *_ = look(tree, "mlx5_0:2")
    assert port.status == "missing"
    assert port.fix == "set MC_IB_PORT=2 on every node"


def test_named_devices_must_all_pass(tmp_path: Path) -> None:
    tree = fabric(tmp_path)
    device, port, *_ = look(tree, "mlx5_0,mlx5_3")
    assert (device.status, port.status) == ("ok", "missing")
    assert "mlx5_3: port 1 is DOWN" in port.evidence
    assert look(tree, "mlx5_0")[2].status == "ok"
    assert DeviceRequest("mlx5_0", 1) == parse_request("mlx5_0:1")[0]


# --- FC-10: virtual devices, NUMA, region limits ---


def test_a_virtual_device_without_pci_path(tmp_path: Path) -> None:
    gids = {0: ("fe80::1", V2, "v0"), 1: ("::ffff:10.0.0.1", V2, "v0")}
    tree = FakeTree(tmp_path).hca("rxe0", gids=gids, netdev="v0", pci=False)
    *_, gid, usable = look(tree)
    assert gid.status == "ok"
    assert (usable[0].name, usable[0].gid_index, usable[0].numa_node) == ("rxe0", 1, None)


@pytest.mark.parametrize(("text", "node"), [("-1", None), ("", None), (None, None), ("0", 0), ("1", 1), ("x", None)])
def test_numa_node_unknown_is_never_an_index(tmp_path: Path, text: str | None, node: int | None) -> None:
    *_, usable = look(FakeTree(tmp_path).hca(numa_node=text))
    assert usable[0].numa_node == node


def test_a_region_above_the_devices_limit(tmp_path: Path) -> None:
    tree = healthy(tmp_path)
    tree.write("sys/class/infiniband/mlx5_0/max_mr_size", str(2 * GIB))
    split, *_, usable = look(tree, region=3 * GIB, splits=True)
    assert usable[0].max_mr_bytes == 2 * GIB
    assert split.status == "degraded"
    assert "region of 3 GiB is above max_mr_size 2 GiB of mlx5_0" in split.evidence
    assert split.fix == "keep RTQ_SEGMENT_MB, and RTQ_LOCAL_BUFFER_MB plus --tq-host-staging-mb, at 2048 or less"
    assert look(tree, region=3 * GIB, splits=False)[0].status == "missing"
    assert look(tree, region=2 * GIB, splits=False)[0].status == "ok"


# --- broken trees ---


def test_no_devices_at_all(tmp_path: Path) -> None:
    device, port, gid, usable = look(FakeTree(tmp_path))
    assert [device.status, port.status, gid.status] == ["missing"] * 3
    assert "does not exist" in device.evidence
    (tmp_path / "sys/class/infiniband").mkdir(parents=True)
    assert "is empty" in look(FakeTree(tmp_path))[0].evidence
    named = look(FakeTree(tmp_path), "mlx5_0")[0]
    assert "mlx5_0: does not exist on this node" in named.evidence
    assert usable == []


def test_a_dangling_entry_is_evidence_not_a_crash(tmp_path: Path) -> None:
    tree = healthy(tmp_path)
    tree.link("sys/class/infiniband/mlx5_9", "../../devices/gone/infiniband/mlx5_9")
    tree.write("sys/class/infiniband_verbs/uverbs9/ibdev", "mlx5_9")
    tree.write("dev/infiniband/uverbs9", b"")
    _, port, _, usable = look(tree)
    assert "mlx5_9: has no port 1" in port.evidence
    assert [d.name for d in usable] == ["mlx5_0"]


def test_a_file_where_a_folder_should_be_and_the_reverse(tmp_path: Path) -> None:
    tree = healthy(tmp_path)
    tree.write("sys/class/infiniband/not_a_device", "x")
    state = tree.port_file("mlx5_0", "state")
    tree.remove(state)
    (tmp_path / state).mkdir()
    _, port, _, usable = look(tree)
    assert "mlx5_0: port 1 is in an unreadable state" in port.evidence
    assert usable == []


def test_missing_attributes_of_an_old_driver(tmp_path: Path) -> None:
    tree = FakeTree(tmp_path).hca(link_layer=None, pkeys=())
    *_, usable = look(tree)
    assert [d.link_layer for d in usable] == ["Ethernet"]  # settled by its RoCE v2 entries
    tree.remove(tree.port_file("mlx5_0", "gid_attrs"))
    _, port, *_ = look(tree)
    assert "link layer unreadable" in port.evidence


def test_a_large_gid_table_is_read_quickly(tmp_path: Path) -> None:
    tree = FakeTree(tmp_path)
    for number in range(8):
        tree.hca(f"mlx5_{number}", gids={250: (f"::ffff:10.0.0.{number + 1}", V2, "eth0")})
    hcas = read_hcas(Tree(tmp_path))
    assert [len(h.ports[0].gids) for h in hcas] == [253] * 8
    assert look(tree)[2].status == "ok"
