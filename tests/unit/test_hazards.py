import logging
import os
import sys

import pytest

from relax_tq_rdma.errors import StartError, TransferError
from relax_tq_rdma.transport import hazards
from relax_tq_rdma.transport.process import module_environment
from relax_tq_rdma.transport.report import RdmaDevice

BAD = "0.3.10.post2"
GOOD = "0.3.13.post1"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in (hazards.LOG_LEVEL, hazards.MEMCPY, hazards.GID_INDEX, "NCCL_IB_GID_INDEX"):
        # Set first: what a guard sets later is then taken back at the end.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def device(name, gid_index):
    return RdmaDevice(name=name, port=1, gid_index=gid_index, gid="::ffff:10.0.0.1", link_layer="Ethernet")


@pytest.mark.parametrize(
    ("version", "hazardous"),
    [
        ("0.3.9", True),
        ("0.3.10", True),
        (BAD, True),
        ("0.3.11", False),
        ("0.3.11.post1", False),
        (GOOD, False),
        ("0.4", False),
        ("1.0.0", False),
        ("v0.3.13", False),
        ("", True),
        ("unknown", True),
    ],
)
def test_versions_before_0_3_11_and_unreadable_ones_are_bad(version, hazardous):
    assert hazards.memcpy_is_hazardous(version) is hazardous


@pytest.mark.parametrize("version", [BAD, GOOD, ""])
@pytest.mark.parametrize("value", [None, "0", "false", "OFF", " no "])
def test_memcpy_unset_or_off_becomes_an_explicit_zero(monkeypatch, version, value):
    if value is not None:
        monkeypatch.setenv(hazards.MEMCPY, value)
    hazards.guard_environment(version)
    hazards.guard_environment(version)
    assert os.environ[hazards.MEMCPY] == "0"


@pytest.mark.parametrize("value", ["1", "true", "yes", "", "2", "enabled"])
def test_an_explicit_on_is_refused_on_a_bad_version(monkeypatch, value):
    # Mooncake takes every word it does not know, also the empty one, for "on".
    monkeypatch.setenv(hazards.MEMCPY, value)
    with pytest.raises(StartError, match=r"MC_STORE_MEMCPY=.*0\.3\.10\.post2.*unset MC_STORE_MEMCPY"):
        hazards.guard_environment(BAD)
    assert os.environ[hazards.MEMCPY] == value


def test_an_explicit_on_is_honoured_with_a_note_on_a_later_version(monkeypatch, caplog):
    monkeypatch.setenv(hazards.MEMCPY, "1")
    with caplog.at_level(logging.WARNING):
        hazards.guard_environment(GOOD)
    assert os.environ[hazards.MEMCPY] == "1"
    assert "kept as set by hand" in caplog.text


def test_one_shared_gid_index_is_given_to_mooncake():
    note = hazards.guard_gid_index([device("mlx5_0", 3), device("mlx5_1", 3)])
    assert os.environ[hazards.GID_INDEX] == "3"
    assert "mlx5_0, mlx5_1" in note


def test_different_gid_indexes_are_left_to_mooncake_and_said():
    note = hazards.guard_gid_index([device("mlx5_0", 3), device("mlx5_1", 7)])
    assert hazards.GID_INDEX not in os.environ
    assert "mlx5_0: 3" in note
    assert "mlx5_1: 7" in note


def test_no_device_sets_nothing():
    assert "no device" in hazards.guard_gid_index([])
    assert hazards.GID_INDEX not in os.environ


@pytest.mark.parametrize("name", [hazards.GID_INDEX, "NCCL_IB_GID_INDEX"])
def test_a_gid_index_set_by_hand_stays(monkeypatch, name):
    monkeypatch.setenv(name, "5")
    assert f"{name}=5" in hazards.guard_gid_index([device("mlx5_0", 3)])
    assert os.environ.get(hazards.GID_INDEX, "5") == "5"


def test_the_installed_version_is_read_without_importing_mooncake(monkeypatch, tmp_path):
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    info = tmp_path / "mooncake_transfer_engine_cuda13-9.8.7.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mooncake-transfer-engine-cuda13\nVersion: 9.8.7\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "mooncake"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert hazards.installed_mooncake_version() == "9.8.7"


def test_a_client_is_refused_in_a_forked_child():
    hazards.check_same_process(os.getpid(), "the Mooncake client")
    read, write = os.pipe()
    pid, parent = os.fork(), os.getpid()
    if pid == 0:
        try:
            hazards.check_same_process(os.getppid(), "the Mooncake client")
            os.write(write, b"used")
        except TransferError as exc:
            os.write(write, str(exc).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    told = os.read(read, 4096).decode()
    assert f"made in process {parent}" in told
    assert "spawn" in told


def test_the_native_log_is_quiet_in_the_job_and_whole_in_its_children(monkeypatch):
    hazards.quiet_native_log()
    assert os.environ[hazards.LOG_LEVEL] == "ERROR"
    assert hazards.LOG_LEVEL not in module_environment()
    monkeypatch.setenv(hazards.LOG_LEVEL, "INFO")
    hazards.quiet_native_log()
    assert os.environ[hazards.LOG_LEVEL] == "INFO"
