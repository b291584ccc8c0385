"""Two peers of one node on one HCA: what the one moves must not hide what the other has fetched."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relax_tq_rdma.transport import ring
from relax_tq_rdma.transport.native import PeerRequest, Ring
from relax_tq_rdma.transport.report import RdmaDevice

PACKET = 4096
"""The largest path MTU: no packet too many proves anything."""

PIECES = 10
DEVICE = RdmaDevice(name="rxe0", port=1, gid_index=1, gid="::ffff:10.0.0.1", link_layer="Ethernet")


class Hca:
    """One receive counter below a root, as soft-RoCE shows it."""

    def __init__(self, root: Path) -> None:
        self._file = root / "sys/class/infiniband/rxe0/ports/1/hw_counters/rcvd_pkts"
        self._file.parent.mkdir(parents=True)
        self._file.write_text("0\n")
        self._lock = threading.Lock()

    def receive(self, nbytes: int) -> None:
        """Little by little, as a slow wire does."""
        for _ in range(PIECES):
            with self._lock:
                number = int(self._file.read_text()) + -(-nbytes // PACKET // PIECES)
                spare = self._file.with_name("spare")
                spare.write_text(f"{number}\n")
                spare.rename(self._file)
            time.sleep(0.02)


class Store:
    """What a ring needs of a store; ``shared`` holds key to value and segment. With ``hca`` bytes cross it."""

    def __init__(self, name: str, shared: dict[str, tuple[bytes, str]], hca: Hca | None) -> None:
        self._name, self._shared, self._hca = name, shared, hca

    def get_hostname(self) -> str:
        return self._name

    def put(self, key: str, value: bytes, config: Any) -> int:
        self._cross(value)
        self._shared[key] = (bytes(value), config.preferred_segment)
        return 0

    def get(self, key: str) -> bytes:
        value = self._shared[key][0]
        self._cross(value)
        return value

    def is_exist(self, key: str) -> int:
        return int(key in self._shared)

    def get_replica_desc(self, key: str) -> list[Any]:
        place = SimpleNamespace(buffer_descriptor=SimpleNamespace(transport_endpoint=self._shared[key][1]))
        return [SimpleNamespace(get_memory_descriptor=lambda: place)]

    def remove(self, key: str, force: bool) -> None:
        pass

    def close(self) -> None:
        pass

    def _cross(self, value: bytes) -> None:
        if self._hca is not None and len(value) > PACKET:
            self._hca.receive(len(value))


@pytest.mark.parametrize("crosses", [True, False])
def test_two_peers_of_one_hca_prove_the_wire_exactly_when_bytes_cross_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crosses: bool
) -> None:
    hca = Hca(tmp_path)
    shared: dict[str, tuple[bytes, str]] = {}
    results: dict[int, Any] = {}
    monkeypatch.setattr(
        ring, "set_up_with_segment", lambda request: Store(request.hostname, shared, hca if crosses else None)
    )

    def run(index: int) -> None:
        place = Ring(token="t", index=index, size=2, payload_bytes=200 * PACKET)
        request = PeerRequest(
            mode="ring",
            master="",
            hostname=f"p{index}",
            protocol="rdma",
            devices=(DEVICE,),
            root=str(tmp_path),
            ring=place,
        )
        time.sleep(0.3 * index)  # the second one comes late: the first must not have begun without it
        results[index] = ring.run_ring(request, time.monotonic() + 20, lambda step: None)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [(one.reason, one.unread, one.unacknowledged) for one in results.values()] == [("", {}, {})] * 2
    assert [one.wire.proven for one in results.values()] == [crosses] * 2, results
