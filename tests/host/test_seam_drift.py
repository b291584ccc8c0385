"""A host, or a library under it, that is no longer as a seam expects: the exact sentence, in check and start.

Each case renames or re-signs one thing in a copy of the stand-in, or in a library, and asks the seam; then the
launcher, which must not start a job that needs it.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray
from transfer_queue import interface
from transfer_queue.storage.managers.base import StorageManager

import relax_tq_rdma
from relax_tq_rdma import SeamError, Settings, UsageError
from relax_tq_rdma.launch.cli import run
from relax_tq_rdma.seams import reports
from relax_tq_rdma.seams.base import Seam, installed_transfer_queue
from relax_tq_rdma.seams.relax_args import settings_of
from relax_tq_rdma.seams.relax_arguments import RelaxArguments
from relax_tq_rdma.seams.relax_consumer import RelaxConsumer
from relax_tq_rdma.seams.relax_controller import RelaxController
from relax_tq_rdma.seams.relax_rollout import RelaxRollout
from relax_tq_rdma.seams.tq_init import TqInit
from relax_tq_rdma.seams.tq_registry import TqRegistry
from relax_tq_rdma.seams.worker_hook import WorkerHook
from relax_tq_rdma.summary import parse_start_line
from tests.host_jobs import ASYNC, COLOCATE, SMALL, STANDIN
from tests.host_module import forget

pytestmark = [pytest.mark.host, pytest.mark.timeout(60)]

HOST = "Relax of unknown version"
EVERY_LAYER = Settings(
    accounting="summary",
    normalize_multimodal=True,
    group_share_processor=True,
    per_rank_fetch="on",
    allow_unstaged_per_rank_fetch=True,
)
FLAGS = {
    "R1": [],
    "R2": ["--rollout-group-share-processor"],
    "R3": ["--tq-per-rank-fetch", "on"],
    "R4": ["--dataplane-accounting", "summary"],
    "T1": ["--dataplane-accounting", "summary"],
    "T2": ["--dataplane-accounting", "summary"],
    "P1": ["--dataplane-accounting", "summary"],
}
"""What makes a job need the seam."""

Edit = Callable[[str, str, str], None]


@pytest.fixture(params=["new", "mid"])
def edit(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Edit]:
    """``edit(module, old, new)`` on a copy of the stand-in, which is the host of this test."""
    copy = tmp_path / "host"
    shutil.copytree(STANDIN, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.syspath_prepend(str(copy))
    monkeypatch.setenv("STANDIN_LINE", request.param)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    forget()

    def change(module: str, old: str, new: str) -> None:
        spec = importlib.util.find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        text = Path(spec.origin).read_text()
        assert old in text, f"the stand-in has no {old!r} in {module}"
        Path(spec.origin).write_text(text.replace(old, new))
        forget()  # to find a module is to run the packages above it

    yield change
    relax_tq_rdma.uninstall()
    forget()


ROLLOUT = (
    "_run_image_processor(state, args, prompt, multimodal_inputs) and "
    "generate_and_rm_group(args, group, sampling_params, evaluation)"
)
FETCH = (
    "get_data_from_transfer_queue with parameters args, tq_client, data_fields, partition_id, broadcast_pp, "
    "per_rank_fetch, and get_tensor_and_context_parallel_group and get_pipeline_model_parallel_group of "
    "megatron.core.parallel_state"
)
CONTROLLER = (
    "Controller.__init__(config, runtime_env) and Controller._initialize_data_system() and Controller.shutdown()"
)
ROLLOUT_OUT = "drop --rollout-group-share-processor with this version of the host"
FETCH_OUT = "run this version of the host without flags of relax-tq-rdma"
CONTROLLER_OUT = "use a host line named in docs/relax.md, or drop the flags of relax-tq-rdma"
ARGUMENTS_OUT = (
    "use relax_tq_rdma.install(args) with flags from a parser of your own, or a host line named in docs/relax.md"
)

CASES: dict[str, tuple[type[Seam], str, str, str, str, str, str]] = {
    "R1 renamed": (
        RelaxArguments,
        "relax.utils.arguments",
        "def parse_args(",
        "def parse_arguments(",
        "parse_args(add_custom_arguments)",
        "no relax.utils.arguments.parse_args",
        ARGUMENTS_OUT,
    ),
    "R1 re-signed": (
        RelaxArguments,
        "relax.utils.arguments",
        "def parse_args(add_custom_arguments:",
        "def parse_args(more_arguments:",
        "parse_args(add_custom_arguments)",
        "relax.utils.arguments.parse_args without parameter add_custom_arguments",
        ARGUMENTS_OUT,
    ),
    "R2 renamed": (
        RelaxRollout,
        "relax.engine.rollout.sglang_rollout",
        "async def _run_image_processor(",
        "async def _process_images(",
        ROLLOUT,
        "no relax.engine.rollout.sglang_rollout._run_image_processor",
        ROLLOUT_OUT,
    ),
    "R2 no longer a coroutine": (
        RelaxRollout,
        "relax.engine.rollout.sglang_rollout",
        "async def _run_image_processor(",
        "def _run_image_processor(",
        ROLLOUT,
        "relax.engine.rollout.sglang_rollout._run_image_processor is not a coroutine function",
        ROLLOUT_OUT,
    ),
    "R3 renamed": (
        RelaxConsumer,
        "relax.utils.data.stream_dataloader",
        "def get_data_from_transfer_queue(",
        "def get_rows(",
        FETCH,
        "no relax.utils.data.stream_dataloader.get_data_from_transfer_queue",
        FETCH_OUT,
    ),
    "R3 re-signed": (
        RelaxConsumer,
        "relax.utils.data.stream_dataloader",
        "    per_rank_fetch: ",
        "    each_rank: ",
        FETCH,
        "relax.utils.data.stream_dataloader.get_data_from_transfer_queue without parameter per_rank_fetch",
        FETCH_OUT,
    ),
    "R3 a cohort's group renamed": (
        RelaxConsumer,
        "megatron.core.parallel_state",
        "def get_tensor_and_context_parallel_group(",
        "def get_model_parallel_group_without_pipeline(",
        FETCH,
        "no megatron.core.parallel_state.get_tensor_and_context_parallel_group",
        FETCH_OUT,
    ),
    "R4 renamed": (
        RelaxController,
        "relax.core.controller",
        "def _initialize_data_system(",
        "def _start_data_system(",
        CONTROLLER,
        "no relax.core.controller.Controller._initialize_data_system",
        CONTROLLER_OUT,
    ),
    "R4 re-signed": (
        RelaxController,
        "relax.core.controller",
        "runtime_env: dict[str, Any] | None = None) -> None:\n        self.config",
        "env: dict[str, Any] | None = None) -> None:\n        self.config",
        CONTROLLER,
        "relax.core.controller.Controller.__init__ without parameter runtime_env",
        CONTROLLER_OUT,
    ),
    "R4 module moved": (
        RelaxController,
        "relax.core.controller",
        "class Controller:",
        "class Conductor:",
        CONTROLLER,
        "no relax.core.controller.Controller.__init__",
        CONTROLLER_OUT,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_host_has_drifted(edit: Edit, case: str) -> None:
    seam, module, old, new, expected, found, way_out = CASES[case]
    edit(module, old, new)
    said = f"seam {seam().name} does not fit {HOST}: expected {expected}, found {found}; {way_out}"
    assert seam().check().text == said
    failed = [report for report in reports(EVERY_LAYER) if not report.ok]
    assert [(report.text, report.needed) for report in failed] == [(said, True)]
    with pytest.raises(SeamError) as refused:
        run(["--", *SMALL, *ASYNC, *FLAGS[case[:2]]])
    assert str(refused.value) == said
    assert "relax.entrypoints.train" not in sys.modules, "the job was not started"


def test_what_the_job_does_not_need_does_not_stop_it(edit: Edit) -> None:
    edit("relax.engine.rollout.sglang_rollout", "async def _run_image_processor(", "async def _process_images(")
    [report] = [report for report in reports(Settings(accounting="summary")) if not report.ok]
    assert not report.needed


LIBRARY_OUT = "install a version this plugin was tested with (TransferQueue 0.1.10 or 0.1.11), or drop its flags"


@pytest.mark.parametrize("edit", ["new"], indirect=True)
@pytest.mark.parametrize(
    ("seam", "take_away", "said"),
    [
        (
            TqInit,
            lambda patch: patch.delattr(interface, "_init_from_existing"),
            "does not fit {tq}: expected init(conf=None) and close() of transfer_queue.interface, "
            "_init_from_existing() and three state variables, found no _init_from_existing in "
            f"transfer_queue.interface; {LIBRARY_OUT}",
        ),
        (
            TqRegistry,
            lambda patch: patch.delattr(StorageManager, "notify_data_update"),
            "does not fit {tq}: expected the classes SimpleStorage, MooncakeStore and MooncakeStoreClient in "
            f"registries, with known methods, found no AsyncSimpleStorageManager.notify_data_update; {LIBRARY_OUT}",
        ),
        (
            WorkerHook,
            lambda patch: patch.setattr(ray.runtime_env.RuntimeEnv, "known_fields", {"env_vars"}),
            "does not fit {ray}: expected ray.init(runtime_env) and the key worker_process_setup_hook in a runtime "
            "environment, found no key worker_process_setup_hook; install Ray 2.40 or later, or drop the flags of "
            "relax-tq-rdma",
        ),
    ],
    ids=["T1", "T2", "P1"],
)
def test_a_library_has_drifted(
    edit: Edit, monkeypatch: pytest.MonkeyPatch, seam: type[Seam], take_away: Callable[..., None], said: str
) -> None:
    take_away(monkeypatch)
    text = f"seam {seam().name} {said.format(tq=installed_transfer_queue(), ray=f'Ray {ray.__version__}')}"
    assert seam().check().text == text
    with pytest.raises(SeamError) as refused:
        run(["--", *SMALL, *ASYNC, *FLAGS["T1"]])
    assert str(refused.value) == text


def test_an_rdma_data_plane_of_the_host_is_left_alone_and_that_is_said(
    edit: Edit, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STANDIN_WITH", "pr256")
    assert RelaxController().check().text == (
        "seam R4 (the host's Controller) stands aside: the host brings an RDMA data plane of its own "
        f"(relax.utils.tq) ({HOST})"
    )
    assert RelaxConsumer().check().aside == RelaxController().check().aside
    before = (ray.init, interface.init, interface.close)
    started: list[object] = []
    monkeypatch.setattr("relax_tq_rdma.seams.relax_entry.start", started.append)
    assert run(["--", *SMALL, *ASYNC, "--tq-rdma-mode", "auto", "--dataplane-accounting", "summary"]) == 0
    assert len(started) == 1
    assert (ray.init, interface.init, interface.close) == before
    said = capsys.readouterr().err
    assert "NOTE this Relax brings an RDMA data plane of its own: relax-tq-rdma stands aside" in said
    assert "backend=" not in said, "what the job runs on is the host's to say"
    assert started[0].tq_rdma_mode == "auto", "the host's own flag keeps what it was given"  # type: ignore[attr-defined]


def test_in_colocate_mode_the_host_is_left_alone_and_that_is_said(
    edit: Edit, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Up to the host's own entry point; a whole job of it is in the full set."""
    before = (ray.init, interface.init, interface.close, sys.meta_path[:])
    started: list[object] = []
    monkeypatch.setattr("relax_tq_rdma.seams.relax_entry.start", started.append)
    assert run(["--", *SMALL, *COLOCATE, "--tq-normalize-multimodal", "--rollout-group-share-processor"]) == 0
    assert (ray.init, interface.init, interface.close, sys.meta_path[:]) == before
    note, line = capsys.readouterr().err.splitlines()
    assert note.startswith("[dataplane] NOTE in colocate mode ")
    assert parse_start_line(line)["normalize"] == "off"
    assert [settings_of(args) for args in started] == [None]


def test_a_host_that_shares_the_processor_by_itself_is_left_to_it(
    edit: Edit, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STANDIN_WITH", "group-processor")
    monkeypatch.setattr("relax_tq_rdma.seams.relax_entry.start", lambda args: None)
    assert run(["--", *SMALL, *ASYNC, "--rollout-group-share-processor"]) == 0
    said = capsys.readouterr().err
    assert (
        "NOTE --rollout-group-share-processor has no effect: this Relax shares the processor's output in a group"
        in said
    )


def test_a_misspelt_flag_is_an_error_before_anything_starts(edit: Edit) -> None:
    with pytest.raises(
        UsageError, match=r"unknown flag --tq-normalise-multimodal: did you mean --tq-normalize-multimodal\?"
    ):
        run(["--", *SMALL, *ASYNC, "--tq-normalise-multimodal"])
    assert "relax.entrypoints.train" not in sys.modules
