"""``install(args)`` in a job of the host: what it takes, where it stands aside, and what it leaves for the workers."""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import transfer_queue as tq

import relax_tq_rdma
from relax_tq_rdma import SeamError, Settings, UsageError
from relax_tq_rdma.flags import add_arguments
from relax_tq_rdma.seams.relax_args import settings_of
from tests.conftest import FAST_START
from tests.host_module import modules_in

taken_seams = sys.modules["relax_tq_rdma.install"].taken_seams  # the name in the package is the function

MODULES = {
    "relax.core.controller": """
        class Controller:
            def __init__(self, config, runtime_env=None): pass
            def _initialize_data_system(self): pass
            def shutdown(self): pass
        """,
    "relax.engine.rollout.sglang_rollout": """
        async def _run_image_processor(state, args, prompt, multimodal_inputs): pass
        async def generate_and_rm_group(args, group, sampling_params, evaluation=False): pass
        """,
    "relax.utils.data.stream_dataloader": """
        def get_data_from_transfer_queue(
            args, tq_client, data_fields, partition_id, broadcast_pp=True, per_rank_fetch=False
        ): pass
        """,
}

Write = Callable[[str, str], Path]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    with modules_in(tmp_path, monkeypatch) as write:

        def dedented(name: str, text: str) -> Path:
            import textwrap

            return write(name, textwrap.dedent(text))

        for name, text in MODULES.items():
            dedented(name, text)
        before = (ray.init, tq.init, tq.close, sys.meta_path[:])
        yield dedented
        relax_tq_rdma.uninstall()
        assert (ray.init, tq.init, tq.close, sys.meta_path[:]) == before


def args_of(*flags: str, **host: Any) -> argparse.Namespace:
    args = add_arguments(argparse.ArgumentParser()).parse_args(flags)
    vars(args).update({"fully_async": True, "hybrid": False, "multimodal_keys": {"image": "images"}, **host})
    return args


def test_with_no_flag_nothing_is_touched(host: Write, capsys: pytest.CaptureFixture[str]) -> None:
    before = (ray.init, tq.init, sys.meta_path[:])
    args = args_of()
    relax_tq_rdma.install(args)
    assert (ray.init, tq.init, sys.meta_path[:]) == before
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert taken_seams() == {}
    assert settings_of(args) is None


def test_every_seam_that_the_job_needs_is_taken_now_or_when_it_is_there(host: Write) -> None:
    args = args_of("--dataplane-accounting", "summary", "--rollout-group-share-processor")
    relax_tq_rdma.install(args)
    assert taken_seams() == {
        "T1": "taken",
        "T2": "taken",
        "P1": "taken",
        "R2": "waiting",
        "R3": "waiting",
        "R4": "waiting",
    }
    for module in MODULES:
        importlib.import_module(module)
    assert set(taken_seams().values()) == {"taken"}
    relax_tq_rdma.install(args)
    with pytest.raises(UsageError, match="other settings"):
        relax_tq_rdma.install(args_of("--dataplane-accounting", "verbose"))


def test_in_colocate_nothing_is_touched_in_any_process(host: Write, capsys: pytest.CaptureFixture[str]) -> None:
    before = (ray.init, tq.init)
    args = args_of("--dataplane-accounting", "summary", fully_async=False)
    relax_tq_rdma.install(args)
    assert (ray.init, tq.init) == before
    assert "NOTE in colocate mode" in capsys.readouterr().err
    assert settings_of(args) is None
    assert args.dataplane_accounting == "summary", "the arguments are the user's"


@pytest.mark.parametrize("mode", [{"fully_async": False}, {}], ids=["colocate", "fully-async"])
def test_arguments_that_are_parsed_again_say_the_same(host: Write, mode: dict[str, Any]) -> None:
    first, again = (args_of("--dataplane-accounting", "summary", **mode) for _ in range(2))
    relax_tq_rdma.install(first)
    relax_tq_rdma.install(again)
    assert settings_of(again) == settings_of(first)
    assert vars(again) == vars(first)


def test_hybrid_is_not_colocate_although_the_host_says_so(host: Write) -> None:
    args = args_of("--dataplane-accounting", "summary", hybrid=True, colocate=True)
    relax_tq_rdma.install(args)
    assert settings_of(args) == Settings(accounting="summary")


def test_a_host_with_its_own_data_plane_keeps_it(
    host: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    host("relax.utils.tq_config", "")
    before = tq.init
    args = args_of("--tq-rdma-mode", "required", "--tq-normalize-multimodal", "--rollout-group-share-processor")
    relax_tq_rdma.install(args)
    assert tq.init is before
    assert taken_seams() == {"P1": "taken", "R2": "waiting", "R4": "waiting"}
    assert settings_of(args) == Settings(group_share_processor=True)
    said = capsys.readouterr().err
    assert "stands aside" in said
    assert "backend=" not in said, "what the job runs on is the host's to say"

    asked: list[bool] = []
    monkeypatch.setattr("relax_tq_rdma.coverage.nodes.require_plugin", lambda limit: asked.append(True))
    importlib.import_module("relax.core.controller").Controller(args)._initialize_data_system()
    assert (asked, taken_seams()["R4"]) == ([True], "aside"), "the pictures are shared where the plugin is"


def test_the_own_flag_alone_of_such_a_host_is_no_business_of_ours(
    host: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    host("relax.utils.tq_config", "")
    args = args_of("--tq-rdma-mode", "required")
    relax_tq_rdma.install(args)  # by our rules it would need --tq-storage-backend mooncake
    assert taken_seams() == {}
    assert settings_of(args) is None
    (said,) = capsys.readouterr().err.splitlines()
    assert "stands aside" in said


def test_a_host_that_has_drifted_is_refused_only_where_it_is_needed(host: Write) -> None:
    host("relax.engine.rollout.sglang_rollout", "def other(): pass")
    relax_tq_rdma.install(args_of("--dataplane-accounting", "summary"))
    relax_tq_rdma.uninstall()
    before = (ray.init, tq.init)
    with pytest.raises(SeamError, match="seam R2"):
        relax_tq_rdma.install(args_of("--rollout-group-share-processor"))
    assert (ray.init, tq.init) == before


def test_a_worker_takes_the_host_s_seams_when_they_are_there(host: Write, caplog: pytest.LogCaptureFixture) -> None:
    host("relax.utils.data.stream_dataloader", "def get_data_from_transfer_queue(args): pass")
    relax_tq_rdma.install()
    assert taken_seams() == {"T1": "taken", "T2": "taken", "R2": "waiting", "R3": "waiting"}
    importlib.import_module("relax.engine.rollout.sglang_rollout")
    importlib.import_module("relax.utils.data.stream_dataloader")
    assert taken_seams() == {"T1": "taken", "T2": "taken", "R2": "taken", "R3": "failed"}
    assert "seam R3" in caplog.text


def autoloaded(code: str, *argv: str, path: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"import relax_tq_rdma.autoload, sys\n{code}", *argv],
        env={"PYTHONPATH": os.pathsep.join(filter(None, [path, str(FAST_START)])), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_loaded_plugin_does_not_break_a_host_that_it_does_not_know(tmp_path: Path) -> None:
    path = tmp_path / "relax" / "utils" / "arguments.py"
    path.parent.mkdir(parents=True)
    path.write_text("def parse_args(): return 'the host runs'\n")
    done = autoloaded("from relax.utils.arguments import parse_args\nprint(parse_args())", path=str(tmp_path))
    assert done.stdout.strip() == "the host runs", done.stderr
    assert "seam R1" in done.stderr


@pytest.mark.parametrize("later", [False, True])
def test_the_telemetry_hook_of_the_host_brings_the_flags_and_the_start(tmp_path: Path, later: bool) -> None:
    """As ``RELAX_TELEMETRY_HOOK`` or from a ``.pth`` file, which is read before the path is complete: the host's own
    entry point, unchanged."""
    for name, text in {
        **MODULES,
        "relax.utils.arguments": """
            import argparse, sys
            def parse_args(add_custom_arguments=None):
                parser = argparse.ArgumentParser(allow_abbrev=False)
                parser = add_custom_arguments(parser) if add_custom_arguments else parser
                parser.add_argument("--fully-async", action="store_true")
                return parser.parse_known_args(sys.argv[1:])[0]
            """,
    }.items():
        import textwrap

        path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    code = (
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "assert not {'torch', 'ray', 'transfer_queue', 'relax.core.controller'} & set(sys.modules)\n"
        "from relax.utils.arguments import parse_args\n"
        "args = parse_args()\n"
        "from relax_tq_rdma.install import taken_seams\n"
        "print(args.dataplane_accounting, taken_seams()['P1'], taken_seams()['T1'])\n"
    )
    path = "" if later else str(tmp_path)
    done = autoloaded(code, "--fully-async", "--dataplane-accounting", "summary", path=path)
    assert done.stdout.split() == ["summary", "taken", "taken"], done.stderr
