"""libibverbs asked in a child: a stand-in library with the real binary interface, a broken one, one that hangs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from relax_tq_rdma.transport.verbs import VerbsDevice, query_verbs

# The layout is that of rdma-core: in struct ibv_device_attr (232 bytes) max_mr_size lies at offset 80.
STAND_IN = r"""
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>
static char first[] = "mlx5_0", second[] = "mlx5_1";
static void *list[] = {first, second, 0};
void **ibv_get_device_list(int *count) { HANG *count = 2; return list; }
const char *ibv_get_device_name(void *device) { return device; }
void *ibv_open_device(void *device) { if (device == second) { errno = ENOMEM; return 0; } return device; }
int ibv_close_device(void *context) { return 0; }
int ibv_query_device(void *context, char *attributes) {
  uint64_t limit = 1ull << 31;
  memset(attributes, 0xff, 232);
  memcpy(attributes + 80, &limit, 8);
  return 0;
}
"""


def build(folder: Path, hang: str = "") -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build the stand-in library with")
    source = folder / "stand_in.c"
    source.write_text(STAND_IN.replace("HANG", hang))
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", str(folder / "libibverbs.so.1"), str(source)],
        check=True,
        capture_output=True,
        timeout=60,
    )


def test_devices_open_or_say_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    facts = query_verbs(30)
    assert facts.problem == ""
    assert facts.devices == {
        "mlx5_0": VerbsDevice(max_mr_bytes=2**31),
        "mlx5_1": VerbsDevice(problem="Cannot allocate memory"),
    }


def test_a_library_that_hangs_or_crashes_takes_only_the_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path, hang="sleep(60);")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert query_verbs(1).problem == "libibverbs did not answer within 1 s"
    build(tmp_path, hang="*(volatile int *)0 = 1;")
    assert "ended the child with code -11" in query_verbs(30).problem


def test_a_broken_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libibverbs.so.1").write_text("not a library")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert "libibverbs.so.1" in query_verbs(30).problem


def test_this_machine() -> None:
    facts = query_verbs(30)
    assert facts.problem == "" or "libibverbs" in facts.problem
