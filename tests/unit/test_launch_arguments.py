"""Seam R1: the plugin's flags on a command line like the host's: Megatron's parser, then groups, then what is unknown
is dropped without a word."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from relax_tq_rdma import SeamError, Settings, UsageError
from relax_tq_rdma.flags import FLAGS
from relax_tq_rdma.seams.relax_arguments import MODULE, RelaxArguments, complain_of_unknown_keys
from tests.host_module import forget, modules_in

HOST = """
import argparse, sys

def parse_args(add_custom_arguments=None):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument_group("megatron").add_argument("--tensor-model-parallel-size", type=int, default=1)
    if add_custom_arguments is not None:
        parser = add_custom_arguments(parser)
    group = parser.add_argument_group("host")
    group.add_argument("--fully-async", action="store_true")
    {more}
    parser.add_argument("--custom-config-path")
    args, _ = parser.parse_known_args(sys.argv[1:])
    {after}
    if args.custom_config_path:
        import yaml
        with open(args.custom_config_path) as file:
            for key, value in (yaml.safe_load(file) or dict()).items():
                setattr(args, key, value)
    return args
"""

Parse = Callable[..., argparse.Namespace]


@pytest.fixture
def parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Parse]:
    with modules_in(tmp_path, monkeypatch) as write:

        def run(*argv: str, more: str = "pass", after: str = "pass", **how: Any) -> argparse.Namespace:
            forget()
            write(MODULE, HOST.replace("{more}", more).replace("{after}", after))
            monkeypatch.setattr(sys, "argv", ["train.py"])
            return RelaxArguments(**how).parse(argv)

        yield run


def test_the_flags_are_parsed_beside_the_host_s(parse: Parse) -> None:
    args = parse(
        "--fully-async", "--tq-normalize-multimodal", "--tq-host-staging-mb", "7", "--an-unknown-flag-of-the-host"
    )
    assert (args.fully_async, args.tensor_model_parallel_size) == (True, 1)
    assert Settings.from_args(args) == Settings(normalize_multimodal=True, host_staging_mb=7)
    assert sys.argv[1:2] == ["--fully-async"]


def test_a_flag_that_the_host_has_too_is_the_host_s(parse: Parse) -> None:
    more = 'group.add_argument("--tq-rdma-mode", choices=("off", "auto", "required", "later"), default="auto")'
    assert Settings.from_args(parse(more=more)).rdma_mode == "auto"
    assert parse("--tq-rdma-mode", "later", more=more).tq_rdma_mode == "later"
    with pytest.raises(UsageError, match=r"--tq-rdma-mode: 'later' is not valid"):
        Settings.from_args(parse("--tq-rdma-mode", "later", more=more))


def test_a_flag_that_the_host_adds_to_the_parser_itself(parse: Parse) -> None:
    args = parse("--tq-rdma-device", "7", more='parser.add_argument("--tq-rdma-device", type=int, default=3)')
    assert args.tq_rdma_device == 7


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("--tq-normalise-multimodal", "did you mean --tq-normalize-multimodal?"),
        ("--tq-hostt-staging=1", "did you mean --tq-host-staging?"),
        ("--dataplane-acounting", "did you mean --dataplane-accounting?"),
        ("--rollout-group-shared-processor", "did you mean --rollout-group-share-processor?"),
        ("--tq-x", "doctor --explain-flags lists them all"),
        ("--no-tq-use-grd", "did you mean --tq-use-gdr?"),
        ("--tq_host_staging", "did you mean --tq-host-staging?"),
        ("--TQ-Host-Staging", "did you mean --tq-host-staging?"),
    ],
)
def test_an_unknown_flag_of_ours_is_an_error(parse: Parse, word: str, hint: str) -> None:
    with pytest.raises(UsageError) as err:
        parse("--fully-async", word)
    assert word.partition("=")[0] in str(err.value)
    assert hint in str(err.value)


def test_a_flag_that_only_this_host_has_is_not_unknown(parse: Parse) -> None:
    more = 'group.add_argument("--tq-something-of-its-own", default="")'
    assert parse("--tq-something-of-its-own", "x", more=more).tq_something_of_its_own == "x"


def config(tmp_path: Path, text: str) -> tuple[str, str]:
    (tmp_path / "job.yaml").write_text(text)
    return "--custom-config-path", str(tmp_path / "job.yaml")


def test_the_host_s_configuration_file_may_hold_our_settings(parse: Parse, tmp_path: Path) -> None:
    file = config(tmp_path, "tq_storage_backend: mooncake\nits_own: {tq_nested: 1}\ntensor_model_parallel_size: 2\n")
    assert Settings.from_args(parse(*file)).wants_mooncake
    for text in ("", "- a list\n"):
        assert complain_of_unknown_keys(argparse.Namespace(custom_config_path=config(tmp_path, text)[1]), ()) is None
    assert complain_of_unknown_keys(argparse.Namespace(custom_config_path="/not/there.yaml"), ()) is None


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("tq_storage_backends", "did you mean tq_storage_backend?"),
        ("tq-host-staging", "did you mean tq_host_staging?"),
        ("TQ_Host_Staging", "did you mean tq_host_staging?"),
        ("rollout_group_shared_processor", "did you mean rollout_group_share_processor?"),
        ("dataplane_counting", "did you mean dataplane_accounting?"),
        ("tq_colour", "relax-tq-rdma doctor --explain-flags lists them all"),
    ],
)
def test_an_unknown_key_of_ours_is_an_error(parse: Parse, tmp_path: Path, key: str, hint: str) -> None:
    with pytest.raises(UsageError) as err:
        parse(*config(tmp_path, f"fully_async: true\n{key}: 1\n"))
    assert str(err.value) == f"unknown key {key} in the file of --custom-config-path: {hint}"


def test_what_is_the_host_s_own_is_not_unknown(parse: Parse, tmp_path: Path) -> None:
    """A key that one of its flags has, a key far from ours, and an attribute that it sets by itself."""
    args = parse(
        *config(tmp_path, "tq_of_its_own: 3\nanything_else: 1\n"),
        more='group.add_argument("--tq-its-flag", dest="tq_of_its_own", type=int, default=1)',
        after="args.tq_config = None",
    )
    assert (args.tq_of_its_own, args.anything_else) == (3, 1)


def test_off_and_on_of_a_yaml_file_are_booleans(parse: Parse) -> None:
    settings = Settings.from_args(parse(after="args.dataplane_accounting, args.tq_per_rank_fetch = False, True"))
    assert settings == Settings(per_rank_fetch="on")
    with pytest.raises(UsageError, match="--tq-storage-backend: True is not valid"):
        Settings.from_args(parse(after="args.tq_storage_backend = True"))


def test_a_bad_value_ends_as_every_bad_value_of_the_host(parse: Parse, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse("--tq-host-staging-mb", "-1")
    assert end.value.code == 2
    assert "expected a number above 0" in capsys.readouterr().err


def test_a_host_that_does_not_register_the_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with modules_in(tmp_path, monkeypatch) as write:
        write(MODULE, "import argparse\ndef parse_args(add_custom_arguments=None):\n    return argparse.Namespace()\n")
        monkeypatch.setattr(sys, "argv", ["train.py"])
        with pytest.raises(SeamError, match=r"seam R1 .* did not call add_custom_arguments"):
            RelaxArguments().parse([])


def test_whoever_takes_parse_args_by_name_gets_the_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    seen: list[argparse.Namespace] = []
    with modules_in(tmp_path, monkeypatch) as write:
        write(MODULE, HOST.replace("{more}", "pass").replace("{after}", "pass"))
        module = importlib.import_module(MODULE)
        before = module.parse_args
        seam = RelaxArguments(then=seen.append)
        seam.apply()
        seam.apply()
        monkeypatch.setattr(sys, "argv", ["train.py", "--tq-dedup-multimodal"])
        own: list[str] = []

        def custom(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            own.append(parser.prog)
            parser.add_argument("--mine", default="here")
            return parser

        args = module.parse_args(add_custom_arguments=custom)
        assert (args.tq_dedup_multimodal, args.mine, seen) == (True, "here", [args])
        assert len(own) == 1
        seam.remove()
        assert module.parse_args is before


@pytest.mark.parametrize(("word", "code"), [("--tq-host-stagin", 2), ("--tq-dedup-multimodal", 2), ("--fine", 1)])
def test_what_is_wrong_ends_an_entry_point_of_the_host_without_a_stack_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], word: str, code: int
) -> None:
    import importlib

    def refuse(args: argparse.Namespace) -> None:
        if args.tq_dedup_multimodal:
            raise UsageError("these do not go together")
        raise SeamError("a seam does not fit")

    with modules_in(tmp_path, monkeypatch) as write:
        write(MODULE, HOST.replace("{more}", "pass").replace("{after}", "pass"))
        module = importlib.import_module(MODULE)
        RelaxArguments(then=refuse).apply()
        monkeypatch.setattr(sys, "argv", ["train.py", word])
        with pytest.raises(SystemExit) as end:
            module.parse_args()
    assert end.value.code == code
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("[dataplane] ERROR ")


def test_every_flag_is_on_the_namespace(parse: Parse) -> None:
    args = parse()
    assert Settings.from_args(args) == Settings()
    assert all(hasattr(args, flag.dest) for flag in FLAGS)
