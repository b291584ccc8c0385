"""What an actor that Ray has not placed needs and what there is, with numbers (FC-13)."""

import pytest

from relax_tq_rdma.transport.placement import Cpus, unplaced

FULL = [Cpus(total=2, free=0)]
CLUSTER = "CPUs of the cluster are free"
ADVICE = " (end other jobs, or add CPUs)"


def test_a_job_that_just_fits_lacks_nothing():
    """Its own actors hold every CPU: none is free, and none is needed."""
    assert unplaced([], FULL) == ""


ONE = "an actor of TransferQueue has no process: it needs 1 CPU, and"


@pytest.mark.parametrize(
    ("needs", "nodes", "said"),
    [
        ([1], FULL, f"{ONE} 0 of 2 {CLUSTER}{ADVICE}"),
        ([1], [], f"{ONE} 0 of 0 {CLUSTER}{ADVICE}"),
        ([1] * 3, FULL, f"3 actors of TransferQueue have no process: they need 3 CPUs, and 0 of 2 {CLUSTER}{ADVICE}"),
        # Not for want of CPUs: its process is only starting.
        ([1], [Cpus(4, 3)], f"{ONE} 3 of 4 {CLUSTER}"),
        # Together there would be one, on no node is there one.
        ([1], [Cpus(2, 0.5), Cpus(2, 0.75)], f"{ONE} 1.25 of 4 {CLUSTER}, at most 0.75 on one node{ADVICE}"),
    ],
)
def test_what_is_needed_and_what_is_free(needs, nodes, said):
    assert unplaced(needs, nodes) == said
