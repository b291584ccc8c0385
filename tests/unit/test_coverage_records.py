"""What processes say of themselves, how it is compared, and how people and programs see it."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest

from relax_tq_rdma import StartError, UsageError
from relax_tq_rdma.coverage import board, cli
from relax_tq_rdma.coverage.board import Board
from relax_tq_rdma.coverage.cli import Status, of_the_running_job
from relax_tq_rdma.coverage.compare import alike, differences
from relax_tq_rdma.coverage.nodes import judge
from relax_tq_rdma.coverage.records import JobRecord, PoolLevel, ProcessRecord, StartRecord, decode
from relax_tq_rdma.transport.report import Decision, Fallback

STEP = Fallback(from_="MooncakeStore/rdma", to="MooncakeStore/tcp", reason="no HCA", node="b", check="rdma_device")
JOB = JobRecord(
    job="j1",
    plugin="1.0",
    start_line="[dataplane] backend=...",
    settings={"accounting": "summary"},
    decision=Decision(backend="MooncakeStore", protocol="tcp", fallbacks=(STEP,)),
    driver="pid 1 on a",
    nodes=2,
    started=1000.0,
)


def process(**changes: Any) -> ProcessRecord:
    base = ProcessRecord(
        job="j1",
        role="RolloutManager",
        node="a",
        node_id="n1",
        pid=7,
        start_ticks=70,
        plugin="1.0",
        transfer_queue="0.1.11",
        mooncake="0.3.13",
        seams={"T1": "taken", "T2": "taken", "R2": "taken", "R3": "waiting"},
        backend="MooncakeStore",
        protocol="tcp",
        joined=1001.0,
        written=1010.0,
    )
    return msgspec.structs.replace(base, **changes)


RANK = process(role="MegatronTrainRayActor rank 3", pid=8, node="b", node_id="n2", seams={"T1": "taken", "T2": "taken"})


def test_alike() -> None:
    assert differences(JOB, [process(), RANK], now=1015.0) == []
    assert alike([process(), RANK]) == "2 processes on 2 nodes, seams R2 T1 T2"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"plugin": "0.9"}, "runs relax-tq-rdma 0.9, the driver 1.0: install the same version"),
        ({"transfer_queue": "0.1.10"}, "has TransferQueue 0.1.10, the others 0.1.11: install the same version"),
        ({"mooncake": ""}, "has Mooncake of unknown version, the others 0.3.13: install the same version"),
        ({"protocol": "rdma"}, "uses MooncakeStore/rdma, the job MooncakeStore/tcp"),
        ({"backend": "SimpleStorage", "protocol": "zmq"}, "uses SimpleStorage/zmq, the job MooncakeStore/tcp"),
        ({"seams": {"T1": "taken", "T2": "failed"}}, "runs without seam T2: its log says why"),
        ({"notes": ("row 3 has format RTQ2",)}, ": row 3 has format RTQ2"),
        ({"written": 980.0}, "has said nothing for 35 s: it was killed, or is stuck in native code"),
    ],
)
def test_one_that_differs_is_named(changes: dict[str, Any], said: str) -> None:
    odd = process(role="Advantages", pid=9, **changes)
    [sentence] = differences(JOB, [process(), RANK, odd], now=1015.0)
    assert sentence.startswith("Advantages (pid 9 on a)")
    assert sentence.endswith(said)


def test_at_the_start_nobody_is_late() -> None:
    assert differences(JOB, [process(written=0.0)]) == []


def test_records_go_over_the_board_as_json_and_come_back_equal() -> None:
    full = process(pool=PoolLevel(capacity=5, held=1, peak=2, misses=3), counts={"rows put raw": 2}, notes=("n",))
    for record in (full, JOB, START):
        assert decode(record.key, msgspec.json.encode(record)) == record


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b"no json", "cannot be read"),
        (b'{"schema": 1}', "cannot be read"),
        (b'{"schema": 2, "what": "of later"}', "has schema 2, this version of relax-tq-rdma reads 1"),
        (msgspec.json.encode(process(pid=1)), "is of j1/n1/1-70"),
    ],
)
def test_a_record_that_cannot_be_read_is_a_sentence(value: bytes, said: str) -> None:
    found = decode("j1/n1/7-70", value)
    assert isinstance(found, str)
    assert "j1/n1/7-70" in found
    assert said in found


def test_a_record_of_a_later_version_with_more_in_it_is_read() -> None:
    plain = {**msgspec.to_builtins(process()), "of_later": 1}
    assert decode(process().key, msgspec.json.encode(plain)) == process()


# --- status -----------------------------------------------------------------------------------------------------------


def test_the_job_that_was_started_last_is_shown_with_its_own_processes() -> None:
    old = msgspec.structs.replace(JOB, job="j0", started=1.0)
    found = Board([JOB, old], (), [process(job="j0"), RANK], ["record x cannot be read"])
    status = of_the_running_job(found, now=1015.0)
    assert (status.job, list(status.processes)) == (JOB, [RANK])
    assert list(status.differences) == ["record x cannot be read"]


def test_a_job_whose_processes_speak_goes_before_one_that_was_killed_since() -> None:
    killed = msgspec.structs.replace(JOB, job="j9", started=1002.0)
    silent = process(job="j9", written=980.0)
    assert of_the_running_job(Board([JOB, killed], (), [silent, RANK]), now=1015.0).job == JOB
    assert of_the_running_job(Board([JOB, killed], (), [silent]), now=1015.0).job == killed


def test_no_job_is_an_error_with_the_way_out() -> None:
    with pytest.raises(StartError, match=r"no job with the plugin runs .* none is starting .* set RAY_ADDRESS"):
        of_the_running_job(Board([]), now=0.0)


START = StartRecord(job="j2", plugin="1.0", driver="pid 4 on a", began=1003.0)


def test_a_job_that_is_starting_is_named_with_its_driver_and_since_when() -> None:
    for jobs in ([], [JOB]):  # j1 was killed and has left its record
        with pytest.raises(StartError) as error:
            of_the_running_job(Board(jobs, [START]), now=1015.0)
        assert str(error.value).startswith("job j2 has been starting for 12 s (driver pid 4 on a): ")


def test_a_job_that_runs_is_shown_while_a_second_one_is_about_to_be_refused() -> None:
    assert of_the_running_job(Board([JOB], [START], [RANK]), now=1015.0).job == JOB


def test_a_job_that_has_started_is_starting_no_more() -> None:
    begun = msgspec.structs.replace(START, job="j1")
    assert of_the_running_job(Board([JOB], [begun]), now=1015.0).job == JOB


def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *argv: str, **changes: Any) -> Any:
    processes = [process(pool=PoolLevel(capacity=128 << 20, held=3 << 20, peak=9 << 20, misses=4), **changes), RANK]
    status = Status(JOB, processes, differences(JOB, processes, now=1015.0), 1015.0)
    monkeypatch.setattr(cli, "look", lambda: status)
    code = cli.run(list(argv))
    return code, capsys.readouterr().out


def test_people_see_every_column_in_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    code, out = shown(capsys, monkeypatch, counts={"rows put raw": 2})
    assert code == 0
    [line] = [line for line in out.splitlines() if line.startswith("RolloutManager")]
    assert " ".join(line.split()) == (
        "RolloutManager a 7 1.0 R2 T1 T2 MooncakeStore/tcp 3/9/128 rows put raw 2, pool misses 4"
    )
    assert out.startswith("job j1, driver pid 1 on a, up for 15 s, relax-tq-rdma 1.0\n")
    assert "fallback MooncakeStore/rdma -> MooncakeStore/tcp: no HCA (b, rdma_device)" in out
    assert out.rstrip().endswith("ok  2 processes on 2 nodes, seams R2 T1 T2, all alike")


def test_a_difference_is_the_exit_code(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out = shown(capsys, monkeypatch, plugin="0.9")
    assert code == 1
    assert "DIFFERS  RolloutManager (pid 7 on a) runs relax-tq-rdma 0.9" in out


def test_programs_get_one_object(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out = shown(capsys, monkeypatch, "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["schema"], found["differences"]) == (1, [])
    assert found["job"]["decision"]["fallbacks"][0]["check"] == "rdma_device"
    assert found["processes"][0]["name"] == "RolloutManager (pid 7 on a)"
    assert found["processes"][0]["silent_s"] == 5.0
    assert found["processes"][0]["pool"]["peak"] == 9 << 20


def test_wrong_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"unknown flag --jsn: did you mean --json\?"):
        cli.run(["--jsn"])
    with pytest.raises(UsageError, match="see relax-tq-rdma status --help"):
        cli.run(["6f0c2a9b"])


# --- board ------------------------------------------------------------------------------------------------------------


class Store:
    """Ray's key-value store as the board calls it."""

    def __init__(self, **values: bytes) -> None:
        self.values = {key.encode(): value for key, value in values.items()}

    def _internal_kv_list(self, prefix: str, namespace: bytes) -> list[bytes]:
        return [key for key in self.values if key.startswith(prefix.encode())]

    def _internal_kv_get(self, key: bytes, namespace: bytes) -> bytes | None:
        return self.values.get(key)

    def _internal_kv_del(self, key: bytes, namespace: bytes) -> None:
        del self.values[key]


def test_records_of_other_jobs_go_also_when_they_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(**{"old/job": b'{"schema": 99}', "old/n/1-2": b"", "new/n/1-2": b"{}"})
    monkeypatch.setattr(board, "_kv", lambda: store)
    assert len(board.read().problems) == 3
    board.remove_others("new")
    assert list(store.values) == [b"new/n/1-2"]


def test_a_process_without_ray_cannot_reach_the_board() -> None:
    started = time.monotonic()
    with pytest.raises(board.Unreachable, match="not connected to Ray"):
        board.put(process())
    assert time.monotonic() - started < 5


# --- nodes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"version": "1", "ready": True}, ""),
        ({"version": "1", "ready": False}, "call relax_tq_rdma.install(args) before ray.init"),
        ({"problem": "ModuleNotFoundError: no relax_tq_rdma"}, "ModuleNotFoundError: no relax_tq_rdma; install"),
        (None, "no worker answered within 3 s"),
        (RuntimeError("died"), "RuntimeError: died"),
    ],
)
def test_what_a_node_answers(answer: Any, said: str) -> None:
    assert said in judge(answer, 3.0)
    assert bool(said) == bool(judge(answer, 3.0))
