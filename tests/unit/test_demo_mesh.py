"""Mesh maths: coordinates, cohorts, groups."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_tq_rdma.demo.mesh import Coords, Mesh

sizes = st.integers(1, 3)
meshes = st.builds(Mesh, tp=sizes, cp=sizes, dp=sizes, pp=sizes)


@given(meshes)
def test_rank_and_coords_are_inverse(mesh):
    assert [mesh.rank(mesh.coords(rank)) for rank in range(mesh.world)] == list(range(mesh.world))


@given(meshes, st.sampled_from([("tp",), ("cp",), ("dp",), ("pp",), ("tp", "cp", "pp")]))
def test_groups_part_the_ranks_and_differ_only_on_their_axes(mesh, axes):
    groups = mesh.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world))
    for group in groups:
        assert group == sorted(group)
        for axis in {"tp", "cp", "dp", "pp"} - set(axes):
            assert len({getattr(mesh.coords(rank), axis) for rank in group}) == 1


def test_layout_is_megatrons_tp_fastest_pp_slowest():
    mesh = Mesh(tp=2, cp=2, dp=2, pp=2)
    assert mesh.coords(1) == Coords(tp=1, cp=0, dp=0, pp=0)
    assert mesh.coords(2) == Coords(tp=0, cp=1, dp=0, pp=0)
    assert mesh.coords(4) == Coords(tp=0, cp=0, dp=1, pp=0)
    assert mesh.coords(8) == Coords(tp=0, cp=0, dp=0, pp=1)


@given(meshes)
def test_one_fetcher_a_cohort(mesh):
    for cohort in mesh.groups("tp", "cp", "pp"):
        assert len(cohort) == mesh.cohort
        assert [rank for rank in cohort if mesh.coords(rank).is_fetcher] == [cohort[0]]


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_mesh_is_refused(rank):
    with pytest.raises(ValueError, match="outside a mesh of 4"):
        Mesh(tp=2, dp=2).coords(rank)
