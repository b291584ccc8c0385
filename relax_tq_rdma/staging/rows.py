"""How an encoded row passes TransferQueue's client and manager.

A put carries :class:`~relax_tq_rdma.payload.PlannedRow`: the client owns the memory, so it says where the row is
written. A get carries :class:`EncodedRow`. Both are plain objects to TransferQueue, so the field's schema stays
non-tensor and raw rows may stand beside them (design §6).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class EncodedRow:
    """A whole row as the store gave it back: a contiguous 1-D uint8 tensor that owns or leases its memory."""

    memory: torch.Tensor
