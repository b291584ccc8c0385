"""Device memory in threads that are not its owner's.

TransferQueue moves data in threads of its own. There neither the current CUDA device nor the current stream is the
caller's, and PyTorch's streams do not wait for one another: what a caller has queued may still be running.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from transfer_queue.utils.mooncake_utils import GdrStaging


def settle(devices: Iterable[torch.device]) -> None:
    """Wait until the CUDA devices among these have done all that is queued on them so far, on whatever stream.

    Without it a put can read a tensor before the kernel that makes it (measured). Upstream's GDR path waits likewise.
    """
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


class DeviceStaging(GdrStaging):  # type: ignore[misc]
    """TransferQueue's GPU staging buffer, on the device that is current where it is made.

    Every use belongs in ``with torch.cuda.device(staging.device)``: a thread's own current device is the first one.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.device = torch.cuda.current_device()

    def memcpy_d2d_async(self, dst: int, src: int, nbytes: int) -> None:
        """As upstream, but not before the current stream: a fresh tensor's memory may still be read by work there."""
        self.wait_for_current_stream()
        super().memcpy_d2d_async(dst, src, nbytes)
