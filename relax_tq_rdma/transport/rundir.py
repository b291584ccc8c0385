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

_FIX = "set RTQ_RUN_DIR to a folder of your own on a local disk"


def run_dir(*parts: str) -> Path:
    """The run folder, or a folder in it; made with mode 0700 when absent.

    ``RTQ_RUN_DIR``, else ``$XDG_RUNTIME_DIR/relax-tq-rdma-<uid>``, else the same below the folder for temporary files.

    Raises:
        StartError: it has no place, cannot be made, belongs to someone else, is a link, or is writable by others.
    """
    folder = _base()
    _ensure(folder, parents=True)
    for part in parts:
        folder = folder / part
        _ensure(folder)
    return folder


def _base() -> Path:
    chosen, session = env.RUN_DIR.read(), os.environ.get("XDG_RUNTIME_DIR", "")
    try:
        if chosen:
            return Path(chosen).absolute()
        parent = session if session and os.access(session, os.W_OK | os.X_OK) else tempfile.gettempdir()
    except OSError as exc:  # the working folder is gone, or no folder for temporary files takes one: a full disk
        raise StartError(f"there is no place for a run folder ({exc.strerror}): {_FIX}") from None
    return Path(parent) / f"relax-tq-rdma-{os.getuid()}"


def _ensure(folder: Path, parents: bool = False) -> None:
    try:
        if parents:
            folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as exc:
        raise StartError(f"run folder {folder} cannot be made ({exc.strerror}): {_FIX}") from None
    if not stat.S_ISDIR(found.st_mode):
        raise StartError(f"run folder {folder} is a link or a file, not a folder: {_FIX}")
    if found.st_uid != os.getuid():
        raise StartError(
            f"run folder {folder} belongs to uid {found.st_uid}, this process runs as {os.getuid()}: {_FIX}"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StartError(f"run folder {folder} is writable by others: chmod 700 it, or {_FIX}")
