"""What this machine allows at best: one thread's copy between warm buffers, one TCP connection over loopback."""

from __future__ import annotations

import ctypes
import socket
import threading
import time
from collections.abc import Sequence

LIMITS = ("memcpy", "memcpy_rows", "loopback")

_LOOPBACK = "127.0.0.1"
_WAIT_SECONDS = 60.0


def measure_limits(sizes: Sequence[int]) -> dict[str, float]:
    """Seconds for rows of these sizes, each of :data:`LIMITS`. Every page is touched before.

    ``memcpy`` is one copy of all bytes; ``memcpy_rows`` one of each row from memory of its own: the C library copies
    what is larger than its cache with stores that bypass it, and a row is often smaller (measured: half the speed).
    The memory is ordinary, as that of rows is; NumPy asks the kernel for huge pages, which are faster.
    """
    import torch

    rows = [torch.ones(size, dtype=torch.uint8) for size in sizes]
    source, target = torch.cat(rows), torch.zeros(sum(sizes), dtype=torch.uint8)

    def at_once() -> None:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)

    def by_row() -> None:
        at = target.data_ptr()
        for row in rows:
            ctypes.memmove(at, row.data_ptr(), row.nbytes)
            at += row.nbytes

    seconds = {}
    for name, copy in (("memcpy", at_once), ("memcpy_rows", by_row)):
        copy()
        began = time.perf_counter()
        copy()
        seconds[name] = time.perf_counter() - began
    return {**seconds, "loopback": _loopback(source.numpy().data, target.numpy().data)}


def _loopback(source: memoryview, target: memoryview) -> float:
    """From the first byte sent until the last is received, by a thread each (both release the GIL)."""
    with socket.create_server((_LOOPBACK, 0)) as server:
        sender = socket.create_connection(server.getsockname()[:2], timeout=_WAIT_SECONDS)
        receiver, _ = server.accept()
    with sender, receiver:
        receiver.settimeout(_WAIT_SECONDS)
        began = time.perf_counter()
        sending = threading.Thread(target=sender.sendall, args=(source,), daemon=True)
        sending.start()
        left = target
        while left:
            count = receiver.recv_into(left)
            if not count:
                raise ConnectionError("the loopback connection ended early")
            left = left[count:]
        seconds = time.perf_counter() - began
        sending.join(_WAIT_SECONDS)
    return seconds
