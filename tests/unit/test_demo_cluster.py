"""Mistakes and leftovers around the demo's Ray, without starting one."""

import os
import subprocess
import sys

import msgspec
import pytest

from relax_tq_rdma import StartError
from relax_tq_rdma.demo import cluster
from relax_tq_rdma.transport.process import ProcessId, own_id


def test_a_full_shm_is_a_sentence():
    cluster._require_shm(1 << 30)
    with pytest.raises(StartError, match=r"/dev/shm has 12 MiB free, the local Ray needs 160 MiB: .*--shm-size"):
        cluster._require_shm(12 << 20)


def leave(parent, owner):
    folder = parent / f"rtq-ray-{owner.pid}-{owner.start_ticks}"
    (folder / "session").mkdir(parents=True)
    (folder / "owner.json").write_bytes(msgspec.json.encode(owner))
    return folder


def test_only_folders_of_dead_runs_of_this_boot_are_swept(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    dead = ProcessId.of(ended.pid)
    ended.communicate(b"\n", timeout=30)
    mine = own_id()
    elsewhere = msgspec.structs.replace(dead, boot="another boot", start_ticks=1)
    reused = ProcessId(pid=os.getpid(), start_ticks=mine.start_ticks - 1, boot=mine.boot)
    folders = [leave(tmp_path, owner) for owner in (dead, reused, mine, elsewhere)]
    unmarked = tmp_path / "rtq-ray-1-1"
    unmarked.mkdir()
    cluster._sweep(tmp_path)
    assert [folder.exists() for folder in folders] == [False, False, True, True]
    assert unmarked.exists()


def test_a_folder_leaves_room_for_rays_sockets(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster.tempfile, "tempdir", str(tmp_path / ("x" * 40)))
    folder = cluster._make_folder(tmp_path)
    longest = "/session_2025-11-29_12-47-02_123456_4194304/sockets/plasma_store"
    name = f"rtq-ray-{1 << 22}-{10**8}"
    assert len(str(cluster._short_tempdir() / name)) + len(longest) < 107
    assert folder.stat().st_mode & 0o777 == 0o700
    with pytest.raises(StartError, match="File exists"):
        cluster._make_folder(tmp_path)
