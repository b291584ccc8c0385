"""``relax-tq-rdma train`` before it reaches the host: usage, and what there is to say without a Relax."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from relax_tq_rdma import StartError, UsageError
from relax_tq_rdma.launch.cli import run
from tests.host_module import modules_in


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without Relax."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["relax-tq-rdma", "train"])
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.parametrize("argv", [[], ["--"]])
def test_no_arguments(argv: list[str]) -> None:
    with pytest.raises(UsageError, match="train -- ARGUMENTS"):
        run(argv)


def test_help_says_whose_help_is_whose(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    assert "usage: relax-tq-rdma train -- ARGUMENTS" in capsys.readouterr().out


def test_no_relax_here(empty: None) -> None:
    with pytest.raises(StartError, match=r"Relax is not installed here .*python -m relax\.entrypoints\.train"):
        run(["--", "--fully-async"])


def test_a_relax_that_cannot_be_imported(empty: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with modules_in(tmp_path, monkeypatch) as write:
        write("relax.__init__", "import a_module_that_is_missing")
        with pytest.raises(
            StartError, match=r"Relax cannot be imported here \(No module named 'a_module_that_is_missing'\)"
        ):
            run(["--", "--fully-async"])


@pytest.mark.parametrize("where", ["relax.utils.arguments", "relax.entrypoints.train"])
def test_what_the_host_cannot_import_is_not_told_as_a_lack_of_ours(
    empty: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    late = {"relax.utils.arguments": "", "relax.entrypoints.train": "", where: "    import a_module_that_is_missing\n"}
    with modules_in(tmp_path, monkeypatch) as write:
        write(
            "relax.utils.arguments",
            "import argparse\ndef parse_args(add_custom_arguments=None):\n"
            + late["relax.utils.arguments"]
            + "    return add_custom_arguments(argparse.ArgumentParser()).parse_known_args([])[0]\n",
        )
        write("relax.entrypoints.train", "def main(args):\n" + late["relax.entrypoints.train"] + "    pass\n")
        with pytest.raises(SystemExit) as end:
            run(["--", "--fully-async"])
    import relax_tq_rdma

    relax_tq_rdma.uninstall()
    assert end.value.code == 1
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert "No module named 'a_module_that_is_missing'" in said


def test_the_working_folder_counts_as_with_python_m(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Relax that is only a checkout: the launcher finds it where ``python -m`` would, and runs its entry point."""
    monkeypatch.setattr(sys, "argv", ["relax-tq-rdma", "train"])
    with modules_in(tmp_path / "elsewhere", monkeypatch):
        monkeypatch.setattr(sys, "path", list(sys.path))
        for name, text in {
            "utils/arguments.py": (
                "import argparse, sys\n"
                "def parse_args(add_custom_arguments=None):\n"
                "    parser = add_custom_arguments(argparse.ArgumentParser())\n"
                "    return parser.parse_known_args(sys.argv[1:])[0]\n"
            ),
            "entrypoints/train.py": (
                "import sys\ndef main(args):\n    print('ran', args.tq_host_staging_mb, sys.argv[0])\n"
            ),
        }.items():
            path = tmp_path / "relax" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.chdir(tmp_path)
        assert run(["--tq-host-staging-mb", "7"]) == 0
    import relax_tq_rdma

    relax_tq_rdma.uninstall()
    out = capsys.readouterr().out.split()
    assert out == ["ran", "7", str(tmp_path / "relax" / "entrypoints" / "train.py")]
