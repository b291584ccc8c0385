"""Real Mooncake processes for tests: a master with flags of the test's choice, and a process that holds data."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relax_tq_rdma.section import KEY, JobSection
from relax_tq_rdma.settings import Settings
from relax_tq_rdma.transport.master import master_binary
from relax_tq_rdma.transport.report import Decision

HOLDER = """
import sys, ctypes
from mooncake.store import MooncakeDistributedStore
master, key, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 32 << 20, 16 << 20, "tcp", "", master) == 0
memory = (ctypes.c_char * size)(*(b"\\x07" * size))
assert store.register_buffer(ctypes.addressof(memory), size) == 0
assert store.batch_upsert_from([key], [ctypes.addressof(memory)], [size]) == [0]
print("ready", flush=True)
sys.stdin.readline()
store.close()
"""


class MooncakeMaster:
    """A master on loopback. ``binary``: by default the installed wheel's; ``flags``: more, such as ``client_ttl=2``."""

    def __init__(self, log: Path, *, binary: Path | None = None, **flags: Any) -> None:
        self.rpc_port, self.metrics_port = _free_port(), _free_port()
        chosen = {
            "rpc_address": "127.0.0.1",
            "rpc_port": self.rpc_port,
            "metrics_port": self.metrics_port,
            "metrics_host": "127.0.0.1",
            "default_kv_lease_ttl": 999999,
            "eviction_high_watermark_ratio": 1.0,
            "eviction_ratio": 0.0,
            **flags,
        }
        command = [str(binary or master_binary()), *(f"--{name}={value}" for name, value in chosen.items())]
        with open(log, "ab") as out:
            self.process = subprocess.Popen([*command, "--undefok=metrics_host"], stdout=out, stderr=out)
        deadline = time.monotonic() + 20
        while not self.page("/health"):
            assert self.process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, "mooncake_master was not ready within 20 s"
            time.sleep(0.05)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.rpc_port}"

    def page(self, path: str) -> str:
        """A page of the metrics server; empty when it does not answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}{path}", timeout=2) as answer:
                return str(answer.read().decode())
        except (urllib.error.URLError, OSError):
            return ""

    def segments(self) -> list[str]:
        return self.page("/get_all_segments").split()

    def allocated(self) -> int:
        """Bytes of all values."""
        lines = self.page("/metrics").splitlines()
        return next(int(float(line.split()[-1])) for line in lines if line.startswith("master_allocated_bytes "))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Holder:
    """A process that holds ``size`` bytes of 7 under ``key`` in a segment of its own."""

    def __init__(self, master: MooncakeMaster, key: str, size: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, master.address, key, str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "MC_STORE_MEMCPY": "0"},
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def backend_config(
    master: str, *, job: str = "job1", settings: Mapping[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """``backend.MooncakeStore`` of a running job, as its processes get it."""
    section = JobSection(
        job=job,
        settings=Settings(storage_backend="mooncake", mooncake_master_address=master, **(settings or {})),
        decision=Decision(backend="MooncakeStore", protocol="tcp"),
        plugin_version="0",
        master=master,
    )
    return {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": master,
        "local_hostname": "127.0.0.1",
        "local_buffer_size": 16 << 20,
        "hard_pin": True,
        KEY: section.to_dict(),
        **more,
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
