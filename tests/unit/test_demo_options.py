"""The demo's command line: defaults, closest match, impossible combinations, today's path for --compare."""

import subprocess
import sys

import pytest

from relax_tq_rdma import UsageError
from relax_tq_rdma.demo.mesh import Mesh
from relax_tq_rdma.demo.options import Options, parse, without_plugin
from relax_tq_rdma.settings import Settings


def test_defaults():
    options, settings = parse([])
    assert options == Options()
    assert options.mesh == Mesh(tp=2)
    assert settings == Settings()
    assert settings.touches_nothing


def test_job_and_plugin_flags_together():
    options, settings = parse(
        ["--tp", "1", "--dp", "2", "--dataplane-accounting", "summary", "--tq-per-rank-fetch", "on"]
    )
    assert options.mesh == Mesh(dp=2)
    assert settings.accounting == "summary"
    assert settings.per_rank_fetch == "on"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--step", "3"], "unknown flag --step: did you mean --steps?"),
        (["--tq-normalise-multimodal"], "did you mean --tq-normalize-multimodal?"),
        (["--dataplane-acounting=summary"], "unknown flag --dataplane-acounting: did you mean --dataplane-accounting?"),
        (["--zzzzzz"], "unknown flag --zzzzzz (see"),
        (["--ray-address", "nowhere"], "--ray-address: 'nowhere' is not HOST:PORT"),
        (["--ray-address", ":6379"], "--ray-address: ':6379' is not HOST:PORT"),
        (["steps"], "unexpected argument 'steps'"),
        (["--steps", "0"], "--steps: expected 1 or more, got 0"),
        (["--seed", "x"], "--seed: expected a whole number, got 'x'"),
        (["--seed", str(2**63)], "--seed: expected a number from 0 to 2^63 - 1"),
        (["--steps", "many"], "--steps: expected a whole number, got 'many'"),
        (["--tp", "3"], "--tp 3"),
        (["--pp", "5"], "--pp 5"),
        (["--dp", "3"], "--prompts 4 must be a multiple of --dp 3"),
        (["--image-max-tokens", "3"], "--image-max-tokens 3: expected 4 to"),
        (["--tq-rdma-mode", "maybe"], "--tq-rdma-mode: invalid choice: 'maybe'"),
    ],
)
def test_mistakes_are_one_sentence(argv, said):
    with pytest.raises(UsageError) as error:
        parse(argv)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_todays_path_keeps_the_jobs_flags_and_drops_the_plugins():
    argv = ["--steps", "2", "--tq-storage-backend", "mooncake", "--no-tq-use-gdr", "--seed=3", "--tq-host-staging"]
    assert without_plugin(argv) == ["--steps", "2", "--seed=3"]


def test_help_is_quick_to_load():
    code = (
        "import sys; from relax_tq_rdma.demo.cli import run\n"
        "try:\n    run(['--help'])\nexcept SystemExit as stop:\n    assert stop.code == 0\n"
        "assert not {'torch', 'ray', 'transfer_queue'} & set(sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert shown.returncode == 0, shown.stderr
    assert "--samples-per-prompt" in shown.stdout
    assert "--dataplane-accounting" in shown.stdout
