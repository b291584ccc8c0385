"""relax_tq_rdma: the data plane of a Relax job, switched on layer by layer. See README.md."""

from relax_tq_rdma.errors import DataplaneError, SeamError, StartError, TransferError, UsageError
from relax_tq_rdma.install import current_decision, current_start_line, install, uninstall
from relax_tq_rdma.settings import Settings
from relax_tq_rdma.version import __version__

__all__ = [
    "DataplaneError",
    "SeamError",
    "Settings",
    "StartError",
    "TransferError",
    "UsageError",
    "__version__",
    "current_decision",
    "current_start_line",
    "install",
    "uninstall",
]
