"""--compare: what counts as identical, what it says, what it returns. The runs themselves are replaced."""

import copy
import json

import pytest

from relax_tq_rdma.demo import compare
from relax_tq_rdma.demo.options import parse
from relax_tq_rdma.errors import TransferError

STEP = {"put_s": 0.1, "get_s": 0.2, "fanout_s": 0.3, "step_s": 0.4, "payload_digest": "ab" * 16}
RESULT = {
    "schema": "relax-tq-rdma/demo/1",
    "decision": {"backend": "SimpleStorage", "protocol": "zmq", "device": "", "gdr": False, "fallbacks": []},
    "losses": [0.25, 0.125],
    "payload_digest": "cd" * 16,
    "steps": [STEP, STEP],
}


@pytest.fixture
def runs(monkeypatch):
    """Replaces the two runs by results; returns the results and what the runs were asked for."""
    results, asked = [copy.deepcopy(RESULT), copy.deepcopy(RESULT)], []

    def run_driver(argv, *, capture):
        assert capture
        asked.append(list(argv))
        result = results[len(asked) - 1]
        return (0, json.dumps(result).encode()) if isinstance(result, dict) else (result, b"")

    monkeypatch.setattr(compare, "run_driver", run_driver)
    return results, asked


def run(*argv):
    argv = ["--compare", *argv]
    return compare.compare(argv, parse(argv)[0])


def test_identical_runs_pass_with_a_table(runs, capsys):
    assert run("--steps", "2", "--dataplane-accounting", "summary") == 0
    assert runs[1] == [
        ["--steps", "2", "--json"],
        ["--steps", "2", "--dataplane-accounting", "summary", "--json"],
    ]
    shown = capsys.readouterr().out
    *table, verdict = shown.splitlines()
    assert "\n".join(table).count("identical") == 3
    assert "0.400" in shown
    assert verdict == (
        "identical: every loss and every byte of the payload of 2 steps, today's path on SimpleStorage/zmq, "
        "the chosen one on SimpleStorage/zmq"
    )


def test_another_backend_is_no_difference(runs, capsys):
    runs[0][1]["decision"] |= {"backend": "MooncakeStore", "protocol": "tcp"}
    assert run() == 0
    shown = capsys.readouterr().out
    assert "differ" not in shown.lower()
    assert shown.rstrip().endswith("the chosen one on MooncakeStore/tcp")


def test_a_fallback_is_told_with_the_verdict(runs, capsys):
    step = {
        "from": "MooncakeStore/tcp",
        "to": "SimpleStorage/zmq",
        "reason": "no wheel",
        "node": "a",
        "check": "mooncake",
    }
    runs[0][1]["decision"]["fallbacks"] = [step]
    assert run() == 0
    shown = capsys.readouterr().out
    assert shown.rstrip().endswith("the chosen one on SimpleStorage/zmq after a fallback from MooncakeStore/tcp")


def test_one_bit_fails_and_is_named(runs, capsys):
    runs[0][1]["losses"][1] += 2**-55
    assert run() == 1
    shown = capsys.readouterr()
    assert "DIFFERS" in shown.out
    verdict = shown.out.splitlines()[-1]
    assert verdict == "NOT identical: loss of step 1: 0.125 against 0.12500000000000003"


def test_json_holds_both_results(runs, capsys):
    runs[0][1]["payload_digest"] = "ee" * 16
    assert run("--json") == 1
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert said.err.splitlines()[-1].startswith("NOT identical: payload digest")
    assert document["schema"] == "relax-tq-rdma/demo-compare/1"
    assert document["identical"] is False
    assert document["differences"] == [f"payload digest: {'cd' * 16} against {'ee' * 16}"]
    assert document["today"] == RESULT


def test_a_failed_run_is_no_comparison(runs):
    runs[0][1] = 1
    with pytest.raises(TransferError, match="chosen path failed with exit code 1"):
        run()
