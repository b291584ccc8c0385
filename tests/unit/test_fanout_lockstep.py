"""The ranks of a cohort act on one answer: ranks are threads, the collective is a barrier (RFC §4.5)."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from relax_tq_rdma.errors import TransferError
from relax_tq_rdma.fanout.client import FetchClient
from relax_tq_rdma.fanout.lockstep import Lockstep

DEADLINE = 20.0
NOTHING = SimpleNamespace(size=0, extra_info={}, global_indexes=[])
END = SimpleNamespace(size=0, extra_info={"stream_end": True}, global_indexes=[])
DUMMY = SimpleNamespace(size=0, extra_info={"dummy_round": True}, global_indexes=[])


def rows(*indexes: int) -> SimpleNamespace:
    return SimpleNamespace(size=len(indexes), extra_info={}, global_indexes=list(indexes))


class Ranks:
    """A cohort of threads. ``collectives`` counts for each rank how often it took part."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.collectives = [0] * size
        self._barrier = threading.Barrier(size)
        self._values: list[Any] = [None] * size

    def cohort(self, rank: int) -> Any:
        def all_of(value: Any) -> list[Any]:
            self._values[rank] = value
            self.collectives[rank] += 1
            self._barrier.wait(DEADLINE)
            values = list(self._values)
            self._barrier.wait(DEADLINE)
            return values

        def minimum(values: Sequence[int]) -> list[int]:
            return [int(min(column)) for column in zip(*all_of(values), strict=True)]

        return SimpleNamespace(minimum=minimum, gather=all_of)

    def run(self, main: Callable[[int, Lockstep], Any], limit_s: float = DEADLINE) -> list[Any]:
        """What each rank returned or raised."""
        results: list[Any] = [None] * self.size

        def rank_main(rank: int) -> None:
            try:
                results[rank] = main(rank, Lockstep(self.cohort(rank), limit_s, sleep=lambda seconds: None))
            except Exception as exc:
                results[rank] = exc

        threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE + 5)
        assert not any(thread.is_alive() for thread in threads), "a rank is alone in a collective"
        assert len(set(self.collectives)) == 1
        return results


def script(*answers: Any) -> Callable[[], Any]:
    """Answers one after the other, the last one for ever; an exception is raised."""
    left = list(answers)

    def ask() -> Any:
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return ask


def test_equal_answers_cost_one_collective() -> None:
    for answer in (rows(3, 1), NOTHING, END, DUMMY, None):
        ranks = Ranks(4)
        assert ranks.run(lambda rank, step, answer=answer: step.ask(script(answer), "p")) == [answer] * 4
        assert ranks.collectives == [1] * 4


def test_who_was_told_nothing_asks_again_until_it_has_the_rows_of_the_others() -> None:
    given = rows(7, 8)
    asked = [script(given), script(NOTHING, NOTHING, given), script(None, given), script(given)]
    assert Ranks(4).run(lambda rank, step: step.ask(asked[rank], "p")) == [given] * 4


@pytest.mark.parametrize("decided", [END, DUMMY])
def test_the_kind_of_nothing_is_agreed_on_too(decided: Any) -> None:
    """The newest host ends a stream, or trains on a dummy, by what the empty metadata says."""
    asked = [script(decided), script(NOTHING, decided)]
    assert Ranks(2).run(lambda rank, step: step.ask(asked[rank], "p")) == [decided] * 2


def test_different_rows_are_refused_on_every_rank() -> None:
    for other in (rows(2, 1), rows(1, 2, 3), rows(1, 4)):
        asked = [script(rows(1, 2)), script(other)]
        results = Ranks(2).run(lambda rank, step, asked=asked: step.ask(asked[rank], "partition train_3"))
        assert {str(result) for result in results} == {
            "ranks of one cohort were given different rows of partition train_3: the job's sampler does not repeat "
            "itself for a DP rank and batch index; use --tq-per-rank-fetch off"
        }


def test_a_lasting_split_ends_in_a_sentence_on_every_rank() -> None:
    asked = [script(rows(1)), script(NOTHING)]
    results = Ranks(2).run(lambda rank, step: step.ask(asked[rank], "partition train_3"), limit_s=0.05)
    assert all(isinstance(result, TransferError) for result in results)
    assert "told different things about partition train_3 for 0.05 s" in str(results[0])
    assert str(results[0]) == str(results[1])


def test_a_failed_question_fails_every_rank_with_its_cause() -> None:
    for asked in ([script(OSError("gone")), script(rows(1))], [script(NOTHING, OSError("gone")), script(rows(1))]):
        cause, other = Ranks(2).run(lambda rank, step, asked=asked: step.ask(asked[rank], "partition p"))
        assert isinstance(cause, OSError)
        assert isinstance(other, TransferError)
        assert str(other) == "another rank of this cohort failed to ask for partition p: OSError: gone"


def test_a_failed_get_fails_every_rank() -> None:
    taken = [script({"a": 1}), script(OSError("gone")), script({"a": 1})]
    results = Ranks(3).run(lambda rank, step: step.take(taken[rank], "rows of partition p"))
    assert [type(result) for result in results] == [TransferError, OSError, TransferError]
    assert str(results[0]) == "another rank of this cohort failed to get rows of partition p: OSError: gone"
    assert Ranks(2).run(lambda rank, step: step.take(script(rank), "p")) == [0, 1]


class Sampler:
    """TransferQueue's: rows that come one by one, and what was given once is given again."""

    def __init__(self, produced: Callable[[], int]) -> None:
        self._produced = produced
        self._given: dict[int, Any] = {}
        self._lock = threading.Lock()

    def get_meta(self, batch_index: int) -> Any:
        with self._lock:
            if batch_index not in self._given and self._produced() >= 2 * (batch_index + 1):
                self._given[batch_index] = rows(2 * batch_index, 2 * batch_index + 1)
            return self._given.get(batch_index, NOTHING)


@pytest.mark.parametrize("seed", range(20))
def test_a_producer_slower_than_its_consumers_never_splits_the_cohort(seed: int) -> None:
    """Each rank polls for ten batches; which rank is told what is up to a producer that puts at random moments."""
    rng = random.Random(seed)
    produced, lock = [0], threading.Lock()

    def now() -> int:
        with lock:
            produced[0] += rng.random() < 0.2
            return produced[0]

    sampler = Sampler(now)

    def main(rank: int, step: Lockstep) -> list[Any]:
        seen = []
        while len(seen) < 10:
            meta = step.ask(lambda: sampler.get_meta(len(seen)), "p")
            if meta.size:
                seen.append(step.take(lambda meta=meta: meta.global_indexes, "p"))
        return seen

    expected = [[2 * i, 2 * i + 1] for i in range(10)]
    assert Ranks(4).run(main) == [expected] * 4


# The client that the host's fetch function gets


class Client:
    name = "rank 0"

    def __init__(self, *answers: Any) -> None:
        self._ask = script(*answers)
        self.asked: list[Any] = []

    def get_meta(self, *args: Any, **named: Any) -> Any:
        self.asked.append((args, named))
        return self._ask()

    def get_data(self, metadata: Any) -> Any:
        return metadata.global_indexes


def test_the_client_passes_on_what_it_is_asked_and_tells_when_there_are_rows() -> None:
    told = []
    client = Client(NOTHING, None, rows(1, 2))
    fetching = FetchClient(client, None, "train_0", lambda: told.append("rows"))
    assert fetching.get_meta(["tokens"], batch_size=2) is NOTHING
    assert fetching.get_meta() is None
    assert not told
    meta = fetching.get_meta(partition_id="train_0")
    assert told == ["rows"]
    assert fetching.get_data(meta) == [1, 2]
    assert client.asked == [((["tokens"],), {"batch_size": 2}), ((), {}), ((), {"partition_id": "train_0"})]
    assert fetching.name == "rank 0"
    with pytest.raises(AttributeError):
        _ = fetching.no_such_method


def test_with_a_cohort_it_is_in_step() -> None:
    clients = [Client(rows(5)), Client(NOTHING, rows(5))]

    def main(rank: int, step: Lockstep) -> Any:
        fetching = FetchClient(clients[rank], step, "train_0", lambda: None)
        return fetching.get_data(fetching.get_meta())

    assert Ranks(2).run(main) == [[5], [5]]
    assert [len(client.asked) for client in clients] == [1, 2]
