"""Pool, leases and store stay consistent whatever happens: the machine of ``tests/staging_machine.py``, fake store."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant, run_state_machine_as_test

from relax_tq_rdma.transport.memory import MIB
from tests.mooncake import backend_config
from tests.staging_machine import STAGED, StagingMachine
from tests.strict_store import StrictStore, use_strict_store
from tests.unit.test_client import fail


@pytest.mark.timeout(200)
def test_any_sequence_leaves_pool_leases_and_store_consistent(monkeypatch: pytest.MonkeyPatch) -> None:
    from relax_tq_rdma.staging import connect
    from relax_tq_rdma.staging.client import DataplaneMooncakeStoreClient

    monkeypatch.setattr(connect, "reach_master", lambda address, limit: None)

    class Machine(StagingMachine):
        def make_client(self) -> Any:
            self.store = StrictStore()
            self.store.mounts = [4096 * MIB]
            use_strict_store(monkeypatch, self.store)
            return DataplaneMooncakeStoreClient(backend_config("127.0.0.1:1", settings=STAGED))

        def fail_next(self) -> None:
            self.store.plan = [fail(-600, 0)]

        def heal(self) -> None:
            self.store.plan = []

        @invariant()
        def the_store_agrees(self) -> None:
            assert self.store.refused == []
            assert self.store.regions == {}
            counts = self.client.staging_counts()
            if not self.closed:
                wanted = {
                    f"job1/{meta['generation']}/{key}"
                    for keys, metas, values in self.stored.values()
                    for key, meta, (kind, size, _) in zip(keys, metas, values, strict=True)
                    if size or kind != "tensor"
                }
                assert set(self.store.stored()) == wanted
                for pool in self.store.pools:
                    assert pool.leased() == counts.held + counts.capacity // 4
            assert counts.registrations == self.store.registered

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=30, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
