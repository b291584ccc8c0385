"""What a process does when it joins a job: guards and notes, before its storage manager is built (design §2).

The constructor of a manager is the one place that every process with data passes, also where ``transfer_queue.init`` is
never called (``StreamingDataset`` builds its own client).
"""

from __future__ import annotations

import logging
import os
from typing import Any

from relax_tq_rdma import accounting
from relax_tq_rdma.section import JobSection, read_section
from relax_tq_rdma.transport.attach import own_devices
from relax_tq_rdma.transport.hazards import guard_environment, guard_gid_index, installed_mooncake_version
from relax_tq_rdma.version import __version__

logger = logging.getLogger(__name__)

_noted: set[tuple[int, str]] = set()


def join_job(config: Any) -> JobSection | None:
    """Take part in the job that a backend's config belongs to. Repeating it changes nothing.

    Returns:
        The job's section; ``None`` when the job does not use the plugin: nothing was done then.

    Raises:
        StartError: the section cannot be read, or an environment variable of this process is a hazard (FC-15).
    """
    section, notes = read_section(config)
    if section is None:
        return None
    if section.decision.backend == "MooncakeStore":
        guard_environment(installed_mooncake_version())
        if section.decision.protocol == "rdma":
            logger.info("%s", guard_gid_index(own_devices(section.decision.device)))
    accounting.configure(section.settings.accounting, job=section.job)
    accounting.set_backend(section.decision)
    if section.settings.normalize_multimodal:
        accounting.expect_fast_path()
    this = (os.getpid(), section.job)
    if this not in _noted:
        _noted.add(this)
        if section.plugin_version != __version__:
            notes.append(
                f"this process runs relax-tq-rdma {__version__}, the job was started with {section.plugin_version}: "
                "install the same version on every node"
            )
        for note in notes:
            logger.warning("%s", note)
    return section
