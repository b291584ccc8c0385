"""What the host's ``args`` say about the plugin and its job, in any process that holds them.

The host pickles ``args`` to every service and rank, with the TransferQueue config in ``args.tq_config`` (contract §2):
so they tell a wrapper of a host function what its job wants, without any state of its own.
"""

from __future__ import annotations

from typing import Any

from relax_tq_rdma.compat import HostFacts
from relax_tq_rdma.section import KEY, JobSection
from relax_tq_rdma.settings import Settings
from relax_tq_rdma.transport.attach import section_of


def settings_of(args: Any) -> Settings | None:
    """The settings in force in the job of ``args``; ``None`` when that job does not use the plugin.

    They come from the job's section in ``args.tq_config``. Some layers (the group processor) need no data system: then
    from what :func:`keep_settings` left, and before it from the parsed flags.

    Raises:
        StartError: there is a section, and it cannot be read.
        UsageError: a flag on ``args`` holds a value it cannot have.
    """
    section, kept = job_of(args), getattr(args, KEY, None)
    if section is not None:
        settings = section.settings
    else:
        settings = Settings.from_args(args) if kept is None else Settings.from_dict(kept)[0]
    return None if settings.touches_nothing else settings


def job_of(args: Any) -> JobSection | None:
    """The job's section in ``args.tq_config``, with the decision; ``None`` before ``transfer_queue.init`` or without.

    Raises:
        StartError: there is one, and it cannot be read.
    """
    return section_of(getattr(args, "tq_config", None))


def keep_settings(args: Any, settings: Settings) -> None:
    """Let every process with these ``args`` know what is in force. The flags on them stay as the user gave them: the
    host may have some of the same name, with a meaning of their own."""
    setattr(args, KEY, settings.to_dict())


def host_facts(args: Any) -> HostFacts:
    """What the compatibility rules need of the host. An attribute that this host does not have is a fact unknown."""

    def known(name: str) -> Any:
        return getattr(args, name, None)

    return HostFacts(
        fully_async=known("fully_async"),
        hybrid=known("hybrid"),
        multimodal=known("multimodal_keys") is not None if hasattr(args, "multimodal_keys") else None,
        tensor_parallel=known("tensor_model_parallel_size"),
        pipeline_parallel=known("pipeline_model_parallel_size"),
        context_parallel=known("context_parallel_size"),
        num_data_storage_units=known("num_data_storage_units"),
        per_rank_fetch=bool(known("per_rank_fetch")),
        rollout_routed_experts=bool(known("use_rollout_routing_replay")),
        samples_per_prompt=known("n_samples_per_prompt"),
        custom_generate=bool(known("custom_generate_function_path") or known("use_agentic_rollout")),
    )
