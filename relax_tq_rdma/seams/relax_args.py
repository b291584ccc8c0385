"""What the host's ``args`` say about the plugin, in any process that holds them.

The host pickles ``args`` to every service and rank, with the TransferQueue config in ``args.tq_config`` (contract §2):
so they tell a wrapper of a host function what its job wants, without any state of its own.
"""

from __future__ import annotations

from typing import Any

from relax_tq_rdma.section import JobSection
from relax_tq_rdma.settings import Settings
from relax_tq_rdma.transport.attach import section_of


def settings_of(args: Any) -> Settings | None:
    """The settings in force in the job of ``args``; ``None`` when that job does not use the plugin.

    They come from the job's section in ``args.tq_config``, else from the parsed flags: some layers (the group
    processor) need no data system.

    Raises:
        StartError: there is a section, and it cannot be read.
        UsageError: a flag on ``args`` holds a value it cannot have.
    """
    section = job_of(args)
    settings = Settings.from_args(args) if section is None else section.settings
    return None if settings.touches_nothing else settings


def job_of(args: Any) -> JobSection | None:
    """The job's section in ``args.tq_config``, with the decision; ``None`` before ``transfer_queue.init`` or without.

    Raises:
        StartError: there is one, and it cannot be read.
    """
    return section_of(getattr(args, "tq_config", None))
