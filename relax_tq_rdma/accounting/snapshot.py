"""Snapshot files: how the processes of a node share their totals, and how they outlive the processes (design §8).

Folder ``RUN_DIR/metrics/<job>/``: one ``p-<pid>-<start>-<boot>-<serial>.json`` per process, replaced atomically by its
owner alone; ``retired.json``, the sum of processes that are gone; ``lock``. JSON, validated on read; never pickle.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from relax_tq_rdma.accounting.names import METRICS
from relax_tq_rdma.accounting.notes import reason, say_once
from relax_tq_rdma.accounting.records import Row, Totals
from relax_tq_rdma.transport.process import ProcessId, boot_scope

SCHEMA = 1
FOLDER = "metrics"
RETIRED = "retired.json"
LOCK = "lock"
LABELS = "labels.json"
MAX_BYTES = 4 << 20
KEEP_DEAD = 32
"""Files of dead processes beyond this number are summed into ``retired.json``."""
READ_WAIT_S = 2.0
FINISHED_AFTER_S = 3600.0
"""A job is finished when none of its processes lives and its newest file is older than this."""

_NAME = re.compile(r"p-(\d+)-(\d+)-([0-9a-f]{8})-\d+\.json")
_OURS = re.compile(r"(p-\d+-\d+-[0-9a-f]{8}-\d+|retired|labels)\.json(\.tmp)?|lock|serve-[\w.:-]+\.lock")


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of one process. ``serial`` counts the ledgers it has had; ``written`` is Unix time in seconds."""

    job: str
    node: str
    owner: ProcessId
    serial: int
    written: float
    rows: list[Row]
    gauges: dict[str, int] = {}
    backend: tuple[str, str, str, str] | None = None
    schema: int = SCHEMA

    @property
    def name(self) -> str:
        return f"p-{self.owner.pid}-{self.owner.start_ticks}-{_short(self.owner.boot)}-{self.serial}.json"


class _Retired(msgspec.Struct, frozen=True, kw_only=True):
    """Sum of dead processes. Files named in ``absorbed`` are in the sum already, should they still exist.

    ``written``: when the last of them wrote its own, Unix time in seconds.
    """

    absorbed: tuple[str, ...] = ()
    processes: int = 0
    rows: list[Row] = []
    written: float = 0.0
    schema: int = SCHEMA


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """All of a job on this node: the sum of ``live`` and ``ended`` processes, and what only live ones say.

    ``written``: when the last of them published something new, Unix time in seconds.
    """

    job: str
    totals: Totals
    live: int
    ended: int
    backends: tuple[tuple[str, str, str, str], ...]
    gauges: dict[str, int]
    written: float


def job_folder(root: Path, job: str) -> Path:
    """The job's folder in ``RUN_DIR/metrics``; characters outside ``[A-Za-z0-9._-]`` become ``_``."""
    return root / (re.sub(r"[^\w.-]|^\.+", "_", job, flags=re.ASCII) or "_")


def write_json(path: Path, value: Any) -> None:
    """Replace a file atomically.

    Raises:
        OSError: the folder cannot be written.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(msgspec.json.encode(value))
    os.replace(temporary, path)


def read_node(folder: Path) -> NodeView:
    """Sum up a job's folder. A file that cannot be read or trusted is left out, with one warning.

    Raises:
        OSError: the folder is not there.
    """
    with _locked(folder, fcntl.LOCK_SH, wait_s=READ_WAIT_S):
        retired = _retired(folder)
        snapshots = _snapshots(folder, set(retired.absorbed))
    totals = Totals.from_rows(retired.rows)
    for snapshot in snapshots:
        totals.add(Totals.from_rows(snapshot.rows))
    owners = {s.owner for s in snapshots}
    live = {owner for owner in owners if owner.alive()}
    return NodeView(
        job=snapshots[0].job if snapshots else folder.name,
        totals=totals,
        live=len(live),
        ended=len(owners) - len(live) + retired.processes,
        backends=tuple(sorted({s.backend for s in snapshots if s.backend is not None and s.owner in live})),
        gauges=_summed(s.gauges for s in snapshots if s.owner in live),
        written=max([retired.written, *(s.written for s in snapshots)]),
    )


def _summed(gauges: Iterable[dict[str, int]]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for some in gauges:
        sums.update({name: value for name, value in some.items() if name in METRICS})
    return dict(sums)


def compact(folder: Path) -> None:
    """Bound the number of files: sum those of dead processes into ``retired.json`` once there are many.

    A crash at any point counts nothing twice: the sum names what it holds before the files go.
    """
    if len(_dead_files(folder)) <= KEEP_DEAD:
        return
    with _locked(folder, fcntl.LOCK_EX) as held:
        if not held:
            return
        retired = _retired(folder)
        gone = _dead_files(folder)
        totals = Totals.from_rows(retired.rows)
        fresh = [s for s in _snapshots(folder, set(retired.absorbed)) if s.name in gone]
        for snapshot in fresh:
            totals.add(Totals.from_rows(snapshot.rows))
        ended = len({s.owner for s in fresh})
        sums = _Retired(
            absorbed=tuple(gone),
            processes=retired.processes + ended,
            rows=totals.to_rows(),
            written=max([retired.written, *(s.written for s in fresh)]),
        )
        write_json(folder / RETIRED, sums)
        for name in gone:
            (folder / name).unlink(missing_ok=True)


def remove_finished(root: Path, own: Path, *, now: float | None = None) -> None:
    """Remove folders of other jobs that are finished (:data:`FINISHED_AFTER_S`); only files of our own making go."""
    now = time.time() if now is None else now
    for folder in root.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process is at the same
            if folder != own and folder.is_dir() and not folder.is_symlink():
                _remove_if_finished(folder, now)


def _remove_if_finished(folder: Path, now: float) -> None:
    files = [path for path in folder.iterdir() if _OURS.fullmatch(path.name)]
    newest = max(path.stat().st_mtime for path in (*files, folder))
    if now - newest < FINISHED_AFTER_S or any(_lives(path.name) for path in files):
        return
    for path in files:
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # something in it is not ours
        folder.rmdir()


# --- reading ----------------------------------------------------------------------------------------------------------


def _process_files(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if _NAME.fullmatch(name))


def _dead_files(folder: Path) -> list[str]:
    """Files of processes that are surely gone: those of another pid namespace are none of our business."""
    here = _short(boot_scope())
    return [name for name in _process_files(folder) if f"-{here}-" in name and not _lives(name)]


def _lives(name: str) -> bool:
    match = _NAME.fullmatch(name)
    if match is None or match[3] != _short(boot_scope()):
        return False
    found = ProcessId.of(int(match[1]))
    return found is not None and found.start_ticks == int(match[2])


def _short(boot: str) -> str:
    return hashlib.blake2b(boot.encode(), digest_size=4).hexdigest()


def _snapshots(folder: Path, absorbed: set[str]) -> list[Snapshot]:
    """Trustworthy snapshots, oldest process first."""
    found = []
    for name in _process_files(folder):
        snapshot = None if name in absorbed else _read(folder / name, Snapshot)
        if snapshot is not None and snapshot.name == name:
            found.append(snapshot)
    return sorted(found, key=lambda s: (s.owner.start_ticks, s.owner.pid))


def _retired(folder: Path) -> _Retired:
    return _read(folder / RETIRED, _Retired) or _Retired()


def _read(path: Path, kind: type[Any]) -> Any:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"it is larger than {MAX_BYTES} bytes")
        value = msgspec.json.decode(path.read_bytes(), type=kind)
        if value.schema != SCHEMA:
            raise ValueError(f"it has schema {value.schema}, this version reads {SCHEMA}")
        Totals.from_rows(value.rows)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, msgspec.MsgspecError) as exc:
        say_once(f"read {path}", f"metric snapshot {path} is left out of the node's totals: {reason(exc)}")
        return None
    return value


@contextlib.contextmanager
def _locked(folder: Path, how: int, *, wait_s: float = 0.0) -> Iterator[bool]:
    """Hold the folder's lock for the block; yields whether it was got in time. The kernel frees it with its holder."""
    deadline = time.monotonic() + wait_s
    fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while not (held := try_lock(fd, how)) and time.monotonic() < deadline:
            time.sleep(0.01)
        yield held
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # a child forked meanwhile shares the lock; closing alone would leave it held
        os.close(fd)


def try_lock(fd: int, how: int) -> bool:
    """Lock an open file without waiting."""
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
