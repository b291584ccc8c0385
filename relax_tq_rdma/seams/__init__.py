"""The only places where the plugin touches others: the host and TransferQueue (design §2). Each seam can be checked,
taken and given back; see :mod:`relax_tq_rdma.seams.base`.
"""

from __future__ import annotations

from relax_tq_rdma.seams.base import Seam, SeamReport

__all__ = ["Seam", "SeamReport", "reports"]


def reports() -> list[SeamReport]:
    """Check every seam, touching nothing. Imports TransferQueue."""
    from relax_tq_rdma.seams.tq_init import TqInit
    from relax_tq_rdma.seams.tq_registry import TqRegistry

    seams: tuple[Seam, ...] = (TqInit(), TqRegistry())
    return [seam.check() for seam in seams]
