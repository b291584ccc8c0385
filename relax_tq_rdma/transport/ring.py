"""The byte round trip between nodes, from one peer's point of view (RFC §4.2.2, point 3; design §5 "Verify").

Every peer puts a pattern into its *own* segment, reads its neighbours' patterns on both sides and compares them byte
for byte; then it writes an acknowledgement into the neighbour's segment and waits for those in its own. So each pair
of neighbours moves bytes by read and by write, both ways, and nobody closes a segment that somebody still reads.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relax_tq_rdma.transport.native import (
    ANY_KEY,
    RPC_FAILED,
    NativeError,
    PeerRequest,
    PeerResult,
    Ring,
    set_up_with_segment,
)
from relax_tq_rdma.transport.sysfs import Tree
from relax_tq_rdma.transport.wire import Counter, judge, read_counters

_POLL_SECONDS = 0.02
_QUIET_SECONDS = 0.1
_REFUSED = b"refused"


def neighbours(index: int, size: int) -> tuple[int, ...]:
    """The peers before and after, once each: ring of one none, of two one, else two."""
    return tuple(dict.fromkeys(i % size for i in (index - 1, index + 1) if i % size != index))


def pattern(ring: Ring, index: int, nbytes: int) -> bytes:
    """Bytes that every peer can compute and nobody else left behind by chance: no zero tail, no repetition."""
    return random.Random(f"{ring.token}:{index}").randbytes(nbytes)


def difference(got: bytes, want: bytes) -> str:
    """Where two byte strings part, in words; empty when they are equal."""
    if got == want:
        return ""
    if len(got) != len(want):
        return f"{len(got)} bytes came instead of {len(want)}"
    at = next(i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b)
    zeros = ", all zeros from there on" if not any(got[at:]) else ""
    return f"bytes differ from offset {at} of {len(want)}{zeros}"


def run_ring(request: PeerRequest, ends: float, step: Callable[[str], None]) -> PeerResult:
    """Take part in one ring until ``ends`` (``time.monotonic``).

    Raises:
        NativeError: this peer could not take part at all. A neighbour that fails is in the result instead.
    """
    assert request.ring is not None
    step("set-up")
    store = set_up_with_segment(request)
    peer = _Peer(store, request, request.ring, ends)
    try:
        step("listening to the idle wire")
        peer.listen_to_idle_wire()
        step("putting its own pattern")
        endpoint = peer.put_own()
        step("reading its neighbours")
        return peer.exchange(endpoint)
    finally:
        peer.close()


class _Peer:
    def __init__(self, store: Any, request: PeerRequest, ring: Ring, ends: float) -> None:
        self.store = store
        self.request = request
        self.ring = ring
        self.ends = ends
        self.tree = Tree(Path(request.root))
        self.own = str(store.get_hostname())
        self.idle: tuple[tuple[Counter, ...], tuple[Counter, ...]] = ((), ())
        self.idle_seconds = 0.0

    def listen_to_idle_wire(self) -> None:
        """How much others than this ring receive on the HCAs. Peers of one node share them, so nobody moves a pattern
        before its neighbours have listened, too."""
        if self.request.protocol != "rdma":
            return
        self._meet("here")
        first, since = self._counters(), time.monotonic()
        time.sleep(_QUIET_SECONDS)
        self.idle, self.idle_seconds = (first, self._counters()), time.monotonic() - since
        self._meet("listened")

    def key(self, owner: int, what: str) -> str:
        return f"rtq_verify/{self.ring.token}/{owner}/{what}"

    def put_own(self) -> str:
        """Put pattern and segment name into this peer's own segment; returns where the pattern really lies."""
        data = pattern(self.ring, self.ring.index, self.ring.payload_bytes)
        self._put(self.key(self.ring.index, "data"), data, self.own)
        self._put(self.key(self.ring.index, "segment"), self.own.encode(), self.own)
        return self._endpoint(self.key(self.ring.index, "data"))

    def exchange(self, endpoint: str) -> PeerResult:
        around = neighbours(self.ring.index, self.ring.size)
        unread: dict[int, str] = {}
        ready = [i for i in around if self._await(self.key(i, "segment"))]
        unread.update({i: "its pattern did not appear in time" for i in around if i not in ready})
        before, start = self._counters(), time.monotonic()
        for i in ready:
            unread.update(self._read(i, endpoint))
        after, end = self._counters(), time.monotonic()
        good = [i for i in ready if i not in unread]
        wire = None
        if self.request.protocol == "rdma" and good:
            fetched = len(good) * self.ring.payload_bytes
            wire = judge(
                before,
                after,
                fetched,
                quiet=self.idle,
                quiet_seconds=self.idle_seconds,
                transfer_seconds=end - start,
            )
        for i in ready:
            unread.update(self._acknowledge(i, accepted=i not in unread))
        missing = {i: why for i in around if (why := self._acknowledged_by(i))}
        return PeerResult(unread=unread, unacknowledged=missing, endpoint=endpoint, wire=wire)

    def close(self) -> None:
        """Take the segment back, so that nobody is given room in it; a dead master would take 10 s to say nothing."""
        if self.store.is_exist(ANY_KEY) < 0:
            return
        acknowledged = (f"ack-{i}" for i in neighbours(self.ring.index, self.ring.size))
        for what in ("here", "listened", "data", "segment", *acknowledged):
            self.store.remove(self.key(self.ring.index, what), True)
        self.store.close()

    def _meet(self, what: str) -> None:
        """Wait until the neighbours have come as far; one that does not come is noticed at its pattern."""
        self._put(self.key(self.ring.index, what), b"1", self.own)
        for i in neighbours(self.ring.index, self.ring.size):
            self._await(self.key(i, what))

    def _counters(self) -> tuple[Counter, ...]:
        if self.request.protocol != "rdma":
            return ()
        return read_counters(self.tree, [device.name for device in self.request.devices])

    def _read(self, i: int, own_endpoint: str) -> dict[int, str]:
        key = self.key(i, "data")
        if self._endpoint(key) == own_endpoint:
            return {i: "its pattern was put into the reader's own segment, so nothing crossed"}
        wrong = difference(self.store.get(key), pattern(self.ring, i, self.ring.payload_bytes))
        return {i: wrong} if wrong else {}

    def _acknowledge(self, i: int, accepted: bool) -> dict[int, str]:
        """Write into the neighbour's segment. What it finds there tells it whether its pattern came over."""
        body = self._acknowledgement(i, self.ring.index) if accepted else _REFUSED
        segment = self.store.get(self.key(i, "segment")).decode("ascii", "replace")
        try:
            self._put(self.key(i, f"ack-{self.ring.index}"), body, segment)
        except NativeError as exc:
            return {i: f"writing into its segment failed: {exc}"}
        return {}

    def _acknowledged_by(self, i: int) -> str:
        key = self.key(self.ring.index, f"ack-{i}")
        if not self._await(key):
            return "it did not write an acknowledgement in time"
        got = bytes(self.store.get(key))
        if got == _REFUSED:
            return "it could not read this peer's pattern"
        return difference(got, self._acknowledgement(self.ring.index, i))

    def _acknowledgement(self, owner: int, writer: int) -> bytes:
        return pattern(self.ring, owner * self.ring.size + writer + self.ring.size, 65536)

    def _put(self, key: str, value: bytes, segment: str) -> None:
        from mooncake.store import ReplicateConfig

        config = ReplicateConfig()
        config.preferred_segment = segment
        config.with_hard_pin = True
        code = self.store.put(key, value, config)
        if code != 0:
            raise NativeError(
                f"put of {len(value)} bytes gave error code {code}", "master" if code == RPC_FAILED else "verify"
            )

    def _endpoint(self, key: str) -> str:
        descriptors = self.store.get_replica_desc(key)
        if not descriptors:
            raise NativeError(f"the master knows no place of {key}", "verify")
        return str(descriptors[0].get_memory_descriptor().buffer_descriptor.transport_endpoint)

    def _await(self, key: str) -> bool:
        while True:
            code = self.store.is_exist(key)
            if code == 1:
                return True
            if code < 0:
                raise NativeError(f"mooncake_master {self.request.master} stopped answering (code {code})", "master")
            if time.monotonic() >= self.ends:
                return False
            time.sleep(_POLL_SECONDS)
