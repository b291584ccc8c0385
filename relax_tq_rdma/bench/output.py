"""``-o FILE`` of the benchmarks: refused before the run, or one sentence after it."""

from __future__ import annotations

from pathlib import Path

from relax_tq_rdma.errors import StartError, UsageError


def check(path: Path | None) -> None:
    """See what can be seen before the run.

    Raises:
        UsageError: it is a folder, or lies in none.
    """
    if path is None:
        return
    if path.is_dir():
        raise UsageError(f"-o {path}: a folder, not a file")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"-o {path}: there is no folder {path.absolute().parent}")


def write(path: Path | None, text: str) -> None:
    """Write the result, if anywhere.

    Raises:
        StartError: it cannot be written.
    """
    if path is None:
        return
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as exc:
        raise StartError(f"-o {path} cannot be written: {(exc.strerror or str(exc)).lower()}") from None
