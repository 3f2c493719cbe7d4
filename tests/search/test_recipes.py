"""The Megatron recipe with stages: its splits, constraints, and balance of layers."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import autopar
from autopar.capture import capture
from autopar.cost.hardware import resolve
from autopar.errors import InfeasibleError, MeshError, OptionError
from autopar.manual import Manual
from autopar.mesh import LogicalMesh, Mesh
from autopar.options import Options
from autopar.passes.analysis import Analysis, find_runs
from autopar.passes.binding import capture_step
from autopar.passes.inter import (
    Candidate,
    PipelineOrder,
    Source,
    equal_pipelines,
    find_layers,
    views_of,
)
from autopar.passes.search import Evaluator, Planner, Solved
from autopar.passes.search.branch_bound import BranchAndBound
from autopar.passes.search.outcome import alternatives_of
from autopar.passes.search.recipes import RecipeNodes, known_layouts, recipes_on
from autopar.passes.search.simplicity import Simplicity
from tests.helpers.candidates import assert_covers, gpt2, pipeline_space, recipes
from tests.helpers.harness import Mlp, random_rows
from tests.helpers.machines import A100, cluster, hardware_of, two_tiers
from tests.helpers.models.wide_models import meta_tokens, wide_gpt2
from tests.helpers.nightly import nightly


def recipes_of(mesh: Mesh, *forbid: str) -> list[Candidate]:
    return list(recipes(gpt2(), mesh, hardware_of(mesh), Options.of(forbid=forbid)))


def splits(found: list[Candidate]) -> set[tuple[int, ...]]:
    return {(len(c.ends), *c.stages[0].view.sizes) for c in found}


def test_recipes_are_equal_stages_in_every_split() -> None:
    mesh = cluster(2, 2)
    found = recipes_of(mesh)
    assert splits(found) == {(2, 2, 1), (2, 1, 2), (4, 1, 1)}
    for candidate in found:
        assert_covers(candidate, mesh)
        assert len({stage.view.sizes for stage in candidate.stages}) == 1
        for stage in candidate.stages:
            assert stage.constraints.roles == ("data", "tensor")
            assert "sequence" in stage.constraints.forbid
        assert 16 % (candidate.n_microbatches * candidate.stages[0].view.sizes[0]) == 0


def test_recipes_respect_forbid() -> None:
    mesh = cluster(4)
    assert recipes_of(mesh, "pipeline") == []
    assert splits(recipes_of(mesh, "tensor")) == {(2, 2, 1), (4, 1, 1)}
    assert splits(recipes_of(mesh, "data")) == {(2, 1, 2), (4, 1, 1)}


def views(candidate: Candidate) -> list[LogicalMesh]:
    return [stage.view for stage in candidate.stages]


def test_a_manual_recipe_is_that_one() -> None:
    mesh = cluster(2, 4)
    hardware = hardware_of(mesh)
    manual = Manual(dp=2, tp=2, pp=2, sp=True, zero=1, microbatch_size=2)
    (candidate,) = recipes(gpt2(), mesh, hardware, Options.of(manual=manual))
    assert candidate.name == "manual recipe, m=4" and not candidate.recipe
    assert [v.sizes for v in views(candidate)] == [(2, 2)] * 2
    assert [v.first_rank for v in views(candidate)] == [0, 4]
    assert candidate.n_microbatches == 16 // 2 // 2
    (limits,) = {repr(stage.constraints) for stage in candidate.stages}
    assert "zero=1" in limits and "sequence" not in limits
    uneven, too_many = replace(manual, microbatch_size=3), replace(manual, dp=4)
    with pytest.raises(OptionError, match="microbatch_size=3"):
        recipes(gpt2(), mesh, hardware, Options.of(manual=uneven))
    with pytest.raises(MeshError, match="places 16 ranks"):
        recipes(gpt2(), mesh, hardware, Options.of(manual=too_many))


def test_stages_of_a_recipe_have_balanced_flops() -> None:
    rows = Analysis.of(capture(Mlp(n_layers=8), random_rows(0, "x", "y"), precision="fp64"))
    mesh = cluster(4)
    found = recipes(rows, mesh, hardware_of(mesh), Options.of())
    layers = find_layers(rows, find_runs(rows), 4)
    for candidate in found:
        last = [layers.ends.index(end) for end in candidate.ends]
        bounds = itertools.pairwise([-1, *last])
        flops = [math.fsum(layers.flops[a + 1 : b + 1]) for a, b in bounds]
        assert max(flops) <= math.fsum(flops) / len(flops) + max(layers.flops)


def test_every_stage_of_a_recipe_has_a_parameter_to_optimise() -> None:
    """Where there are enough: an optimizer of a rank without one would be refused by torch."""
    model: nn.Module = Mlp(n_layers=8)
    for layer in [*model.get_submodule("net").children()][:10]:
        layer.requires_grad_(False)
    rows = Analysis.of(capture(model, random_rows(0, "x", "y"), precision="fp64"))
    mesh = cluster(2)
    found, *_ = recipes(rows, mesh, hardware_of(mesh), Options.of(manual=Manual(pp=2)))
    infos = rows.program.parameters
    for a, b in itertools.pairwise([0, *found.ends]):
        read = {name for operator in rows.operators[a:b] for name in operator.inputs}
        assert any(infos[name].requires_grad for name in read & infos.keys())
    mesh = cluster(4)
    found, *_ = recipes(rows, mesh, hardware_of(mesh), Options.of(manual=Manual(pp=4)))
    assert len(found.ends) == 4  # three layers learn


def test_stages_may_lie_on_two_nodes() -> None:
    assert {3, 4} <= {c.stages[0].view.n_ranks for c in recipes_of(cluster(3, 4))}


def test_what_the_real_machine_forbids_has_no_plan() -> None:
    """Three ranks of nodes of eight: the cheapest way to a bias gathers it, which is forbidden."""
    mesh = Mesh((12, 8), hardware=A100)
    options = Options.of(forbid=["zero1", "zero2", "zero3"])
    analysis = Analysis.of(capture_step(wide_gpt2(1, 192, 64, 768), meta_tokens(192, 64), options))
    across, inside = Manual(dp=16, tp=3, pp=2), Manual(dp=8, tp=6, pp=2)
    evaluator = Evaluator(analysis, options, hardware_of(mesh), math.inf)

    def least_s(manual: Manual) -> float:
        asked = replace(options, manual=manual)
        candidate = recipes(analysis, mesh, hardware_of(mesh), asked)[0]
        return evaluator.placed(candidate, None).least_s

    assert least_s(inside) > 0
    with pytest.raises(InfeasibleError, match="this machine forbids what the recipe does"):
        least_s(across)


def test_zero_3_is_tried_where_zero_1_does_not_fit() -> None:
    """Beside Megatron with sequence parallelism; each is named as what it is."""
    mesh = Mesh((1, 4), hardware="a100-80gb")
    rows = random_rows(0, "x", "y")
    analysis = Analysis.of(capture(Mlp(n_layers=2), rows, precision="fp64"))

    def found(limit: float | None = None, *forbid: str) -> Solved:
        only = {"recompute": "none", "stages": 1, "microbatches": 1}
        options = Options.of(memory_limit=limit, forbid=forbid, **only)
        planner = Planner(analysis, mesh, resolve(mesh, torch.float64), options)
        views = views_of(mesh, planner.hardware, options, 0, 4)
        (recipe,) = (
            recipe
            for recipe in recipes_on(views, options)
            if recipe.view.sizes == (2, 2) and "Megatron" not in recipe.names
        )
        search = BranchAndBound(0.0, 0.0, lambda solved: Simplicity())
        search.run([RecipeNodes(planner.levels).single_stage(recipe)])
        (solved,) = search.found
        return solved

    alone = found(None, "zero1")
    free, lean = found(), found(alone.peak_bytes + 1)
    name = "Megatron with SP and ZeRO-{} on dp=2 x tp=2"
    assert (free.candidate.name, lean.candidate.name) == (name.format(1), name.format(3))
    assert lean.predicted == alone.predicted
    assert lean.peak_bytes < free.peak_bytes


class Reused(nn.Module):
    """A weight that a layer reads, and others read in other ways: two, or three."""

    def __init__(self, n_ways: int) -> None:
        super().__init__()
        self.layer, self.n_ways = nn.Linear(4, 4), n_ways

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, h = self.layer.weight, self.layer(x)
        loss = (h * self.layer(x).max(-1)[0][:, None]).mean() + weight.norm()
        return loss if self.n_ways == 2 else loss + weight.logsumexp(1).sum()


@pytest.mark.parametrize("sp", [False, True])
def test_a_recipe_converts_what_is_read_in_two_ways(sp: bool) -> None:
    batch = {"x": torch.randn(8, 4, dtype=torch.float64)}
    manual = Manual(tp=2, sp=sp)
    report = autopar.verify(Reused(2).double(), (1, 2), batch, precision="fp64", manual=manual)
    assert report.ok, report.text()


def test_a_recipe_that_a_model_cannot_have_names_what_conflicts() -> None:
    with pytest.raises(InfeasibleError, match=r"the uses of `layer\.weight` have no placement in"):
        autopar.plan(Reused(3), cluster(2), {"x": torch.ones(8, 4)}, manual=Manual(tp=2))


def test_zero_leaves_whole_what_does_not_divide_beside_tp() -> None:
    """Rows of 3 on each rank of tp: of two on "data", none has a part of them."""
    batch = {"input": torch.ones(8, 3)}
    plan = autopar.plan(
        nn.Linear(3, 6, bias=False), cluster(2, 2), batch,
        loss_fn=lambda out, _: out.square().mean(), manual=Manual(dp=2, tp=2, zero=1),
    )  # fmt: skip
    (stored,) = plan.data.parameters.values()
    assert stored.startswith("I S(0)")


def test_what_divides_on_another_view_alone_is_whole_here() -> None:
    """A fused bias of 3 x 4 heads x 64 has no factor for dp=128; for dp=64 beside tp=4 it has."""
    model, mesh = wide_gpt2(2, width=256, length=16), Mesh((32, 8), hardware=A100)
    manual = Manual(dp=128, tp=2, zero=1)
    plan = autopar.plan(model, mesh, meta_tokens(128, 16), manual=manual)
    assert plan.placements["transformer.h.0.attn.c_attn.bias"] == ("I", "S(0.1)")
    assert plan.placements["transformer.h.0.attn.c_attn.weight"][0] == "S(0)"


def test_a_recipe_gathers_again_before_it_does_not_fit() -> None:
    """Megatron keeps shards of what sequence parallelism gathers; with enough memory that is not
    needed, and a user may forbid it."""
    mesh, manual = cluster(2), Manual(tp=2, sp=True, microbatch_size=8)
    ids = meta_tokens(16, 64)
    analysis = Analysis.of(capture_step(wide_gpt2(2, 64, 64, 64), ids, Options.of(manual=manual)))

    def planned(**options: Any) -> Solved:
        asked = Options.of(manual=manual, **options)
        return Planner(analysis, mesh, hardware_of(mesh), asked).run().solved

    plain, lean = planned(), planned(recompute="gathers")
    assert not plain.stages[0].strategy.recomputed
    limit = int(plain.peak_bytes + lean.peak_bytes) // 2
    found = planned(memory_limit=limit)
    assert found.stages[0].strategy == lean.stages[0].strategy
    assert found.peak_bytes <= limit < plain.peak_bytes
    with pytest.raises(InfeasibleError):
        planned(memory_limit=limit, recompute="none")


@nightly
def test_pipelines_come_first_where_recipes_of_one_stage_are_slow() -> None:
    """Between nodes that are far apart, tensor parallelism is slow, and so is ZeRO-3."""
    mesh = two_tiers((4, 2), (1e-7, 1e-9), 1e13)
    analysis = Analysis.of(capture_step(wide_gpt2(2, 64, 16, 64), meta_tokens(8, 16), Options()))
    planner = Planner(analysis, mesh, hardware_of(mesh), Options())
    names = list[str]()
    planner = replace(planner, report=names.append)
    planner.run()
    first = [name.split(":")[0] for name in names]
    recipes = first.index("planning Megatron with SP and ZeRO-1 of several stages")
    assert not any("search" in name for name in first[:recipes])


def test_layouts_known_by_name_are_rows() -> None:
    """HSDP, FSDP x TP, pipelines with tensor parallelism over a node: each has a price or bound."""
    mesh, options = cluster(2, 4), Options.of(recompute="none", schedule="1f1b")
    found = Planner(gpt2(), mesh, hardware_of(mesh), options).run()
    rows = {a.name: a for a in found.alternatives}
    hsdp, both = rows["HSDP on dp=2 x fsdp=4"], rows["FSDP x TP on dp=2 x tp=4"]
    assert (hsdp.recipe, both.recipe) == ("HSDP", "FSDP x TP")
    named = hsdp, both, rows["TP4 x PP2 x DP1 (Megatron)"]
    least_s = found.bound_s or 0.0
    for row in named:
        price_s = row.step_time_s or row.least_s or 0.0
        assert price_s >= least_s or row.peak_bytes, row
    assert found.solved.candidate.recipe not in ("HSDP", "FSDP x TP")


def test_pipelines_that_do_not_fit_have_the_name_that_people_know() -> None:
    """One row for all their numbers of microbatches, with what the leanest needs; none if one of
    them has a plan."""
    mesh = cluster(2, 4)
    planner = Planner(gpt2(), mesh, hardware_of(mesh), Options.of(stages=1))
    chosen, space = planner.run().solved, replace(planner, options=Options.of()).pipelines
    assert space is not None
    pipelines = [pipeline.candidate for pipeline in equal_pipelines(space.space)]
    known = [candidate for candidate in pipelines if candidate.row]
    assert {candidate.row for candidate in known} == {"TP4 x PP2 x DP1 (Megatron)"}
    errors = [(InfeasibleError("", least_bytes=9.0 - n), one) for n, one in enumerate(known)]

    def rows(*solved: Solved) -> list[tuple[str, float | None]]:
        search = BranchAndBound(0.0, 0.0, lambda _: Simplicity.of_search(1), found=list(solved))
        found = alternatives_of(search, errors, chosen, lambda one: one)
        return [(a.name, a.peak_bytes) for a in found if a.name != chosen.candidate.name]

    assert len(known) > 1
    assert rows() == [(known[0].row, 10.0 - len(known))]
    assert [name for name, _ in rows(replace(chosen, candidate=known[0]))] == [known[0].name]


@pytest.mark.parametrize(("memory_limit", "is_priced"), [(None, True), (1000, False)])
def test_hsdp_shards_parameters_inside_of_a_node(memory_limit: int | None, is_priced: bool) -> None:
    mesh, options = cluster(2, 4), Options.of(memory_limit=memory_limit)
    planner = Planner(gpt2(), mesh, hardware_of(mesh), options)
    views = views_of(mesh, planner.hardware, options, 0, 8)
    hsdp, both = known_layouts(mesh, views, frozenset())
    nodes = RecipeNodes(planner.levels)
    if not is_priced:
        assert nodes.priced(hsdp, math.inf) == []
        ((error, _),) = planner.levels.errors
        assert error.least_bytes is not None and error.least_bytes > 1000
        return
    (priced,) = nodes.priced(hsdp, math.inf)
    assert priced.placed is not None
    storages = priced.placed.choices[0].strategy.storage.values()
    assert {storage.spec.placements[0].kind for storage in storages} == {"I"}
    assert any(storage.spec.placements[1].is_shard for storage in storages)
    assert {s.period for s in storages if s.spec.placements[1].is_shard} == {"use"}
    (bounded,) = nodes.priced(both, 0.0)
    assert bounded.bound_s > 0.0


def test_known_layouts_need_nodes_and_what_is_not_forbidden() -> None:
    def names(mesh: Mesh, *forbid: str) -> list[str]:
        views = views_of(mesh, hardware_of(mesh), Options.of(), 0, mesh.n_ranks)
        return [layout.family for layout in known_layouts(mesh, views, frozenset(forbid))]

    assert names(cluster(2, 4)) == ["HSDP", "FSDP x TP"]
    assert names(cluster(2, 4), "tensor") == ["HSDP"]
    assert names(cluster(2, 4), "zero3") == names(cluster(1, 4)) == []


def test_recipes_with_stages_shard_activations_and_optimizer_state() -> None:
    """What has no effect on a view is left out of the name; a view without any has no such
    recipe."""
    mesh = cluster(2, 2)
    space = pipeline_space(gpt2(), mesh, hardware_of(mesh), Options.of())
    found = [of.candidate for of in equal_pipelines(space, "Megatron with SP and ZeRO-1")]
    names = {c.stages[0].view.sizes: c.name.partition(", ")[0] for c in found}
    assert names == {
        (2, 1): "Megatron with ZeRO-1",
        (1, 2): "Megatron with SP",
        (1, 2, 1): "Megatron with ZeRO-1",
    }
    for candidate in found:
        for stage in candidate.stages:
            assert "sequence" not in stage.constraints.forbid
            context = ("context",) * (len(stage.view.sizes) == 3)
            assert stage.constraints.roles == ("data", *context, "tensor")
            assert stage.constraints.zero == 1
        assert candidate.recipe == "Megatron"


def test_1f1b_is_simpler_than_interleaved_than_zero_bubble() -> None:
    """Whoever placed it; and fewer stages a rank are simpler."""
    mesh = cluster(4)

    def simplest(order: PipelineOrder, source: Source) -> Simplicity:
        space = pipeline_space(gpt2(8), mesh, hardware_of(mesh), Options.of())
        return min(
            Simplicity.recipe_on(of.candidate) for of in equal_pipelines(space, source, [order])
        )

    orders = [
        PipelineOrder("1f1b"), PipelineOrder("interleaved", 2), PipelineOrder("interleaved", 4),
        PipelineOrder("zero-bubble"), PipelineOrder("zero-bubble-v", 2),
    ]  # fmt: skip
    sources: tuple[Source, ...] = ("Megatron", "search")
    ranks = [simplest(order, source) for order in orders for source in sources]
    assert ranks == sorted(ranks)
    for order in orders:
        assert Simplicity.of_order(order.schedule, True) <= simplest(order, "Megatron")


def test_chunks_with_embedding_and_head_have_fewer_blocks() -> None:
    """A vocabulary whose head has the FLOPs of several blocks: the last chunk is lighter by as
    many."""
    mesh = cluster(2)
    program = Analysis.of(capture_step(wide_gpt2(12, 128, 32, 4096), meta_tokens(4, 32), Options()))
    space = pipeline_space(program, mesh, hardware_of(mesh), Options.of(), math.inf)
    (of, *_) = equal_pipelines(space, "search", [PipelineOrder("interleaved", 2)])
    layers = of.space.layers
    flops = np.add.reduceat(layers.flops, [0, *(last + 1 for last in of.last_layers[:-1])])
    n_blocks = np.diff([-1, *of.last_layers])
    assert n_blocks[-1] < n_blocks[1]
    assert flops.max() <= flops.sum() / len(flops) + max(layers.flops)


@pytest.mark.parametrize(("schedule", "n_stages"), [("interleaved", 4), ("zero-bubble", 2)])
def test_the_search_keeps_to_the_schedule_asked_for(schedule: str, n_stages: int) -> None:
    """With as many stages, which may be more than ranks."""
    mesh = cluster(2)
    options = Options.of(schedule=schedule, stages=n_stages)
    found = Planner(gpt2(), mesh, hardware_of(mesh), options).run()
    candidate = found.solved.candidate
    assert (candidate.schedule, len(candidate.stages)) == (schedule, n_stages)
    assert found.bound_s is not None
    assert 0 < found.bound_s <= found.solved.step_time_s
