"""Generated pages are up to date: the docs cannot drift from the code."""

from pathlib import Path

import pytest

from relax_tq_rdma.reference import PAGES, main

DOCS = Path(__file__).parents[2] / "docs" / "reference"


@pytest.mark.parametrize("name", PAGES)
def test_page_is_up_to_date(name):
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), (
        "run: python -m relax_tq_rdma.reference docs/reference"
    )


def test_main_writes_all_pages_and_checks_its_usage(tmp_path):
    assert main([str(tmp_path / "new")]) == 0
    assert {p.name for p in (tmp_path / "new").iterdir()} == set(PAGES)
    assert main([]) == 2


def test_a_default_that_is_worked_out_is_told():
    assert "| `RTQ_RUN_DIR` | relax-tq-rdma-UID in $XDG_RUNTIME_DIR, else" in PAGES["environment.md"]()
