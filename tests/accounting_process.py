"""Helpers for tests of accounting: a storage manager without storage, and children that run a script."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

from relax_tq_rdma.accounting import AccountingMixin


class MemoryManager:
    """Behaves like a TransferQueue storage manager that keeps one batch; ``fail`` raises instead."""

    def __init__(self, fail: BaseException | None = None) -> None:
        self.fail = fail
        self.data: Any = None
        self.calls: list[tuple[Any, ...]] = []

    async def put_data(self, data: Any, metadata: Any, data_parser: Any = None) -> None:
        self.calls.append(("put", data, metadata, data_parser))
        await asyncio.sleep(0)
        if self.fail:
            raise self.fail
        self.data = data

    async def get_data(self, metadata: Any) -> Any:
        self.calls.append(("get", metadata))
        await asyncio.sleep(0)
        if self.fail:
            raise self.fail
        return self.data

    async def clear_data(self, metadata: Any) -> None:
        self.calls.append(("clear", metadata))
        if self.fail:
            raise self.fail


class Counted(AccountingMixin, MemoryManager):
    """The composition under test."""


class Meta:
    """As much of ``BatchMeta`` as accounting reads."""

    def __init__(self, partition: str = "train_0", rows: int = 8) -> None:
        self.partition_ids = [partition] * rows


def python(code: str, *, timeout: float = 60, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a new interpreter with the given environment on top of this one."""
    import os

    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout, env={**os.environ, **env}
    )
