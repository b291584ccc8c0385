"""The folder of this node's run state: master records and logs, port leases, metric snapshots.

One per user and node, closed to others: what lies in it names processes that a later start may end.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from relax_tq_rdma import env
from relax_tq_rdma.errors import StartError


def run_dir(*parts: str) -> Path:
    """The run folder, or a folder in it; made with mode 0700 when absent.

    ``RTQ_RUN_DIR``, else ``$XDG_RUNTIME_DIR/relax-tq-rdma-<uid>``, else the same below the folder for temporary files.

    Raises:
        StartError: it cannot be made, belongs to someone else, is a link, or is writable by others.
    """
    folder = _base()
    _ensure(folder, parents=True)
    for part in parts:
        folder = folder / part
        _ensure(folder)
    return folder


def _base() -> Path:
    chosen = env.RUN_DIR.read()
    if chosen:
        return Path(chosen).absolute()
    session = os.environ.get("XDG_RUNTIME_DIR", "")
    parent = session if session and os.access(session, os.W_OK | os.X_OK) else tempfile.gettempdir()
    return Path(parent) / f"relax-tq-rdma-{os.getuid()}"


def _ensure(folder: Path, parents: bool = False) -> None:
    fix = "set RTQ_RUN_DIR to a folder of your own on a local disk"
    try:
        if parents:
            folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as exc:
        raise StartError(f"run folder {folder} cannot be made ({exc.strerror}): {fix}") from None
    if not stat.S_ISDIR(found.st_mode):
        raise StartError(f"run folder {folder} is a link or a file, not a folder: {fix}")
    if found.st_uid != os.getuid():
        raise StartError(
            f"run folder {folder} belongs to uid {found.st_uid}, this process runs as {os.getuid()}: {fix}"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StartError(f"run folder {folder} is writable by others: chmod 700 it, or {fix}")
