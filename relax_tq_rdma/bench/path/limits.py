"""What this machine allows at best: one thread's copy between warm buffers, one TCP connection over loopback."""

from __future__ import annotations

import socket
import threading
import time

_LOOPBACK = "127.0.0.1"
_WAIT_SECONDS = 60.0


def measure_limits(nbytes: int) -> dict[str, float]:
    """Seconds for ``nbytes``: ``memcpy`` and ``loopback``. Every page is touched before."""
    import numpy as np

    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    np.copyto(target, source)
    began = time.perf_counter()
    np.copyto(target, source)
    memcpy = time.perf_counter() - began
    return {"memcpy": memcpy, "loopback": _loopback(source.data, target.data)}


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
