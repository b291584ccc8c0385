"""The limit: the engine's raw binding between buffers that are registered once and warm, one value a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relax_tq_rdma.bench.path.counters import counted
from relax_tq_rdma.bench.path.payload import GRID, MIB, PIXELS, Shape

_ALIGNMENT = 64
_LOOPBACK = "127.0.0.1"
_LOCAL_BUFFER = 16 * MIB


class EngineEnd:
    """``batch_upsert_from`` and ``batch_get_into`` on one buffer of this process."""

    def __init__(self, master: str, segment_mib: int) -> None:
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig

        self._store: Any = counted(MooncakeDistributedStore)()
        code = self._store.setup(_LOOPBACK, "P2PHANDSHAKE", segment_mib * MIB, _LOCAL_BUFFER, "tcp", "", master)
        if code:
            raise RuntimeError(f"the engine's set-up failed with {code}")
        self._replicas = ReplicateConfig()
        self._replicas.with_hard_pin = True
        self._buffer: Any = None
        self._shape: Shape | None = None
        self._calls: tuple[list[str], list[int], list[int]] = ([], [], [])

    def prepare(self, rows: Sequence[Any], shape: Shape, partition: str) -> list[int]:
        self._place(shape, partition)
        for views, row in zip(self._views(shape), rows, strict=True):
            for key, view in views.items():
                view.copy_(row[key])
        return list(range(shape.rows))

    def put(self) -> None:
        codes = self._store.batch_upsert_from(*self._calls, config=self._replicas)
        if any(codes):
            raise RuntimeError(f"the engine's put failed: {next(filter(None, codes))}")

    def look(self, shape: Shape, partition: str) -> list[int]:
        self._place(shape, partition)
        return list(range(shape.rows))

    def get(self) -> list[Any]:
        assert self._shape is not None
        found = self._store.batch_get_into(*self._calls)
        if found != self._calls[2]:
            raise RuntimeError(f"the engine's get gave {found}")
        return self._views(self._shape)

    def rungs(self) -> dict[str, int]:
        return {}

    def stored(self) -> tuple[int, int]:
        return sum(self._calls[2]), 0

    def clear(self, partition: str) -> None:
        assert self._shape is not None
        codes = self._store.batch_remove(_keys(self._shape, partition), True)
        if any(codes):
            raise RuntimeError(f"the engine's remove failed: {codes}")

    def _place(self, shape: Shape, partition: str) -> None:
        """One place for each row in a buffer that is made, touched and registered once for a shape."""
        import torch

        offsets = _offsets(shape)
        if self._shape != shape:
            if self._buffer is not None:
                self._store.unregister_buffer(self._buffer.data_ptr())
            self._buffer = torch.zeros(offsets[-1], dtype=torch.uint8)
            if self._store.register_buffer(self._buffer.data_ptr(), self._buffer.nbytes):
                raise RuntimeError("the engine refused to register the buffer")
            self._shape = shape
        pointers = [self._buffer.data_ptr() + offset for offset in offsets[:-1]]
        self._calls = (_keys(shape, partition), pointers, shape.row_bytes)

    def _views(self, shape: Shape) -> list[dict[str, Any]]:
        import torch

        rows = []
        for offset, nbytes, patches in zip(_offsets(shape), shape.row_bytes, shape.patches, strict=False):
            row = self._buffer[offset : offset + nbytes]
            grid = patches * shape.width * 4
            rows.append(
                {
                    PIXELS: row[:grid].view(torch.float32).view(patches, shape.width),
                    GRID: row[grid:].view(torch.int64).view(1, 3),
                }
            )
        return rows


def _keys(shape: Shape, partition: str) -> list[str]:
    return [f"{partition}/{row}" for row in range(shape.rows)]


def _offsets(shape: Shape) -> list[int]:
    """Where each row begins, and the end of all."""
    offsets = [0]
    for nbytes in shape.row_bytes:
        offsets.append(offsets[-1] + -(-nbytes // _ALIGNMENT) * _ALIGNMENT)
    return offsets
