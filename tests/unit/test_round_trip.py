"""The byte round trip of verification against a controller that lists more rows than were put: its partition has rows
made in advance (``TQ_PRE_ALLOC_SAMPLE_NUM``, which the host sets), and nobody ever fills them."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from transfer_queue import BatchMeta, interface

from relax_tq_rdma.seams import tq_state

PARTITION = "rtq_verify_0"


class Client:
    """As TransferQueue's, as far as a round trip asks it. ``spare``: rows of the partition that nobody puts.

    ``loses``: how many of the put rows never become ready; ``forgets``: whether the controller drops one once it is
    ready; ``damages``: whether a byte changes on the way.
    """

    def __init__(self, spare: list[int], *, loses: int = 0, forgets: bool = False, damages: bool = False) -> None:
        self._spare, self._loses, self._forgets, self._damages = spare, loses, forgets, damages
        self._rows: dict[int, torch.Tensor] = {}

    def put(self, data: TensorDict, partition_id: str) -> BatchMeta:
        first = max(self._spare, default=-1) + 1
        self._rows = {first + at: row.clone() for at, row in enumerate(data["rtq_verify"].unbind())}
        return self._meta(list(self._rows))

    def get_production_status(self, data_fields: list[str], partition_id: str) -> tuple[torch.Tensor, torch.Tensor]:
        ready = [*[0] * len(self._spare), *[1] * (len(self._rows) - self._loses), *[0] * self._loses]
        return torch.tensor([*self._spare, *self._rows]), torch.tensor(ready).unsqueeze(1)

    def get_meta(self, **asked: Any) -> BatchMeta:
        assert asked["mode"] == "force_fetch"
        listed = [*self._spare, *reversed(self._rows)]
        return self._meta(listed[:-1] if self._forgets else listed)

    def get_data(self, meta: BatchMeta) -> TensorDict:
        rows = torch.stack([self._rows[index] for index in meta.global_indexes])  # a spare row has no bytes to get
        if self._damages:
            rows[-1, -1] += 1
        return TensorDict({"rtq_verify": rows}, batch_size=[len(rows)])

    def clear_partition(self, partition_id: str) -> None:
        self._rows = {}

    def get_partition_list(self) -> list[str]:
        return [PARTITION] if self._rows else ["train_0"]

    @staticmethod
    def _meta(indexes: list[int]) -> BatchMeta:
        return BatchMeta(global_indexes=indexes, partition_ids=[PARTITION] * len(indexes))


def round_trip(monkeypatch: pytest.MonkeyPatch, client: Client, seconds: float = 5.0) -> str:
    monkeypatch.setattr(interface, "_TQ_CLIENT", client)
    return tq_state.round_trip(PARTITION, time.monotonic() + seconds)


@pytest.mark.parametrize("spare", [[], [0], list(range(40))], ids=["none", "one", "forty"])
def test_only_the_rows_that_were_put_are_waited_for_and_read(monkeypatch: pytest.MonkeyPatch, spare: list[int]) -> None:
    assert round_trip(monkeypatch, Client(spare)) == ""


@pytest.mark.parametrize(
    ("client", "said"),
    [
        (Client([0, 1], loses=1), "the rows were put and the controller never reported them ready"),
        (Client([0, 1], forgets=True), "2 rows were put, the controller lists 1 of them no more"),
        (Client([0, 1], damages=True), "1 of 2 rows came back with other bytes"),
    ],
    ids=["lost", "forgotten", "damaged"],
)
def test_what_happened_to_them_is_said(monkeypatch: pytest.MonkeyPatch, client: Client, said: str) -> None:
    assert round_trip(monkeypatch, client, seconds=0.2) == said
    assert PARTITION not in client.get_partition_list()


def test_a_process_without_a_client_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "_TQ_CLIENT", None)
    assert tq_state.round_trip(PARTITION, time.monotonic()) == "this process has no TransferQueue client"
