"""Seam R2: the host's rollout runs its image processor once per group (L3a, RFC §4.4).

Two functions of ``relax.engine.rollout.sglang_rollout`` are wrapped. Its other functions look them up in the module at
each call, and a custom rollout function that imports them by name does so after the module was executed, as we do.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from relax_tq_rdma import accounting, coverage
from relax_tq_rdma.accounting.notes import say_once
from relax_tq_rdma.rollout.group_processor import Counts, GroupProcessor, Output, Processor
from relax_tq_rdma.seams.base import SeamReport
from relax_tq_rdma.seams.host_code import has_module, installed_host, problem
from relax_tq_rdma.seams.relax_args import settings_of
from relax_tq_rdma.seams.wrapping import Wrappers

MODULE = "relax.engine.rollout.sglang_rollout"
_HOST_S_OWN = "relax.utils.data.group_processor"
_PROCESSOR = "_run_image_processor"
_GROUP = "generate_and_rm_group"
_FUNCTIONS = {
    _PROCESSOR: ("state", "args", "prompt", "multimodal_inputs"),
    _GROUP: ("args", "group", "sampling_params", "evaluation"),
}
_AS_MEANT = {"outside a group", "one member", "no media"}
"""Reasons to run the processor for one sample that hide no saving."""


class RelaxRollout:
    """See :class:`relax_tq_rdma.seams.base.Seam`. Without ``--rollout-group-share-processor`` it only times runs."""

    name = "R2 (the host's rollout)"
    modules = (MODULE,)
    """Host modules after whose execution, reloads included, :meth:`apply` is due."""

    def __init__(self) -> None:
        self._sharing = GroupProcessor()
        self._told: Counter[str] = Counter()
        self._wrappers = Wrappers()

    @property
    def counts(self) -> Counts:
        """What was shared in this process, and what was not, with the reasons."""
        return self._sharing.counts

    def check(self) -> SeamReport:
        aside, found = "", ""
        try:
            if has_module(_HOST_S_OWN):
                aside = "the host shares the processor's output within a group by itself"
            else:
                problems = (problem(MODULE, name, takes, is_async=True) for name, takes in _FUNCTIONS.items())
                found = next(filter(None, problems), "")
        except Exception as exc:  # a broken host must become a sentence, whatever it raises
            found = f"{type(exc).__name__}: {exc}"
        return SeamReport(
            name=self.name,
            ok=not found,
            installed=installed_host(),
            expected=" and ".join(f"{name}({', '.join(takes)})" for name, takes in _FUNCTIONS.items()),
            found=found,
            aside=aside,
            way_out="drop --rollout-group-share-processor with this version of the host",
        )

    def apply(self) -> None:
        module = sys.modules.get(MODULE)
        if module is None or has_module(_HOST_S_OWN):
            return
        self._wrappers.put(module, _PROCESSOR, lambda processor: self._sharing.share(_timed(processor)))
        self._wrappers.put(module, _GROUP, self._in_scope)

    def remove(self) -> None:
        self._wrappers.take_back()

    def _in_scope(self, generate: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        signature = inspect.signature(generate)

        @functools.wraps(generate)
        async def generate_and_rm_group(args: Any, group: Any, *rest: Any, **named: Any) -> Any:
            settings = settings_of(args)
            wanted = settings is not None and settings.group_share_processor
            # The host evaluates deep copies: there is nothing to share, and nobody is to be told that.
            if not wanted or signature.bind(args, group, *rest, **named).arguments.get("evaluation"):
                return await generate(args, group, *rest, **named)
            with self._sharing.scope(args, group):
                try:
                    return await generate(args, group, *rest, **named)
                finally:
                    self._say_what_was_not_shared()

        return generate_and_rm_group

    def _say_what_was_not_shared(self) -> None:
        for why in self.counts.own.keys() - _AS_MEANT:
            say_once(f"group processor: {why}", f"the image processor runs once per sample, not per group: {why}")
            coverage.count(f"image processor runs of one sample ({why})", self.counts.own[why] - self._told[why])
            self._told[why] = self.counts.own[why]


def _timed(processor: Processor) -> Processor:
    """Each run as one ``image_processor`` stage (RFC §3.4); the wait of a member for the run of another is none."""

    @functools.wraps(processor)
    async def run(state: Any, args: Any, prompt: Any, multimodal_inputs: Any) -> Output:
        with accounting.stage("image_processor"):
            output: Output = await processor(state, args, prompt, multimodal_inputs)  # type: ignore[misc]
            return output

    return run
