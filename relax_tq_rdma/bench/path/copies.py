"""What a put or get does to the payload, watched in one round that is not timed.

Copies are counted where Python, NumPy, torch and TransferQueue make them, in all threads; what the engine and the
sockets copy inside themselves is their own business and part of the limits (``engine``, ``loopback``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

SMALLEST = 256
"""Copies of fewer bytes are headers and scalars, not payload."""


@dataclass
class Seen:
    """Bytes copied by this process, and bytes of messages it exchanged over ZMQ."""

    copied: int = 0
    messages: int = 0


@contextmanager
def watching(places: list[tuple[Any, str]], message: Any) -> Iterator[Seen]:
    """Count copies in the block.

    Args:
        places: functions ``(target, items)`` that copy ``items``, as owner and name.
        message: class with ``serialize`` and ``deserialize``.
    """
    import numpy as np
    import torch

    seen = Seen()

    def copied(nbytes: int) -> None:
        if nbytes >= SMALLEST:
            seen.copied += nbytes

    def of_result(result: Any, *_: Any) -> int:
        return _nbytes(result)

    with ExitStack() as patches:

        def watch(owner: Any, name: str, nbytes: Callable[..., int]) -> None:
            original = getattr(owner, name)

            def watched(*args: Any, **named: Any) -> Any:
                result = original(*args, **named)
                copied(nbytes(result, *args))
                return result

            patches.enter_context(mock.patch.object(owner, name, watched))

        def is_new(result: Any, source: Any, *_: Any) -> int:
            return 0 if result.data_ptr() == source.data_ptr() else _nbytes(result)

        watch(ctypes, "memmove", lambda _, __, ___, count: int(count))
        watch(np, "copyto", lambda _, target, *__: int(target.nbytes))
        for name in ("copy_", "clone"):
            watch(torch.Tensor, name, of_result)
        for name in ("contiguous", "cpu", "to"):
            watch(torch.Tensor, name, is_new)
        for name in ("cat", "stack"):  # torch.nested builds jagged tensors with cat
            watch(torch, name, of_result)
        for owner, name in places:
            watch(owner, name, lambda _, __, items: sum(memoryview(item).nbytes for item in items))

        serialize, deserialize = message.serialize, message.deserialize

        def serialized(self: Any) -> Any:
            frames = serialize(self)
            seen.messages += _frames(frames)
            return frames

        def deserialized(frames: Any) -> Any:
            seen.messages += _frames(frames)
            return deserialize(frames)

        patches.enter_context(mock.patch.object(message, "serialize", serialized))
        patches.enter_context(mock.patch.object(message, "deserialize", staticmethod(deserialized)))
        yield seen


def _nbytes(tensor: Any) -> int:
    values = tensor.values() if tensor.is_nested else tensor
    return int(values.numel() * values.element_size())


def _frames(frames: Any) -> int:
    return sum(memoryview(frame).nbytes for frame in frames)
