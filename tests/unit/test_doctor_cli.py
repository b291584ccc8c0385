"""``relax-tq-rdma doctor`` on made-up trees: exit codes, JSON, 80 columns, bad input."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relax_tq_rdma import Settings, StartError, UsageError
from relax_tq_rdma.compat import RULES
from relax_tq_rdma.doctor import examine as examining
from relax_tq_rdma.doctor.cli import run
from relax_tq_rdma.doctor.examine import Diagnosis, examine, progress, variables
from relax_tq_rdma.doctor.options import parse
from relax_tq_rdma.doctor.render import render
from relax_tq_rdma.flags import FLAGS
from relax_tq_rdma.seams import SeamReport
from relax_tq_rdma.summary import parse_start_line
from relax_tq_rdma.transport import probe
from relax_tq_rdma.transport.mooncake_facts import MooncakeFacts
from relax_tq_rdma.transport.probe import probe_node
from relax_tq_rdma.transport.report import CHECKS, NodeReport
from tests.fake_tree import FakeTree, as_nobody, healthy, public_folder

MOONCAKE = ["--tq-storage-backend", "mooncake", "--tq-mooncake-auto-init", "job-owned"]
AUTO = [*MOONCAKE, "--tq-transport", "rdma", "--tq-rdma-mode", "auto"]
REQUIRED = [*MOONCAKE, "--tq-transport", "rdma", "--tq-rdma-mode", "required"]


def seam(**changes: Any) -> SeamReport:
    return SeamReport(
        **{"name": "T1", "ok": True, "installed": "TransferQueue 0.1.11", "expected": "init()", **changes}
    )


@pytest.fixture(autouse=True)
def _calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mooncake's child process has its own tests; nothing of the caller's environment leaks in."""
    facts = MooncakeFacts(version="0.3.13.post1", distribution="mooncake-transfer-engine", lazy_mount=True)
    monkeypatch.setattr(probe, "inspect_mooncake", lambda limit, **_: facts)
    monkeypatch.setattr(
        examining, "reports", lambda settings: [seam()]
    )  # the real ones import torch: see the integration tests
    for name in ("MC_STORE_MEMCPY", "MC_GID_INDEX", "NCCL_IB_GID_INDEX", "COLUMNS", "RTQ_SYSTEM_ROOT"):
        monkeypatch.delenv(name, raising=False)


def data(capsys: pytest.CaptureFixture[str], root: Path, *argv: str) -> tuple[int, dict[str, Any]]:
    code = run(["--json", "--root", str(root), *argv])
    return code, json.loads(capsys.readouterr().out)


# --- JSON ---


def test_json_has_the_promised_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = data(capsys, healthy(tmp_path / "gpu-node-7").root, *AUTO)
    assert code == 0
    assert list(out) == [
        "schema",
        "ok",
        "nodes",
        "decision",
        "refusal",
        "start_line",
        "matrix",
        "seams",
        "memory_plan",
        "capabilities",
        "variables",
    ]
    assert (out["schema"], out["ok"], out["refusal"]) == (1, True, "")
    (node,) = out["nodes"]
    assert node["node"] == "gpu-node-7"
    assert [c["name"] for c in node["checks"]] == list(CHECKS)
    assert all(set(c) == {"name", "status", "evidence", "fix"} for c in node["checks"])
    assert out["decision"] == {
        "backend": "MooncakeStore",
        "protocol": "rdma",
        "device": "",
        "gdr": False,
        "fallbacks": [],
    }
    assert node["devices"][0]["gid_index"] == 3
    assert out["memory_plan"][0]["segments"] == "producers"
    assert parse_start_line(out["start_line"])["probe"] == "1/1 nodes ok"


BROKEN: dict[str, Callable[[FakeTree], Any]] = {
    "rdma_device": lambda tree: tree.without_rdma(),
    "rdma_port": lambda tree: tree.port_state("2: INIT"),
    "rdma_gid": lambda tree: tree.zero_gids(),
    "memlock": lambda tree: tree.memlock(65536),
}


@pytest.mark.parametrize("check", sorted(BROKEN))
def test_auto_degrades_loudly_and_names_node_and_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], check: str
) -> None:
    tree = healthy(tmp_path / "node-3")
    BROKEN[check](tree)
    code, out = data(capsys, tree.root, *AUTO)
    assert (code, out["ok"]) == (0, True)
    (step,) = out["decision"]["fallbacks"]
    assert set(step) == {"from", "to", "reason", "node", "check"}
    assert (step["from"], step["to"]) == ("MooncakeStore/rdma", "MooncakeStore/tcp")
    assert (step["node"], step["check"]) == ("node-3", check)
    evidence = next(c["evidence"] for c in out["nodes"][0]["checks"] if c["name"] == check)
    assert step["reason"].startswith(evidence[:60])
    run(["--root", str(tree.root), *AUTO])
    shown = capsys.readouterr().out
    assert "DEGRADED: the job would start on MooncakeStore/tcp, not on MooncakeStore/rdma" in shown


@pytest.mark.parametrize("check", sorted(BROKEN))
def test_required_refuses_with_exit_1(tmp_path: Path, capsys: pytest.CaptureFixture[str], check: str) -> None:
    tree = healthy(tmp_path / "node-3")
    BROKEN[check](tree)
    code, out = data(capsys, tree.root, *REQUIRED)
    assert (code, out["ok"], out["start_line"]) == (1, False, "")
    assert out["decision"]["backend"] is None
    assert f"{check} on node-3" in out["refusal"]


def test_a_memlock_limit_is_compared_with_the_jobs_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = healthy(tmp_path).memlock(2**30).root
    assert data(capsys, root, *REQUIRED)[0] == 1
    monkeypatch.setenv("RTQ_SEGMENT_MB", "256")
    monkeypatch.setenv("RTQ_LOCAL_BUFFER_MB", "64")
    assert data(capsys, root, *REQUIRED)[0] == 0


def test_a_job_without_mooncake_shows_what_the_node_could_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = data(capsys, healthy(tmp_path).gpus(2).root)
    assert code == 0
    assert {c["status"] for c in out["nodes"][0]["checks"]} == {"skipped"}
    assert {c["status"] for c in out["capabilities"][0]["checks"]} == {"ok"}
    assert out["decision"]["backend"] == "SimpleStorage"
    assert out["memory_plan"] == []


def test_flags_that_contradict_one_another_do_not_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, as the job's."""
    code, out = data(capsys, healthy(tmp_path).root, "--tq-transport", "rdma")
    assert (code, out["ok"], out["decision"]["backend"]) == (2, False, None)
    assert "--tq-transport rdma" in out["refusal"]
    assert [m["verdict"] for m in out["matrix"]] == ["reject"]
    run(["--root", str(tmp_path), "--tq-transport", "rdma"])
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count(out["refusal"]) == 1, "the sentence stands beside its rule, and is not repeated"
    assert shown.endswith("the job would NOT START: its flags cannot go together (see reject above)")


def test_a_seam_that_does_not_fit_stops_the_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = seam(ok=False, found="no init")
    monkeypatch.setattr(examining, "reports", lambda settings: [seam(name="T2"), bad])
    root = healthy(tmp_path).root
    code, out = data(capsys, root, *AUTO)
    assert (code, out["ok"], out["refusal"]) == (1, False, bad.text)
    assert [s["ok"] for s in out["seams"]] == [True, False]
    run(["--root", str(root), *AUTO])
    shown = " ".join(capsys.readouterr().out.split())
    assert "FAILED seam T1 does not fit TransferQueue 0.1.11" in shown
    assert shown.endswith("the job would NOT START: a seam does not fit (see FAILED above)")
    code, out = data(capsys, root)
    assert (code, out["seams"]) == (0, []), "with all layers off nobody looks"


def test_transfer_queue_that_cannot_be_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(settings: Settings) -> list[SeamReport]:
        print("noise of a library")
        raise ImportError("No module named 'transfer_queue'")

    monkeypatch.setattr(examining, "reports", fails)
    code, out = data(capsys, healthy(tmp_path).root, "--dataplane-accounting", "summary")
    assert code == 1
    assert "No module named 'transfer_queue'" in out["refusal"]


def test_a_master_that_does_not_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--tq-storage-backend", "mooncake", "--tq-mooncake-master-address", "127.0.0.1:1"]
    code, out = data(capsys, healthy(tmp_path).root, *argv)
    assert code == 0
    assert out["decision"]["backend"] == "SimpleStorage"
    assert "master 127.0.0.1:1: connection refused" in out["decision"]["fallbacks"][0]["reason"]
    with pytest.raises(UsageError, match="not HOST:PORT"):
        run(["--root", str(tmp_path), "--tq-storage-backend", "mooncake", "--tq-mooncake-master-address", "node1"])


# --- text ---


def shown(diagnosis: Diagnosis) -> str:
    text = io.StringIO()
    render(diagnosis, text)
    return text.getvalue()


def test_80_columns_in_a_pipe_without_colours(tmp_path: Path) -> None:
    tree = FakeTree(tmp_path / "a-node-with-quite-a-long-name.cluster.example").memlock(65536).shm()
    for number in range(8):
        tree.hca(f"mlx5_{number}", ip=f"10.{number}.0.1", state="4: ACTIVE" if number % 2 else "1: DOWN")
    options, settings = parse(["--root", str(tree.root), *AUTO, "--tq-use-gdr"])
    lines = shown(examine(options, settings)).splitlines()
    long = [line for line in lines if len(line) > 80]
    assert all(line.startswith("[dataplane] ") for line in long), "only the start line, which is one line"
    assert "\x1b" not in "".join(lines)
    assert all(line == line.rstrip() for line in lines)
    text = " ".join(" ".join(lines).split())
    for word in ("mlx5_0: port 1 is DOWN", "limit 64 KiB", "fix: raise the limit", "DEGRADED"):
        assert word in text


def test_every_row_of_the_table_names_its_check(tmp_path: Path) -> None:
    options, settings = parse(["--root", str(healthy(tmp_path).root), *MOONCAKE])
    table = shown(examine(options, settings)).split("\n\n")[0].splitlines()[2:]
    assert {line.split()[0] for line in table if not line.startswith(" ")} == set(CHECKS)
    (gdr,) = [line.split(maxsplit=2) for line in table if line.startswith("gdr")]
    assert gdr == ["gdr"]  # the last of a group that was skipped for one reason
    options, settings = parse(["--root", str(healthy(tmp_path).root), *AUTO])
    assert "gdr skipped not asked for: --tq-use-gdr is off" in _words(shown(examine(options, settings)))


def _words(text: str) -> str:
    return " ".join(text.split())


def test_checks_that_no_device_reaches_name_the_one_that_stopped_it(tmp_path: Path) -> None:
    tree = healthy(tmp_path).port_state("1: DOWN")
    options, settings = parse(["--root", str(tree.root), *AUTO])
    assert "rdma_gid MISSING no device passed rdma_port memlock" in _words(shown(examine(options, settings)))
    tree.without_rdma()
    text = shown(examine(options, settings))
    assert text.count("no device passed rdma_device") == 2
    assert "above" not in text


def test_what_files_hold_cannot_steer_a_terminal(tmp_path: Path) -> None:
    tree = healthy(tmp_path / "n").port_state("\x1b[2J\x1b]0;owned\x07 ACTIVE")
    options, settings = parse(["--root", str(tree.root), *AUTO])
    text = shown(examine(options, settings))
    assert "\x1b" not in text
    assert "owned" in text


def test_nodes_that_agree_share_a_row(tmp_path: Path) -> None:
    def report(number: int, tree: FakeTree) -> NodeReport:
        return probe_node(settings, root=tree.root, node=f"node-{number}", node_id=f"id-{number}", environ={})

    options, settings = parse(["--root", str(healthy(tmp_path / "x").root), *AUTO])
    reports = [report(n, healthy(tmp_path / f"{n}").memory((600 + n) * 2**30)) for n in range(6)]
    reports.append(report(6, healthy(tmp_path / "6").port_state("1: DOWN")))
    one = examine(options, settings)
    nodes = {r.node_id: r.node for r in reports}
    text = shown(Diagnosis(**{**vars(one), "nodes": nodes, "reports": tuple(reports)}))
    assert "7 nodes" in text
    flat = " ".join(text.split())
    assert "6/7 nodes: active: mlx5_0" in flat
    assert "node-6: mlx5_0: port 1 is DOWN" in flat
    assert text.count("free") < 4, "free memory differs on each node and is shown once"


def test_a_silent_node_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options, settings = parse(AUTO)
    good = probe_node(settings, root=healthy(tmp_path).root, node="node-0", node_id="a", environ={})
    monkeypatch.setattr(examining, "probe_running_cluster", lambda _: ({"a": "node-0", "b": "node-1"}, [good]))
    diagnosis = examine(_with_cluster(options), settings)
    assert [r.node for r in diagnosis.reports] == ["node-0", "node-1"]
    assert diagnosis.decision is not None
    assert diagnosis.decision.backend == "SimpleStorage"
    assert "node-1: no report in time" in shown(diagnosis)


def _with_cluster(options: Any) -> Any:
    return type(options)(**{**vars(options), "cluster": True})


def test_the_environment_is_shown_and_typing_errors_pointed_out() -> None:
    found = variables({"RTQ_SEGMENT_MB": "64", "RTQ_SEGMET_MB": "64", "MC_GID_INDEX": "3", "HOME": "/x", "RTQ_X": "1"})
    assert found == [
        ("MC_GID_INDEX", "3", ""),
        ("RTQ_SEGMENT_MB", "64", ""),
        ("RTQ_SEGMET_MB", "64", "not known; did you mean RTQ_SEGMENT_MB?"),
    ]


def test_progress_is_said_after_two_seconds_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(examining, "_QUIET_SECONDS", 0.05)
    with progress("looking"):
        time.sleep(0.5)
    with progress("in a hurry"):
        pass
    time.sleep(0.2)
    err = capsys.readouterr().err
    assert err == "doctor: looking ...\n"


# --- flags explained ---


def test_explain_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--explain-flags"]) == 0
    text = capsys.readouterr().out
    assert all(flag.name in text for flag in FLAGS)
    assert text.count("reject  ") == sum(rule.verdict == "reject" for rule in RULES)
    assert max(map(len, text.splitlines())) <= 120
    assert run(["--explain-flags", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert [f["name"] for f in out["flags"]] == [f.name for f in FLAGS]
    assert len(out["matrix"]) == len(RULES)


# --- bad input ---


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--tq-rdma-mod", "auto"], "unknown flag --tq-rdma-mod: did you mean --tq-rdma-mode?"),
        (["--tq-transprot=rdma"], "unknown flag --tq-transprot: did you mean --tq-transport?"),
        (["--clutser"], "did you mean --cluster?"),
        (["--qqqqqqq"], "unknown flag --qqqqqqq (see relax-tq-rdma doctor --help)"),
        (["now"], "unexpected argument 'now'"),
        (["--tq-transport", "roce"], "--tq-transport: invalid choice: 'roce'"),
        (["--tq-init-timeout-seconds", "soon"], "--tq-init-timeout-seconds: expected seconds"),
        (["--processes-per-node", "0"], "--processes-per-node: expected a whole number above 0"),
        (["--root", "/no/such/dir"], "--root /no/such/dir: no such file or directory"),
        (["--root", "/etc/hostname"], "--root /etc/hostname: not a directory"),
        (["--root", "/usr/lib"], "--root /usr/lib: holds no sys, proc or dev folder"),
        (["--root", ""], "--root: no folder given"),
        (["--root", "/", "--cluster"], "drop one of them"),
        (["--nodes", "2", "--cluster"], "drop one of them"),
    ],
)
def test_bad_input_is_one_sentence(argv: list[str], said: str) -> None:
    with pytest.raises(UsageError) as error:
        run(argv)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_bad_root_in_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RTQ_SYSTEM_ROOT", "/no/such/dir")
    with pytest.raises(UsageError, match="RTQ_SYSTEM_ROOT /no/such/dir"):
        run([])


def test_an_unreadable_root() -> None:
    with public_folder() as folder:
        (folder / "closed").mkdir(mode=0o000)

        def sentence() -> str:
            try:
                run(["--root", str(folder / "closed")])
            except UsageError as exc:
                return str(exc)
            return "no error"

        assert as_nobody(sentence).endswith("closed: permission denied")


def test_a_bad_size_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RTQ_SEGMENT_MB", "4G")
    with pytest.raises(UsageError, match="RTQ_SEGMENT_MB='4G'"):
        run(["--root", str(healthy(tmp_path).root), *MOONCAKE])


@pytest.mark.parametrize("flags", [MOONCAKE, ["--dataplane-accounting", "summary"]])
def test_a_bad_duration_in_the_environment(flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RTQ_STORE_CALL_SECONDS", "abc")
    with pytest.raises(UsageError, match="RTQ_STORE_CALL_SECONDS='abc'"):
        run(["--root", str(healthy(tmp_path).root), *flags])


def test_a_run_folder_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RTQ_RUN_DIR", str(tmp_path / "file"))
    with pytest.raises(StartError, match="run folder"):
        run(MOONCAKE)


def test_cluster_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # the import then fails, as where Ray is not installed
    with pytest.raises(StartError, match="cannot be joined without Ray"):
        run(["--cluster", *AUTO])


# --- the real command ---


def test_the_command_on_this_machine_is_quick_and_light() -> None:
    """No torch, no Ray, no TransferQueue, no Mooncake in the process itself on the plain path."""
    code = (
        "import sys\n"
        "from relax_tq_rdma.doctor.cli import run\n"
        "code = run(['--json'])\n"
        "heavy = [m for m in ('torch', 'ray', 'transfer_queue', 'mooncake', 'numpy') if m in sys.modules]\n"
        "print(heavy, file=sys.stderr)\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "[]"
    assert json.loads(done.stdout)["ok"] is True


def test_errors_of_the_command_have_no_stack_trace() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "relax_tq_rdma.cli", "doctor", "--root", "/nowhere"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == "relax-tq-rdma: error: --root /nowhere: no such file or directory\n"
    assert done.stdout == ""


@pytest.mark.parametrize("argv", [["--json"], ["--explain-flags"]])
def test_a_full_disk_behind_stdout_is_one_sentence(tmp_path: Path, argv: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "relax_tq_rdma.cli", "doctor", "--root", str(healthy(tmp_path).root), *argv],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "relax-tq-rdma: error: the result cannot be written: no space left on device\n"
