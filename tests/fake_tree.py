"""Made-up ``/sys``, ``/proc`` and ``/dev`` trees: real files below any folder, laid out as the kernel does.

``healthy(tmp_path)`` is a node with one good RoCE device, no locked-memory limit and plenty of memory; the methods of
:class:`FakeTree` add devices or break one thing. Point a node at it with ``RTQ_SYSTEM_ROOT``.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

GIB = 2**30
ZERO = "0000:0000:0000:0000:0000:0000:0000:0000"
V1, V2 = "IB/RoCE v1", "RoCE v2"

Gid = tuple[str, str, str]
"""One GID entry: address (any IPv6 form), type, network interface."""


def roce_gids(ip: str, netdev: str) -> dict[int, Gid]:
    """What a configured RoCE port really shows: link-local and mapped IPv4, each as v1 and v2."""
    return {
        0: ("fe80::0200:00ff:fe00:0001", V1, netdev),
        1: ("fe80::0200:00ff:fe00:0001", V2, netdev),
        2: (f"::ffff:{ip}", V1, netdev),
        3: (f"::ffff:{ip}", V2, netdev),
    }


class FakeTree:
    """A tree below ``root``. Paths given to its methods are relative to it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)

    # --- plain files ---

    def write(self, path: str, text: str | bytes) -> Path:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text if isinstance(text, bytes) else f"{text}\n".encode())
        return target

    def link(self, path: str, target: str) -> Path:
        link = self.root / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)
        return link

    def remove(self, path: str) -> None:
        target = self.root / path
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        else:
            target.unlink()

    # --- RDMA ---

    def hca(
        self,
        name: str = "mlx5_0",
        *,
        ip: str = "10.0.0.1",
        gids: Mapping[int, Gid] | None = None,
        netdev: str | None = None,
        state: str = "4: ACTIVE",
        link_layer: str | None = "Ethernet",
        pkeys: tuple[str, ...] = ("0xffff",),
        numa_node: str | None = "0",
        port: int = 1,
        verbs_node: bool = True,
        pci: bool = True,
    ) -> FakeTree:
        """Add a device, or one more port of it. ``pci=False``: a virtual device such as soft-RoCE."""
        netdev = netdev if netdev is not None else f"eth{name.rpartition('_')[2]}"
        parent = f"sys/devices/pci0000:00/{name}" if pci else "sys/devices/virtual"
        base = f"{parent}/infiniband/{name}"
        if not (self.root / base).exists():
            (self.root / base).mkdir(parents=True)
            self.link(f"sys/class/infiniband/{name}", f"../../../{base}")
            if pci:
                self.link(f"{base}/device", "../..")
                if numa_node is not None:
                    self.write(f"{parent}/numa_node", numa_node)
            self._verbs(name, verbs_node)
        at = f"{base}/ports/{port}"
        self.write(f"{at}/state", state)
        if link_layer is not None:
            self.write(f"{at}/link_layer", link_layer)
        for index, key in enumerate(pkeys):
            self.write(f"{at}/pkeys/{index}", key)
        table = roce_gids(ip, netdev) if gids is None else gids
        for index in range(max(table, default=-1) + 3):  # the kernel's table goes on with zeros
            address, kind, interface = table.get(index, (ZERO, "", ""))
            self.write(f"{at}/gids/{index}", address)
            self.write(f"{at}/gid_attrs/types/{index}", kind)
            self.write(f"{at}/gid_attrs/ndevs/{index}", interface)
        return self

    def _verbs(self, name: str, with_node: bool) -> None:
        number = len(list((self.root / "sys/class/infiniband_verbs").glob("uverbs*")))
        self.write(f"sys/class/infiniband_verbs/uverbs{number}/ibdev", name)
        if with_node:
            self.write(f"dev/infiniband/uverbs{number}", b"")

    def netdevs(self, *names: str) -> FakeTree:
        """Network interfaces of this namespace."""
        for name in names:
            self.write(f"sys/class/net/{name}/operstate", "up")
        return self

    def port_file(self, device: str, path: str, port: int = 1) -> str:
        """Path of a file of a device's port, for :meth:`write` and :meth:`remove`."""
        return f"sys/class/infiniband/{device}/ports/{port}/{path}"

    # --- one thing broken ---

    def without_rdma(self) -> FakeTree:
        for path in ("sys/class/infiniband", "sys/class/infiniband_verbs", "dev/infiniband"):
            if (self.root / path).exists():
                self.remove(path)
        return self

    def port_state(self, state: str, device: str = "mlx5_0") -> FakeTree:
        self.write(self.port_file(device, "state"), state)
        return self

    def zero_gids(self, device: str = "mlx5_0") -> FakeTree:
        for entry in (self.root / self.port_file(device, "gids")).iterdir():
            entry.write_text(f"{ZERO}\n")
        return self

    def memlock(self, limit: int | str, *, ipc_lock: bool = False) -> FakeTree:
        """Soft and hard limit in bytes or ``unlimited``; ``ipc_lock``: the capability is effective."""
        self.write(
            "proc/self/limits",
            "Limit                     Soft Limit           Hard Limit           Units     \n"
            "Max processes             95846                95846                processes \n"
            f"Max locked memory         {limit!s:<20} {limit!s:<20} bytes     ",
        )
        self.write("proc/self/status", f"Name:\tpython\nCapEff:\t{(1 << 14) if ipc_lock else 0:016x}")
        return self

    def memory(self, available: int) -> FakeTree:
        """``MemAvailable`` in bytes."""
        self.write("proc/meminfo", f"MemTotal:       {available // 512} kB\nMemAvailable:   {available // 1024} kB")
        return self

    def shm(self) -> FakeTree:
        (self.root / "dev/shm").mkdir(parents=True, exist_ok=True)
        return self

    def gpus(self, count: int, *, peermem: bool = True, open_module: bool = False, kernel: str = "6.1.0") -> FakeTree:
        for index in range(count):
            self.write(f"proc/driver/nvidia/gpus/0000:0{index}:00.0/information", "Model: NVIDIA")
        kind = "Open Kernel Module" if open_module else "Kernel Module"
        self.write("proc/driver/nvidia/version", f"NVRM version: NVIDIA UNIX {kind} for x86_64  570.86.15")
        self.write("proc/sys/kernel/osrelease", kernel)
        self.write("proc/modules", "nvidia_peermem 16384 0 - Live 0x0" if peermem else "nvidia 56000000 2 - Live 0x0")
        return self


def healthy(root: Path, *, device: str = "mlx5_0", ip: str = "10.0.0.1") -> FakeTree:
    """A node that can do RDMA."""
    return FakeTree(root).hca(device, ip=ip).memlock("unlimited").memory(512 * GIB).shm()


def as_nobody(call: Callable[[], Any]) -> Any:
    """Result of ``call`` in a child that is not root (root opens files of any mode), passed back as JSON.

    A fork, not a new interpreter: the interpreter itself may lie in a folder of root's.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            os.write(writer, json.dumps(call()).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with open(reader, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the child failed with status {status}"
    return json.loads(answer)


@contextmanager
def public_folder() -> Iterator[Path]:
    """A temporary folder every user may enter; pytest's own are private."""
    with tempfile.TemporaryDirectory(prefix="rtq-tree-", dir="/tmp") as name:
        os.chmod(name, 0o755)
        yield Path(name)
