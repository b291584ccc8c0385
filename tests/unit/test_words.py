"""How figures read in sentences for people."""

import pytest

from relax_tq_rdma.words import count, duration


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (-3, "0 s"),  # clocks of two nodes differ
        (0.4, "0 s"),
        (59.9, "59 s"),
        (60, "1 min"),
        (95, "1 min 35 s"),
        (599, "9 min 59 s"),
        (659, "10 min"),
        (3599, "59 min"),
        (3600, "1 h 0 min"),
        (86399, "23 h 59 min"),
        (86400, "1 d 0 h"),
        (9 * 86400 + 3 * 3600, "9 d 3 h"),
    ],
)
def test_duration(seconds, shown):
    assert duration(seconds) == shown


def test_count():
    assert [count(n, "node") for n in (0, 1, 2)] == ["0 nodes", "1 node", "2 nodes"]
    assert [count(n, "batch", "batches") for n in (1, 3)] == ["1 batch", "3 batches"]
