"""The Ray a demo runs on: one it starts for itself, or a running one that it only borrows.

The embedded Ray binds loopback, shows no dashboard and keeps its files in a folder of its own, so that neither a
running cluster's files (``/tmp/ray``) nor its address are touched. It is gone when the demo is: Ray's daemons die with
the driver (Linux parent-death signal), workers with their raylet.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil

from relax_tq_rdma.demo import signals
from relax_tq_rdma.errors import StartError, UsageError
from relax_tq_rdma.transport import running_ray
from relax_tq_rdma.transport.process import ProcessId, own_id

LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 128 << 20
"""The payload does not travel through Ray's object store; weights and results do."""

_SHM = Path("/dev/shm")
_PREFIX = "rtq-ray-"
_OWNER = "owner.json"
_SHORT = 16
"""Longest folder for temporary files that can be used: Ray's socket paths below may have 107 characters."""

_GOODBYE_SECONDS = 3.0


@contextmanager
def embedded(cpus: int) -> Iterator[None]:
    """A Ray of our own on this machine with ``cpus`` logical CPUs.

    Its folder is removed at the end; when a running job failed it stays for its logs, until the next demo starts.

    Raises:
        StartError: /dev/shm is full, or Ray did not start.
    """
    import ray

    _require_shm(shutil.disk_usage(_SHM).free)
    parent = _short_tempdir()
    _sweep(parent)
    folder = _make_folder(parent)
    before = _children()
    keep = False
    try:
        try:
            ray.init(
                address="local",
                num_cpus=cpus,
                num_gpus=0,
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                namespace=_namespace(),
                _node_ip_address=LOOPBACK,
                _temp_dir=str(folder),
            )
        except Exception as exc:
            raise StartError(f"Ray did not start: {_first_line(exc)}") from None
        signals.listen()
        yield
    except Exception as exc:
        keep = not isinstance(exc, (StartError, UsageError))
        if keep:
            logs = folder / "session_latest" / "logs"
            print(f"relax-tq-rdma: Ray's logs of this run, until the next demo: {logs}", file=sys.stderr)
        raise
    finally:
        with signals.ignored():
            mine = [child for child in _children() if child not in before]
            ray.shutdown()
            _reap(mine)
            if not keep:
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def borrowed(address: str, cpus: int) -> Iterator[None]:
    """A running cluster. Only what this job creates there is ended with it.

    Raises:
        StartError: it cannot be joined, or it has fewer than ``cpus`` free CPUs.
    """
    import ray

    running_ray.join(address, "--ray-address", namespace=_namespace())
    try:
        signals.listen()
        free = ray.available_resources().get("CPU", 0.0)
        if free < cpus:
            raise StartError(
                f"TransferQueue needs {cpus} free CPUs in the Ray cluster (one for its controller, one for each "
                f"storage unit), {free:g} are free: end other jobs or lower --num-data-storage-units"
            )
        yield
    finally:
        with signals.ignored():
            ray.shutdown()


def _namespace() -> str:
    return f"relax-tq-rdma-demo-{secrets.token_hex(4)}"


def _require_shm(free: int) -> None:
    needed = OBJECT_STORE_BYTES + (32 << 20)
    if free < needed:
        raise StartError(
            f"{_SHM} has {free >> 20} MiB free, the local Ray needs {needed >> 20} MiB: free some, or enlarge it "
            "(docker run --shm-size=1g)"
        )


def _short_tempdir() -> Path:
    wanted = tempfile.gettempdir()
    return Path(wanted if len(wanted) <= _SHORT else "/tmp")


def _make_folder(parent: Path) -> Path:
    """A folder of this process alone; a run that is killed outright leaves it to the next one to remove."""
    owner = own_id()
    folder = parent / f"{_PREFIX}{owner.pid}-{owner.start_ticks}"
    try:
        folder.mkdir(mode=0o700)
    except OSError as exc:
        raise StartError(f"folder {folder} for Ray's files cannot be made ({exc.strerror}): set TMPDIR") from None
    (folder / _OWNER).write_bytes(msgspec.json.encode(owner))
    return folder


def _sweep(parent: Path) -> None:
    """Remove the folders of runs that were killed before they could do it themselves."""
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            owner = msgspec.json.decode((folder / _OWNER).read_bytes(), type=ProcessId)
        except (OSError, msgspec.DecodeError):
            continue  # not ours to judge
        if owner.of_this_boot and not owner.alive():
            shutil.rmtree(folder, ignore_errors=True)


def _children() -> list[psutil.Process]:
    children: list[psutil.Process] = psutil.Process().children(recursive=True)
    return children


def _reap(processes: list[psutil.Process]) -> None:
    """Wait for our own processes to end, then kill the rest; ``psutil`` checks pid and start time before a signal."""
    _, alive = psutil.wait_procs(processes, timeout=_GOODBYE_SECONDS)
    for process in alive:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(alive, timeout=_GOODBYE_SECONDS)


def _first_line(exc: Exception) -> str:
    return next(iter(str(exc).strip().splitlines()), type(exc).__name__)
