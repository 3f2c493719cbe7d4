"""The space of pipelines, and the order in which a search goes through it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from autopar.cost.price import link_between, predict
from autopar.errors import BatchError, OptionError
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.passes.analysis import Analysis, cut
from autopar.passes.inter import (
    Candidate,
    PipelineSpace,
    StageBound,
    StagePlan,
    StageSearch,
    submesh_sizes,
)
from autopar.passes.inter.stage_search import Solve
from autopar.passes.search import Evaluator, Planner, Simulator
from autopar.passes.search.branch_bound import Node
from autopar.passes.search.several_stages import _MOST_IN_VAIN, SeveralStages
from autopar.plans import Predicted
from tests.helpers.candidates import assert_covers, gpt2, pipeline_space
from tests.helpers.captures import captured
from tests.helpers.harness import Mlp
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


@pytest.mark.parametrize(
    ("shape", "n_stages"),
    [((4,), None), ((4,), 2), ((2, 2), 3), ((2, 2), 4), ((2, 4), None), ((2, 4), 3)],
)
def test_candidates_hold_every_rank_in_as_many_stages_as_asked(
    shape: tuple[int, ...], n_stages: int | None
) -> None:
    mesh = cluster(*shape)
    found = candidates(space_on(mesh, n_stages))
    kinds = {(c.ends, tuple(stage.view for stage in c.stages)) for c in found}
    assert len(found) == 6 == len(kinds)
    for candidate in found:
        assert_covers(candidate, mesh)
        cut(gpt2().program, candidate.ends)
        assert len(candidate.ends) == (n_stages or max(2, len(candidate.ends)))
        assert candidate.name.endswith("m=4")


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
        assert Planner(gpt2(), on, options).pipelines is None


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


# -- the order -------------------------------------------------------------------------------------


def solve_with(evaluator: Evaluator, asked: list[object]) -> Solve:
    def solve(candidate: Candidate, k: int) -> StageBound:
        asked.append((candidate.ends, k, candidate.stages[k].view.canonical))
        chosen = evaluator.solved_stage(candidate, k, math.inf)
        return StageBound(chosen.bound_s, max(0.0, chosen.bound_s - chosen.once_s))

    return solve


def solved_plan(search: StageSearch, solve: Solve, seen: Callable[[StagePlan], None]) -> StagePlan:
    """The first plan whose stages are all solved."""
    while True:
        plan = next(search.plans(math.inf))
        seen(plan)
        if not search.tighten(plan, solve):
            return plan


def test_few_stages_are_solved_until_the_best_plan_is_known() -> None:
    """Spans only rise, and no plan whose stages are solved then has a lower one."""
    mesh, m = cluster(4), 4
    space = space_on(mesh, microbatches=m)
    evaluator = Evaluator(gpt2(), space.options, space.hardware, space.budget_bytes)
    search, asked, spans = StageSearch(space, m, math.inf), list[object](), list[float]()
    best = solved_plan(search, solve_with(evaluator, asked), lambda p: spans.append(p.bound_s))
    assert spans == sorted(spans) and spans[0] < spans[-1] == best.bound_s
    assert len(asked) == len(set(asked)) < search.n_stages / 4
    others = StageSearch(space, m, math.inf)
    for plan in list(others.plans(math.inf))[::40]:
        while others.tighten(plan, solve_with(evaluator, [])):
            pass
        assert others.least_of(plan.stages) >= best.bound_s * (1 - 2e-3)


def test_plans_that_were_tried_are_left_out() -> None:
    search = StageSearch(space_on(cluster(4)), 4, math.inf)
    first, second, *_ = search.plans(math.inf)
    again = StageSearch(search.space, 4, math.inf)
    assert next(again.plans(math.inf)) == first
    assert next(again.plans(math.inf)).stages == second.stages


def test_a_stage_that_does_not_fit_is_in_no_plan() -> None:
    search = StageSearch(space_on(cluster(2), 2), 4, math.inf)

    def solve(candidate: Candidate, k: int) -> StageBound:
        return StageBound(math.inf, math.inf)

    while (plan := next(search.plans(math.inf), None)) is not None:
        assert search.tighten(plan, solve)
    assert math.isinf(search.bound_s)


def test_many_plans_in_vain_end_a_search_and_count_in_its_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if no step were below the limit: the bound stays that of the first of them."""
    options = Options.of(microbatches=16, recompute="none")
    planner = Planner(gpt2(), cluster(4), options)
    assert planner.pipelines is not None
    tried = list[Candidate]()

    def never(self: SeveralStages, candidate: Candidate, limit_s: float) -> float:
        tried.append(candidate)
        return limit_s

    monkeypatch.setattr(SeveralStages, "_simulated", never)
    node, first_s = next(planner.pipelines.roots()), 0.0
    while node.refine is not None:
        (part,) = node.refine(1e9)
        assert isinstance(part, Node)
        node = part
        first_s = first_s or (node.bound_s if tried else 0.0)
    assert len(tried) == _MOST_IN_VAIN == len({(c.ends, c.name) for c in tried})
    assert 0 < node.bound_s <= first_s * (1 + 1e-9) < 1e9


@lru_cache
def wide_mlp() -> Analysis:
    """Matmuls that take longer than launches."""
    model = Mlp(width=256, n_layers=6)
    batch = {name: torch.randn(256, 256, dtype=torch.float64) for name in ("x", "y")}
    return Analysis.of(captured(model, batch, precision="fp64"))


@pytest.mark.parametrize("hardware_name", ["cpu-local", "a100-80gb"])
def test_the_plan_is_near_the_best_of_all_cuts(hardware_name: str) -> None:
    """Every cut in two between layers, solved and simulated."""
    analysis, options = wide_mlp(), Options.of(stages=2, tie=0.0)
    mesh = Mesh((2,), hardware=hardware_name)
    hardware = hardware_of(mesh)

    def predicted(pipeline: object, costs: object) -> Predicted:
        between = link_between(mesh, hardware.links)
        return predict(pipeline, costs, "adamw", between)  # type: ignore[arg-type]

    simulator = Simulator(Evaluator(analysis, options, hardware, 64 * GIB), predicted)
    best = Planner(analysis, mesh, options).run().solved
    space = pipeline_space(analysis, mesh, hardware, options, 64 * GIB, 2)
    every = [
        simulator.solve(space.candidate(m, plan.stages)).step_time_s
        for m in space.counts
        for plan in StageSearch(space, m, math.inf).plans(math.inf)
    ]
    assert len(every) > 20
    assert best.step_time_s <= min(every) * (1 + options.tolerance)
