"""The order in which a demo brings its parts up and takes them down, without starting any of them."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from relax_tq_rdma.demo import job
from relax_tq_rdma.demo.options import parse
from relax_tq_rdma.demo.output import Reporter
from relax_tq_rdma.errors import StartError
from relax_tq_rdma.summary import UNTOUCHED


@pytest.fixture
def events(monkeypatch):
    """What happens, in order; every part is a stand-in that notes its name."""
    seen = []

    @contextmanager
    def ray(cpus):
        seen.append("ray up")
        try:
            yield
        finally:
            seen.append("ray down")

    def start(settings, host, samples_per_prompt):
        seen.append("data system up")
        return SimpleNamespace(config={}, decision=UNTOUCHED, summary_line="")

    class Workers:
        def __init__(self, options, settings):
            seen.append("actors up")

        def connect(self, tq_config, per_rank):
            seen.append("actors connected")

        def stop(self):
            seen.append("actors down")

    def train(options, workers, report):
        seen.append("training")
        return [0.0], []

    monkeypatch.setattr(job.cluster, "embedded", ray)
    monkeypatch.setattr(job.data_system, "start", start)
    monkeypatch.setattr(job.data_system, "close", lambda settings: seen.append("data system down"))
    monkeypatch.setattr(job, "Workers", Workers)
    monkeypatch.setattr(job, "_train", train)
    return seen


def run():
    options, settings = parse(["--dataplane-accounting", "summary"])
    job.run_job(options, settings, Reporter(quiet=True))


def test_the_actors_load_after_the_start_that_has_a_deadline(events):
    run()
    up = ["ray up", "data system up", "actors up", "actors connected", "training"]
    assert events == [*up, "actors down", "data system down", "ray down"]


def test_a_start_that_fails_has_loaded_no_actor(events, monkeypatch):
    def refuse(settings, host, samples_per_prompt):
        raise StartError("no")

    monkeypatch.setattr(job.data_system, "start", refuse)
    with pytest.raises(StartError, match="no"):
        run()
    assert events == ["ray up", "data system down", "ray down"]
