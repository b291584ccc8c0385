"""The only places where the plugin touches others: the host and TransferQueue (design §2). Each seam can be checked,
taken and given back; see :mod:`relax_tq_rdma.seams.base`.
"""

from __future__ import annotations

import msgspec

from relax_tq_rdma.seams.base import Seam, SeamReport
from relax_tq_rdma.settings import Settings

__all__ = ["Seam", "SeamReport", "reports"]


def reports(settings: Settings) -> list[SeamReport]:
    """Check every seam, touching nothing; those in the host only where it is installed. Imports TransferQueue, not the
    host: its source is read.

    Args:
        settings: they say which seams are needed.
    """
    from relax_tq_rdma.compat import HostFacts
    from relax_tq_rdma.seams.driver import needed_of_host
    from relax_tq_rdma.seams.host_code import has_host
    from relax_tq_rdma.seams.relax_arguments import RelaxArguments
    from relax_tq_rdma.seams.relax_consumer import RelaxConsumer
    from relax_tq_rdma.seams.relax_controller import RelaxController
    from relax_tq_rdma.seams.relax_rollout import RelaxRollout
    from relax_tq_rdma.seams.tq_init import TqInit
    from relax_tq_rdma.seams.tq_registry import TqRegistry
    from relax_tq_rdma.seams.worker_hook import WorkerHook

    seams: list[Seam] = [TqInit(), TqRegistry()]
    if has_host():
        seams += [RelaxArguments(), RelaxRollout(), RelaxConsumer(), RelaxController(), WorkerHook()]
    needed = {TqInit.name, TqRegistry.name, RelaxArguments.name, *needed_of_host(settings, HostFacts())}
    if settings.touches_nothing:
        needed.clear()
    return [msgspec.structs.replace(seam.check(), needed=seam.name in needed) for seam in seams]
