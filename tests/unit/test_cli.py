"""The console entry: help, version, exit codes, no stack traces."""

import importlib
import os
import subprocess
import sys

import pytest

from relax_tq_rdma import StartError, UsageError
from relax_tq_rdma.cli import _exit_with


def run(*argv):
    command = [sys.executable, "-m", "relax_tq_rdma.cli", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_help_lists_the_commands_and_version_prints():
    shown = run("--help")
    assert shown.returncode == 0
    assert all(name in shown.stdout for name in ("doctor", "demo", "metrics"))
    assert "..." not in shown.stdout.partition("Commands:")[2], "a line that does not fit tells half of it"
    assert run("--version").stdout.startswith("relax-tq-rdma ")


def test_unknown_command_is_a_usage_error():
    result = run("doctro")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [(UsageError("a\nb"), 2), (StartError("c"), 1), (ImportError("no ray"), 1), (KeyboardInterrupt(), 130)],
)
def test_errors_become_sentences_and_exit_codes(error, code, capsys):
    def fail(argv):
        raise error

    import typer

    with pytest.raises(typer.Exit) as stop:
        _exit_with(fail, [])
    assert stop.value.exit_code == code
    lines = capsys.readouterr().err.splitlines()
    assert lines
    assert all(line.startswith("relax-tq-rdma: ") for line in lines)


COMMANDS = {
    "status": "coverage.cli.run",
    "doctor": "doctor.cli.run",
    "demo": "demo.cli.run",
    "metrics": "accounting.cli.run",
    "bench path": "bench.path.cli.run",
    "bench soak": "bench.soak.cli.run",
    "bench payload": "bench.payload.main",
    "bench accounting": "bench.accounting.main",
}


def entry(name):
    module, _, function = COMMANDS[name].rpartition(".")
    return getattr(importlib.import_module(f"relax_tq_rdma.{module}"), function)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_helps_under_its_own_name(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as end:
        entry(name)(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: relax-tq-rdma {name} ")
    assert "``" not in text


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize(
    ("word", "said"),
    [("--jsno", "unknown flag --jsno: did you mean --json?"), ("now", "unexpected argument 'now' (see")],
)
def test_every_command_refuses_what_it_does_not_know(name, word, said):
    if name == "bench payload" and word == "--jsno":
        said = "unknown flag --jsno (see"  # it knows no other form than JSON
    with pytest.raises(UsageError) as error:
        entry(name)([word])
    assert str(error.value).startswith(said)


RESULT = """
import sys
from relax_tq_rdma import cli
def result(argv):
    print("\\u65e5 \\udcff " + "x" * 20000)
    return 0
try:
    cli._show(result, [])
except BaseException as stop:
    sys.exit(stop.exit_code)
"""


def test_a_result_that_no_disk_takes_is_one_sentence():
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", RESULT], stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == 1
    assert done.stderr == b"relax-tq-rdma: error: the result cannot be written: no space left on device\n"


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", b"\\u65e5 \\udcff x"), ("utf-8", "日 \\udcff x".encode())])
def test_what_a_terminal_cannot_show_is_shown_by_its_code(encoding, shown):
    env = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", RESULT], capture_output=True, env=env, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(shown)
