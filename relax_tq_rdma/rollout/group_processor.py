"""One image-processor run for a GRPO group instead of one per member (RFC §4.4, L3a). Pure: no import of the host.

Who takes part is decided twice. When a group starts (`GroupProcessor.scope`): all members must hold the *same*
``multimodal_inputs`` object and equal prompts, and no custom generate function. At each call of the processor
(`GroupProcessor.share`): it must ask for exactly these inputs. Everything else runs on its own, as without sharing.

The group travels in a context variable, which the tasks of its members inherit. So nothing is attached to samples (they
are pickled, dumped and put back into the data source), and a group that has ended leaves nothing behind. Memory: one
output per group that is being generated, and the members of the group hold that output anyway.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from relax_tq_rdma import accounting
from relax_tq_rdma.errors import SeamError

Output: TypeAlias = tuple[list[int], "dict[str, Any] | None", float]
"""Prompt ids, the training inputs of the sample (tensors by key), seconds that the run took."""

Processor: TypeAlias = Callable[[Any, Any, Any, Any], "Output | Awaitable[Output]"]
"""The host's ``_run_image_processor(state, args, prompt, multimodal_inputs)``."""

_MEDIA = ("images", "videos", "audio")


@dataclass
class Counts:
    """What happened in this process: ``runs + served`` calls took part in a group and cost ``runs`` runs."""

    groups: int = 0
    """Groups that were ready to share."""
    runs: int = 0
    """Runs started for a group, failed and cancelled ones included."""
    served: int = 0
    """Calls that joined the run of another member."""
    own: Counter[str] = field(default_factory=Counter)
    """Calls that ran on their own, by reason."""


class GroupProcessor:
    """Lets the members of a group share one run of the image processor.

    A group belongs to one event loop; a call from another loop runs on its own. There is no deadline: a member waits as
    long as it would wait for its own run, and can be cancelled meanwhile.
    """

    def __init__(self) -> None:
        self.counts = Counts()

    @contextmanager
    def scope(self, args: Any, group: Sequence[Any]) -> Iterator[None]:
        """Around the generation of one group, in the coroutine that starts the members' tasks.

        Args:
            args: the host's arguments (``custom_generate_function_path``).
            group: the members, with ``prompt``, ``multimodal_inputs`` and ``generate_function_path``.
        """
        inputs = common_inputs(args, group)
        self.counts.groups += isinstance(inputs, Inputs)
        scope = _Group(inputs, asyncio.get_running_loop(), self.counts)
        token = _current.set(scope)
        try:
            yield
        finally:
            _current.reset(token)
            scope.close()

    def share(self, processor: Processor) -> Callable[..., Awaitable[Output]]:
        """``processor``, with the same signature, sharing runs inside a `scope`.

        Each member gets prompt ids and containers of its own; the tensors in them are the same objects, and must not be
        written to. The seconds of a run are reported once, to the first member that takes its output; the others get 0.

        Raises:
            SeamError: a shared run returned something else than `Output`.
            Exception: what the run raised, once to each member that waits for it. The next call starts a new run.
        """

        @functools.wraps(processor)
        async def shared(state: Any, args: Any, prompt: Any, multimodal_inputs: Any) -> Output:
            call = _Call(processor, state, args, prompt, multimodal_inputs)
            group = _current.get()
            why = "outside a group" if group is None else group.why_not(call)
            if group is not None and why is None:
                return await group.output(call)
            self.counts.own[str(why)] += 1
            accounting.record_processor_call("own")
            return await call.output()

        return shared


@dataclass(frozen=True, eq=False)
class Inputs:
    """What all members of a group have in common."""

    prompt: str
    media: Any


def common_inputs(args: Any, group: Sequence[Any]) -> Inputs | str:
    """The inputs that all members share, or why there are none.

    Identity of the media is asked for, not equality: it costs nothing, and the scope holds the object, so its id cannot
    be used again meanwhile (RFC §4.4, FC-46). Prompts must be plain strings: a list could change between two members.
    """
    if len(group) < 2:
        return "one member"
    if getattr(args, "custom_generate_function_path", None) is not None or any(
        getattr(member, "generate_function_path", None) is not None for member in group
    ):
        return "custom generate function"
    prompt, media = getattr(group[0], "prompt", None), getattr(group[0], "multimodal_inputs", None)
    if not isinstance(media, dict) or not any(_is_something(media.get(kind)) for kind in _MEDIA):
        return "no media"
    if any(getattr(member, "multimodal_inputs", None) is not media for member in group):
        return "members hold different media objects"
    if not isinstance(prompt, str) or any(getattr(member, "prompt", None) != prompt for member in group):
        return "members have different prompts"
    return Inputs(prompt, media)


def _is_something(media: Any) -> bool:
    """An array has no truth value."""
    return media is not None and (not hasattr(media, "__len__") or len(media) > 0)


@dataclass(frozen=True, eq=False)
class _Call:
    processor: Processor
    state: Any
    args: Any
    prompt: Any
    media: Any

    async def output(self) -> Output:
        output = self.processor(self.state, self.args, self.prompt, self.media)
        return await output if inspect.isawaitable(output) else output

    def same_caller(self, other: _Call) -> bool:
        """Same processor under the same state: a reload of the host's module brings new ones."""
        return self.processor is other.processor and self.state is other.state and self.args is other.args


class _Group:
    """One group in the making: its common inputs and its run, until `close`."""

    def __init__(self, inputs: Inputs | str, loop: asyncio.AbstractEventLoop, counts: Counts) -> None:
        self._inputs = inputs
        self._loop = loop
        self._counts = counts
        self._run: _Run | None = None

    def why_not(self, call: _Call) -> str | None:
        """Why this call cannot be shared; None: it can."""
        if isinstance(self._inputs, str):
            return self._inputs
        if call.media is not self._inputs.media:
            return "other media object than the group's"
        if call.prompt != self._inputs.prompt:
            return "other prompt than the group's"
        if asyncio.get_running_loop() is not self._loop:
            return "another event loop than the group's"
        if self._run is not None and not self._run.call.same_caller(call):
            return "the host's module was reloaded"
        return None

    async def output(self, call: _Call) -> Output:
        run = self._run
        if run is None or run.failed:
            self._counts.runs += 1
            accounting.record_processor_call("run")
            run = self._run = _Run(call)
        else:
            self._counts.served += 1
            accounting.record_processor_call("served")
        return await run.join()

    def close(self) -> None:
        """The group is done. Members that still wait get the output they wait for; later calls run on their own."""
        self._inputs = "the group has ended"
        self._run = None


class _Run:
    """One run in a task of its own, so that it outlives the member that started it, but not the last one that waits."""

    def __init__(self, call: _Call) -> None:
        self.call = call
        self._waiting = 0
        self._reported = False
        self._abandoned = False
        self._task = asyncio.create_task(self._output())

    async def _output(self) -> Output:
        _current.set(None)  # in this task only: what the processor calls must never wait for this very run
        return await self.call.output()

    @property
    def failed(self) -> bool:
        """Nobody may join any more: it raised, or everybody left and it is being cancelled."""
        if self._abandoned:
            return True
        return self._task.done() and (self._task.cancelled() or self._task.exception() is not None)

    async def join(self) -> Output:
        self._waiting += 1
        try:
            output = await asyncio.shield(self._task)
        finally:
            self._waiting -= 1
            if not self._waiting and not self._task.done():
                self._abandoned = True
                self._task.cancel()
        prompt_ids, train_inputs, seconds = _checked(output)
        if self._reported:
            seconds = 0.0
        self._reported = True
        return list(prompt_ids), _copy_containers(train_inputs), seconds


def _checked(output: Any) -> Output:
    if isinstance(output, tuple) and len(output) == 3:
        prompt_ids, train_inputs, seconds = output
        if isinstance(prompt_ids, list) and isinstance(train_inputs, (dict, type(None))):
            return prompt_ids, train_inputs, seconds
    raise SeamError(
        "the host's _run_image_processor does not return (list of prompt ids, dict or None, seconds) as expected: "
        "drop --rollout-group-share-processor with this version of the host"
    )


def _copy_containers(value: Any) -> Any:
    """Dicts, lists and tuples anew at every depth; what they hold (tensors, arrays, scalars) is shared."""
    if isinstance(value, dict):
        mapping = copy.copy(value)
        mapping.update({key: _copy_containers(item) for key, item in value.items()})
        return mapping
    if isinstance(value, list):
        items = copy.copy(value)
        items[:] = [_copy_containers(item) for item in value]
        return items
    if type(value) is tuple:
        return tuple(_copy_containers(item) for item in value)
    return value


_current: ContextVar[_Group | None] = ContextVar("relax_tq_rdma_group", default=None)
