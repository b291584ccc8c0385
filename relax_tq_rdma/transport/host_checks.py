"""Checks of a node that are not about one RDMA device: limits, memory, /dev/shm, GPUs (FC-05, FC-10, FC-15)."""

from __future__ import annotations

import os
import re
import resource
import tempfile
from collections.abc import Mapping

from relax_tq_rdma import env
from relax_tq_rdma.transport.hazards import MEMCPY, memcpy_is_hazardous
from relax_tq_rdma.transport.memory import MemoryPlan, shown
from relax_tq_rdma.transport.mooncake_facts import MooncakeFacts
from relax_tq_rdma.transport.report import Check
from relax_tq_rdma.transport.sysfs import Tree, describe_os_error

CAP_IPC_LOCK = 14
SHM_FLOOR = 16 * 2**20
"""Below this /dev/shm counts as full: Ray and torch put their control blocks there."""

_MEMLOCK_KNOB = (
    "raise the limit where Ray is started (ulimit -l unlimited; docker --ulimit memlock=-1) or lower "
    f"{env.SEGMENT_MB.name}"
)


def check_memlock(tree: Tree, plan: MemoryPlan) -> Check:
    """This process' own locked-memory limit against what a client pins; every worker asks for itself (FC-05).

    The kernel counts pinned pages per process, so the limit is held against one process; a limit below the node's sum
    is reported as degraded, because some set-ups count per user.
    """
    name, need, total = "memlock", plan.pinned_bytes, plan.reserved_bytes
    if _may_lock_without_limit(tree):
        return Check(name=name, status="ok", evidence=f"CAP_IPC_LOCK is effective: no limit (need {shown(total)})")
    limit, problem = memlock_limit(tree)
    if problem:
        return Check(name=name, status="missing", evidence=f"limit not readable: {problem}", fix=_MEMLOCK_KNOB)
    if limit is None:
        return Check(name=name, status="ok", evidence=f"unlimited (need {shown(total)})")
    parts = f"segment {shown(plan.sizes.segment)}, buffer {shown(plan.sizes.buffer)}"
    if plan.sizes.staging:
        parts += f", staging {shown(plan.sizes.staging)}"
    if limit < need:
        text = f"limit {shown(limit)}, need {shown(need)} a process ({parts}), {shown(total)} for {plan.processes}"
        return Check(name=name, status="missing", evidence=text, fix=_MEMLOCK_KNOB)
    if limit < total:
        text = f"limit {shown(limit)} holds one process ({shown(need)}), not {plan.processes} ({shown(total)})"
        return Check(name=name, status="degraded", evidence=text, fix=_MEMLOCK_KNOB)
    return Check(name=name, status="ok", evidence=f"limit {shown(limit)}, need {shown(total)}")


def pinnable_bytes(tree: Tree) -> int | None:
    """Bytes that this process may register for RDMA; ``None``: no limit, or none that can be read."""
    limit, problem = memlock_limit(tree)
    return None if problem or _may_lock_without_limit(tree) else limit


def memlock_limit(tree: Tree) -> tuple[int | None, str]:
    """The soft limit in bytes (``None``: unlimited) and why it is not known, if so."""
    if tree.is_system:
        soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        return (None if soft == resource.RLIM_INFINITY else soft), ""
    text, problem = tree.read("proc/self/limits")
    if problem:
        return 0, f"/proc/self/limits is {problem}"
    match = re.search(r"^Max locked memory\s+(\S+)", text, re.MULTILINE)
    if match is None or not (match[1] == "unlimited" or match[1].isdigit()):
        return 0, "/proc/self/limits has no line for locked memory"
    return (None if match[1] == "unlimited" else int(match[1])), ""


def _may_lock_without_limit(tree: Tree) -> bool:
    """The capability in its effective set; inside a user namespace the kernel does not honour it for pinning."""
    match = re.search(r"^CapEff:\s*([0-9a-fA-F]+)", tree.text("proc/self/status"), re.MULTILINE)
    if match is None or not int(match[1], 16) >> CAP_IPC_LOCK & 1:
        return False
    mapping = tree.text("proc/self/uid_map").split()
    return not mapping or mapping[:3] == ["0", "0", "4294967295"]


def check_memory(tree: Tree, plan: MemoryPlan) -> Check:
    """Free memory of the node, or of its control group when that is tighter, against the plan."""
    free, where = available_memory(tree)
    lines = f"{plan.processes} processes" + (f", {plan.mounting} with a segment" if plan.sizes.segment else "")
    need = f"need {shown(plan.reserved_bytes)} ({lines})"
    if plan.node_bytes > plan.reserved_bytes:
        need = f"need {shown(plan.reserved_bytes)} and up to {shown(plan.node_bytes)} with what is kept ({lines})"
    if free is None:
        return Check(
            name="memory",
            status="degraded",
            evidence=f"{need}; free memory not measured: {where}",
            fix="make /proc/meminfo readable",
        )
    if free < plan.reserved_bytes:
        fix = f"lower {env.SEGMENT_MB.name}, {env.LOCAL_BUFFER_MB.name} or --tq-host-staging-mb"
        return Check(name="memory", status="missing", evidence=f"{need}, {shown(free)} free in {where}", fix=fix)
    if free < plan.node_bytes:
        fix = f"lower --tq-host-staging-mb, {env.RECYCLED_MB.name} or {env.DEDUP_CACHE_MB.name}"
        return Check(name="memory", status="degraded", evidence=f"{need}, {shown(free)} free in {where}", fix=fix)
    return Check(name="memory", status="ok", evidence=f"{need}, {shown(free)} free")


def available_memory(tree: Tree) -> tuple[int | None, str]:
    """Bytes that can still be used and what limits them; ``None`` and the reason when unknown."""
    text, problem = tree.read("proc/meminfo")
    match = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    if match is None:
        return None, f"/proc/meminfo is {problem}" if problem else "/proc/meminfo has no MemAvailable"
    free = int(match[1]) * 1024
    group = _group_memory(tree)
    return (group, "this container") if group is not None and group < free else (free, "this node")


def _group_memory(tree: Tree) -> int | None:
    """Room left below the tightest memory limit of the control groups this process is in (v2, else v1)."""
    own = {
        fields[1]: fields[2]
        for line in tree.text("proc/self/cgroup").splitlines()
        if len(fields := line.split(":", 2)) == 3
    }
    rooms = _rooms(tree, "sys/fs/cgroup", own.get("", "/"), "memory.max", "memory.current", "inactive_file") or _rooms(
        tree,
        "sys/fs/cgroup/memory",
        own.get("memory", "/"),
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    )
    return min(rooms, default=None)


def _rooms(tree: Tree, base: str, group: str, limit: str, used: str, cache: str) -> list[int]:
    """Free bytes of a group and its parents; page cache can be reclaimed, so it does not count as used."""
    parts = [part for part in group.split("/") if part and part != ".."]
    found = []
    for depth in range(len(parts) + 1):
        folder = "/".join([base, *parts[:depth]])
        top, current = tree.number(folder, limit), tree.number(folder, used)
        if top is not None and current is not None:
            match = re.search(rf"^{cache} (\d+)", tree.text(folder, "memory.stat"), re.MULTILINE)
            found.append(max(0, top - current + (int(match[1]) if match else 0)))
    return found


def check_shm(tree: Tree) -> Check:
    """/dev/shm takes a file and has room."""
    folder = tree.path("dev/shm")
    fix = "mount a larger /dev/shm (docker --shm-size=16g, or an emptyDir with medium Memory)"
    try:
        with tempfile.TemporaryFile(dir=folder, prefix="rtq-probe-") as file:
            file.write(b"\0" * 4096)
            file.flush()
            space = os.fstatvfs(file.fileno())
    except OSError as exc:
        why = "full" if exc.errno == 28 else describe_os_error(exc)
        return Check(name="shm", status="missing", evidence=f"/dev/shm cannot be written: {why}", fix=fix)
    free = space.f_bavail * space.f_frsize
    if free < SHM_FLOOR:
        return Check(name="shm", status="missing", evidence=f"/dev/shm is full ({shown(free)} free)", fix=fix)
    return Check(name="shm", status="ok", evidence=f"/dev/shm writable, {shown(free)} free")


def check_memcpy_hazard(environ: Mapping[str, str], mooncake: MooncakeFacts) -> Check:
    """An operator's explicit ``MC_STORE_MEMCPY=1`` against the Mooncake version (FC-15)."""
    name, value = "memcpy_hazard", environ.get(MEMCPY)
    version = mooncake.version or "of unknown version"
    if value is None or memcpy_is_off(value):
        said = "unset" if value is None else "off"
        return Check(name=name, status="ok", evidence=f"{MEMCPY} {said}; set to 0 in each process of the job")
    fix = f"unset {MEMCPY} on this node (where Ray is started)"
    if memcpy_is_hazardous(mooncake.version):
        text = f"{MEMCPY}={value!r} with Mooncake {version} corrupts data between processes"
        return Check(name=name, status="missing", evidence=text, fix=fix)
    text = f"{MEMCPY}={value!r} overrides the safe setting; Mooncake {version} has the fix for the known corruption"
    return Check(name=name, status="degraded", evidence=text, fix=fix)


def memcpy_is_off(value: str) -> bool:
    """How Mooncake reads the variable: any text but these four, also an empty one, switches the copy path on."""
    return value.lower() in ("0", "false", "no", "off")


def check_gdr(tree: Tree, mooncake: MooncakeFacts) -> Check:
    """GPU memory can be registered with the NIC: a GPU, a Mooncake build with CUDA, and peermem or dma-buf."""
    name = "gdr"
    gpus = len(tree.names("proc/driver/nvidia/gpus")) or sum(
        bool(re.fullmatch(r"nvidia\d+", entry)) for entry in tree.names("dev")
    )
    if not gpus:
        return Check(
            name=name,
            status="missing",
            evidence="no CUDA device on this node",
            fix="use nodes with a GPU; without one GDR stays off",
        )
    if mooncake.version and not mooncake.has_cuda:
        text = f"Mooncake {mooncake.version} is the build without CUDA"
        return Check(name=name, status="missing", evidence=text, fix="install mooncake-transfer-engine (CUDA)")
    ways = [way for way, found in (("nvidia_peermem", _peermem(tree)), ("dma-buf", _dma_buf(tree))) if found]
    copy = "" if tree.exists("sys/module/gdrdrv") or tree.exists("dev/gdrdrv") else "; gdrdrv not loaded (optional)"
    if not ways:
        text = f"{gpus} GPU, but neither nvidia_peermem nor dma-buf (open kernel module, Linux 5.12){copy}"
        return Check(name=name, status="missing", evidence=text, fix="modprobe nvidia_peermem on the host")
    return Check(name=name, status="ok", evidence=f"{gpus} GPU, {' and '.join(ways)}{copy}")


def gpu_count(tree: Tree) -> int:
    return len(tree.names("proc/driver/nvidia/gpus"))


def _peermem(tree: Tree) -> bool:
    loaded = {line.split()[0] for line in tree.text("proc/modules").splitlines() if line.split()}
    return any(name in loaded or tree.exists("sys/module", name) for name in ("nvidia_peermem", "nv_peer_mem"))


def _dma_buf(tree: Tree) -> bool:
    release = re.match(r"(\d+)\.(\d+)", tree.text("proc/sys/kernel/osrelease"))
    new_enough = release is not None and (int(release[1]), int(release[2])) >= (5, 12)
    return new_enough and "Open Kernel Module" in tree.text("proc/driver/nvidia/version")
