"""An axis cp in "auto": which views are tried, and that cutting rows instead bounds them."""

from __future__ import annotations

import math

import pytest

import autopar
from autopar import Manual, Mesh
from autopar.mesh import factored_view
from autopar.options import Options
from autopar.passes.inter import (
    Candidate,
    StageLayout,
    context_counts,
    equal_pipelines,
    microbatch_counts,
    n_operators,
    rows_instead,
    stage_degrees,
)
from autopar.passes.intra import Constraints
from autopar.passes.search import Planner
from autopar.passes.search.recipes import megatron_on
from tests.helpers.candidates import gpt2, pipeline_space
from tests.helpers.machines import cluster, hardware_of
from tests.helpers.models.wide_models import meta_tokens, wide_llama
from tests.helpers.nightly import nightly

MESH = cluster(2, 4)
HARDWARE = hardware_of(MESH)


def tried(options: Options) -> dict[tuple[int, ...], list[int]]:
    """The degrees with cp of eight ranks, and the numbers of microbatches that are tried."""
    found = {}
    for axes in stage_degrees(gpt2(), options, 8):
        if "cp" in axes:
            view = factored_view(MESH, HARDWARE.links, HARDWARE.device, axes)
            every = microbatch_counts(gpt2(), options, 8, axes["dp"])
            if counts := context_counts(gpt2(), options, view, every):
                found[view.sizes] = counts
    return found


def test_sequences_are_cut_where_rows_do_not_divide() -> None:
    """Of 16 rows."""
    auto = tried(Options.of())
    assert auto[2, 2, 2] == [8] and auto[1, 4, 2] == [8, 16] and auto[4, 2, 1] == [4]
    for (dp, cp, _), counts in auto.items():
        assert all(16 % (m * dp) == 0 and 16 % (m * dp * cp) for m in counts)
    named = tried(Options.of(mesh_shape={"cp": 2}))
    assert named.keys() == {(1, 2, 4), (2, 2, 2), (4, 2, 1)}
    assert named[2, 2, 2] == microbatch_counts(gpt2(), Options.of(), 8, 2)
    assert not tried(Options.of(forbid=["sequence"]))
    assert {dp for dp, *_ in tried(Options.of(forbid=["data"]))} == {1}
    assert {tp for *_, tp in tried(Options.of(forbid=["tensor"]))} == {1}


@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 4, 2), (4, 2, 1)])
def test_cutting_rows_instead_is_never_slower(sizes: tuple[int, int, int]) -> None:
    planner = Planner(gpt2(), MESH, HARDWARE, Options.of())
    evaluator = planner.evaluator.plain_evaluator or planner.evaluator
    axes = dict(zip(("dp", "cp", "tp"), sizes, strict=True))
    view = factored_view(MESH, HARDWARE.links, HARDWARE.device, axes)
    (m, *_) = tried(Options.of())[sizes]
    instead = rows_instead(gpt2(), MESH, HARDWARE, view, m)
    assert instead is not None
    (rows_view, rows_m), free = instead, Constraints()
    assert rows_view.sizes == (sizes[0] * sizes[1], sizes[2]) and m % rows_m == 0
    limits = Constraints(roles=("data", "context", "any"))
    of_rows, of_sequences = (
        evaluator.placed(Candidate("", ends, (StageLayout(v, c),), n), None).bound_s
        for ends in [(n_operators(gpt2().program),)]
        for v, c, n in ((rows_view, free, rows_m), (view, limits, m))
    )
    assert 0 < of_rows <= of_sequences < math.inf


def test_recipes_with_cp_cut_sequences() -> None:
    view = factored_view(MESH, HARDWARE.links, HARDWARE.device, {"dp": 2, "cp": 2, "tp": 2})
    (recipe,) = megatron_on(view, Options.of())
    assert [*recipe.names] == ["Megatron with SP and ZeRO-1", "Megatron with SP and ZeRO-3"]
    assert recipe.roles == ("data", "context", "tensor")
    assert not [*megatron_on(view, Options.of(forbid=["sequence"]))]
    space = pipeline_space(gpt2(), MESH, HARDWARE, Options.of())
    found = equal_pipelines(space, "Megatron with SP and ZeRO-1")
    sizes = {of.view.sizes for of in found}
    assert (1, 2, 2) in sizes and (1, 4) in sizes and (2, 2, 1) in sizes
    for of in found:
        assert 0 < of.layered_s < math.inf
        for stage in of.candidate.stages:
            assert len(stage.constraints.roles) == of.view.n_axes
    narrow = pipeline_space(gpt2(), Mesh((4, 2)), HARDWARE, Options.of())
    tensor = {of.view.axes["tp"] for of in equal_pipelines(narrow, "Megatron with SP and ZeRO-1")}
    assert tensor == {1, 2}, "first incumbents have tp inside of a node"


@nightly
def test_few_long_sequences_are_cut_without_being_asked() -> None:
    """Two sequences on two nodes: no slower than Megatron's layouts with cp, which are rows."""
    batch, mesh = meta_tokens(2, 32768), Mesh((2, 8), hardware="h100-sxm")
    plan = autopar.plan(wide_llama(2), mesh, batch, stages=1, time_limit_s=None)
    assert plan.stages[0].axes.get("cp", 1) > 1
    rows = {row.name for row in plan.data.alternatives}
    for cp, tp in ((8, 1), (4, 2), (2, 4)):
        layout = Manual(dp=2, cp=cp, tp=tp, sp=tp > 1, zero=1)
        known = autopar.plan(wide_llama(2), mesh, batch, manual=layout)
        assert plan.predicted.step_time_s <= known.predicted.step_time_s
        assert any(f"on dp=2 x cp={cp} x tp={tp}" in name for name in rows)
