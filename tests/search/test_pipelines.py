"""The space of pipelines: cuts, submeshes, views and numbers of microbatches."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autopar.cost.hardware import resolve
from autopar.errors import BatchError, OptionError
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.passes.inter import Candidate, PipelineSpace, StageBound, StageSearch, submesh_sizes
from autopar.passes.search import Planner
from tests.helpers.candidates import gpt2, pipeline_space
from tests.helpers.machines import cluster, hardware_of

GIB = 2.0**30


def space_on(
    mesh: Mesh, n_stages: int | None = None, budget_bytes: float = 64 * GIB, **options: object
) -> PipelineSpace:
    on = gpt2(), mesh, hardware_of(mesh), Options.of(**options)
    return pipeline_space(*on, budget_bytes, n_stages)


def candidates(space: PipelineSpace, m: int = 4, n_most: int = 6) -> list[Candidate]:
    """The best by what is known without solving anything."""
    found = StageSearch(space, m, math.inf).plans(math.inf)
    return [space.candidate(m, plan.stages) for plan, _ in zip(found, range(n_most), strict=False)]


def test_as_given_meshes_keep_their_axes() -> None:
    mesh = Mesh((2, 2), ("outer", "inner"), hardware="cpu-local")
    found = candidates(space_on(mesh, 2, mesh_shape="as-given"))
    assert {c.stages[0].view.names for c in found} == {("outer", "inner")}
    assert {stage.view.sizes for c in found for stage in c.stages} <= {(1, 1), (1, 2)}


def test_what_may_not_be_is_no_candidate() -> None:
    mesh = cluster(4)
    assert candidates(space_on(mesh, budget_bytes=1.0)) == []
    assert candidates(space_on(mesh, 5)) == []
    found = candidates(space_on(mesh, 2, forbid=["tensor"]))
    (limits,) = {repr(s.constraints) for c in found for s in c.stages}
    assert "tensor" in limits
    for on, options in ((mesh, Options.of(forbid=["pipeline"])), (cluster(1), Options.of())):
        assert Planner(gpt2(), on, resolve(on), options).pipelines is None


def test_microbatches_are_those_asked_for_or_possible() -> None:
    mesh = cluster(2)
    assert space_on(mesh, microbatches=4).counts == (4,)
    with pytest.raises(BatchError, match="does not divide"):
        _ = space_on(mesh, microbatches=7).counts
    unsplit = replace(gpt2(), batch=replace(gpt2().batch, broken_at="somewhere"))
    assert pipeline_space(unsplit, mesh, hardware_of(mesh), Options.of()).counts == (1,)


def test_pins_go_to_the_stages() -> None:
    mesh = cluster(2, 2)
    name = "transformer.h.0.mlp.c_fc.weight"
    space = space_on(mesh, 2, force={name: "->S(1)@tp"})
    assert all(space.constraints(view).pins for view in space.views)
    for candidate in candidates(space):
        for stage in candidate.stages:
            assert stage.constraints == space.constraints(stage.view)
    with pytest.raises(OptionError, match="no parameter of the model"):
        candidates(space_on(mesh, 2, force={"nothing": "I@tp"}))


def test_gpipe_keeps_all_microbatches() -> None:
    depths = {
        schedule: [space_on(cluster(4), schedule=schedule).depth(16, n_left) for n_left in (1, 3)]
        for schedule in ("1f1b", "gpipe")
    }
    assert depths == {"1f1b": [1, 3], "gpipe": [16, 16]}


def test_submeshes_share_nodes_or_have_whole_ones() -> None:
    assert submesh_sizes(cluster(2, 8)) == [1, 2, 4, 8]
    assert submesh_sizes(cluster(6, 4)) == [1, 2, 4, 8, 12, 16]
    assert submesh_sizes(cluster(6)) == [1, 2, 3]


def test_a_stage_that_does_not_fit_is_in_no_plan() -> None:
    search = StageSearch(space_on(cluster(2), 2), 4, math.inf)
    while (plan := next(search.plans(math.inf), None)) is not None:
        assert search.tighten(plan, lambda candidate, k: StageBound(math.inf, math.inf))
    assert math.isinf(search.bound_s)
