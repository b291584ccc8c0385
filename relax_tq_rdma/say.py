"""What people read: lines on standard error, where the job's log is, and results on standard output."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from relax_tq_rdma.errors import StartError

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


def say(line: str) -> None:
    """Print a line. A full disk under the log, or a stream that is closed, costs the line and never the job."""
    with suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


@contextmanager
def delivering() -> Iterator[None]:
    """Around a command that prints a result: what its encoding lacks is shown by its code.

    Raises:
        StartError: the disk behind standard output is full. Neither a stack trace nor an exit code of 0 would do.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
        sys.stdout.flush()
    except OSError as exc:
        if exc.filename is not None or exc.errno not in _NO_ROOM:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the last flush of Python fails again
        raise StartError(f"the result cannot be written: {(exc.strerror or str(exc)).lower()}") from None
