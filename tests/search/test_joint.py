"""The joint search: its tables against solved stages, and the candidates that it proposes."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch

from autopar.cost.laws.model import CostModel
from autopar.cost.price.prediction import link_between, predict
from autopar.errors import BatchError, OptionError
from autopar.mesh import Mesh, factored_view
from autopar.options import Options
from autopar.passes.analysis.analysis import Analysis
from autopar.passes.analysis.cutting import cut
from autopar.passes.analysis.folding import find_runs, fold
from autopar.passes.inter.candidate import Candidate
from autopar.passes.inter.joint import climb, different, joint_search
from autopar.passes.inter.layers import find_layers
from autopar.passes.inter.submeshes import submesh_sizes
from autopar.passes.inter.tables import StageTable, TableMaker, TableRequest
from autopar.passes.intra.constraints import Constraints
from autopar.passes.intra.intra_op import intra_op_problem
from autopar.passes.search.evaluator import Evaluator
from autopar.passes.search.simulator import Simulator
from autopar.passes.solvers.choice import solve
from autopar.passes.solvers.problem import Solution
from autopar.plans.predicted import Predicted
from tests.helpers.candidates import assert_covers, gpt2, joint_search_on
from tests.helpers.captures import captured
from tests.helpers.harness import MODELS, Mlp, model_case
from tests.helpers.machines import cluster, hardware_of
from tests.helpers.models.blocks import Block, Chain

GIB = 2.0**30
REL = 1e-9
PARTS = ("time", "once", "static", "activation")


@lru_cache
def wide_mlp() -> Analysis:
    """Matmuls that take longer than launches."""
    model = Mlp(width=256, n_layers=6)
    batch = {name: torch.randn(256, 256, dtype=torch.float64) for name in ("x", "y")}
    return Analysis.of(captured(model, batch, precision="fp64"))


def stage_costs(
    analysis: Analysis,
    axes: dict[str, int],
    m: int,
    constraints: Constraints | None = None,
    folded: bool = False,
    hardware_name: str = "cpu-local",
) -> tuple[StageTable, TableMaker, CostModel]:
    """The fastest placements on a view of one node."""
    mesh = Mesh((math.prod(axes.values()),), hardware=hardware_name)
    hardware = hardware_of(mesh)
    view = factored_view(mesh, hardware.links, hardware.device, axes)
    runs = find_runs(analysis)
    layers = find_layers(analysis, runs)
    maker = TableMaker(
        fold(analysis.gathering_as("stages"), runs if folded else ()),
        layers,
        torch.float64,
        "adamw",
    )
    wanted = TableRequest(view, constraints or Constraints())
    ((costs,),) = maker.tables_for([wanted], m)
    return costs, maker, CostModel(view, torch.float64)


# -- tables --------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("dp", "tp", "m"), [(2, 2, 4), (1, 4, 2), (1, 1, 1)])
def test_totals_are_the_solved_objective(model: str, dp: int, tp: int, m: int) -> None:
    analysis = model_case(model).analysis.gathering_as("stages")
    costs, _, cost = stage_costs(analysis, {"dp": dp, "tp": tp}, m)
    problem = intra_op_problem(analysis, cost, m, Constraints(), "adamw")
    solved = solve(problem.numbers)
    assert isinstance(solved, Solution)
    assert m * costs.total("time") + costs.total("once") == pytest.approx(
        solved.objective_s, rel=REL
    )
    size_bytes = costs.total("static") + costs.total("activation")
    assert size_bytes == pytest.approx(solved.bytes, rel=REL)
    for part in PARTS:
        assert costs.ranges(part)[0, -1] == pytest.approx(costs.total(part), rel=REL)


@lru_cache
def deep_chain() -> Analysis:
    """Blocks that fill a bucket of gradients each; never run."""
    with torch.device("meta"):
        model = Chain([Block(1024) for _ in range(8)])
        batch = {"x": torch.empty(64, 1024)}
    return Analysis.of(captured(model, batch, precision="fp64"))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_folded_program_costs_what_the_whole_does(zero: int) -> None:
    """Nothing is approximated if all blocks are placed alike, as by a recipe."""
    limits = Constraints(roles=("data", "data"), zero=zero)
    axes = {"dp": 2, "tp": 2}
    whole, *_ = stage_costs(deep_chain(), axes, 2, limits)
    folded, maker, _ = stage_costs(deep_chain(), axes, 2, limits, folded=True)
    assert len(maker.folded.kept) < len(deep_chain().operators)
    for part in PARTS:
        assert folded.total(part) == pytest.approx(whole.total(part), rel=REL)
        np.testing.assert_allclose(folded.ranges(part), whole.ranges(part), rtol=1e-6)


@pytest.mark.usefixtures("nothing_hidden")
def test_a_folded_search_is_near_the_whole() -> None:
    whole, *_ = stage_costs(gpt2(6), {"dp": 2, "tp": 2}, 2)
    folded, *_ = stage_costs(gpt2(6), {"dp": 2, "tp": 2}, 2, folded=True)
    few_s, every_s = (2 * of.total("time") + of.total("once") for of in (folded, whole))
    assert few_s == pytest.approx(every_s, rel=0.05)


@pytest.mark.parametrize("folded", [False, True])
def test_a_tied_parameter_counts_once_in_every_stage_that_uses_it(folded: bool) -> None:
    analysis = gpt2()
    costs, maker, _ = stage_costs(analysis, {"dp": 1, "tp": 1}, 1, folded=folded)
    static = costs.ranges("static")
    embedding = next(i for i in analysis.program.parameters.values() if "wte" in i.name)
    size_bytes = math.prod(embedding.shape) * 8 * 4  # with its gradient and two moments
    for last in range(maker.layers.n_layers - 1):
        twice = static[0, last] + static[last + 1, -1] - static[0, -1]
        assert twice == pytest.approx(size_bytes, rel=REL)
    middle = static[1, -2] + static[0, 0] + static[-1, -1]
    assert middle == pytest.approx(static[0, -1] + size_bytes, rel=REL)


@pytest.mark.parametrize("axes", [{"dp": 1, "tp": 1}, {"dp": 2, "tp": 1}, {"dp": 2, "tp": 2}])
def test_estimates_are_near_the_stages_solved_alone(axes: dict[str, int]) -> None:
    """Compute, reshards and conversions of both stages of every cut in two."""
    analysis, m = deep_chain(), 2
    costs, maker, cost = stage_costs(analysis, axes, m, None, True, "a100-80gb")
    layers = maker.layers
    time, once = costs.ranges("time"), costs.ranges("once")
    static = costs.ranges("static")
    for last in range(layers.n_layers - 1):
        for k, program in enumerate(cut(analysis.program, (layers.ends[last], layers.ends[-1]))):
            at = (0, last) if k == 0 else (last + 1, layers.n_layers - 1)
            part = analysis.part(program)
            problem = intra_op_problem(part, cost, m, Constraints(), "adamw")
            solved = solve(problem.numbers)
            assert isinstance(solved, Solution)
            assert m * time[at] + once[at] == pytest.approx(solved.objective_s, rel=0.15)
            if axes == {"dp": 1, "tp": 1}:  # nothing to choose
                assert static[at] <= solved.bytes


# -- candidates ----------------------------------------------------------------------------------


def candidates(
    analysis: Analysis,
    mesh: Mesh,
    n_stages: int | None = None,
    budget_bytes: float = 64 * GIB,
    n_best: int = 6,
    **options: object,
) -> list[Candidate]:
    """The best candidates by their estimates, which are not solved."""
    on = analysis, mesh, hardware_of(mesh), Options.of(**options)
    search = joint_search(*on, budget_bytes, n_stages)
    if search is None:
        return []
    return [search.candidate(plan) for plan in different(search.plans(n_stages), n_best)]


@pytest.mark.parametrize(
    ("shape", "n_stages"),
    [((4,), None), ((4,), 2), ((2, 2), 3), ((2, 2), 4), ((2, 4), None), ((2, 4), 3)],
)
def test_candidates_hold_every_rank_in_as_many_stages_as_asked(
    shape: tuple[int, ...], n_stages: int | None
) -> None:
    mesh = cluster(*shape)
    # Only the first case searches for the number of microbatches; that has tests of its own.
    found = candidates(gpt2(), mesh, n_stages, microbatches="auto" if shape == (4,) else 4)
    assert 1 <= len(found) <= 6
    assert len({(c.ends, c.stages[0].view.sizes, c.name) for c in found}) == len(found)
    for candidate in found:
        assert_covers(candidate, mesh)
        cut(gpt2().program, candidate.ends)
        assert len(candidate.ends) == (n_stages or max(2, len(candidate.ends)))
        assert candidate.name.endswith(f"m={candidate.n_microbatches}")
        assert gpt2().batch.size % candidate.n_microbatches == 0


def test_as_given_meshes_keep_their_axes() -> None:
    mesh = Mesh((2, 2), ("outer", "inner"), hardware="cpu-local")
    found = candidates(gpt2(), mesh, 2, mesh_shape="as-given")
    assert {c.stages[0].view.names for c in found} == {("outer", "inner")}
    assert {stage.view.sizes for c in found for stage in c.stages} <= {(1, 1), (1, 2)}


def test_what_may_not_be_is_not_proposed() -> None:
    mesh = cluster(4)
    assert candidates(gpt2(), mesh, forbid=["pipeline"]) == []
    assert candidates(gpt2(), cluster(1)) == []
    assert candidates(gpt2(), mesh, budget_bytes=1.0, microbatches=4) == []
    assert candidates(gpt2(), mesh, 5, microbatches=4) == []
    found = candidates(gpt2(), mesh, 2, forbid=["tensor"], microbatches=4)
    (limits,) = {repr(s.constraints) for c in found for s in c.stages}
    assert "tensor" in limits


def test_microbatches_are_those_asked_for_or_possible() -> None:
    mesh = cluster(2)
    assert {c.n_microbatches for c in candidates(gpt2(), mesh, microbatches=4)} == {4}
    with pytest.raises(BatchError, match="does not divide"):
        candidates(gpt2(), mesh, microbatches=7)
    unsplit = replace(gpt2(), batch=replace(gpt2().batch, broken_at="somewhere"))
    assert {c.n_microbatches for c in candidates(unsplit, mesh)} == {1}


def test_pins_go_to_the_stages() -> None:
    mesh = cluster(2, 2)
    name = "transformer.h.0.mlp.c_fc.weight"
    options = Options.of(force={name: "->S(1)@tp"}, microbatches=4)
    search = joint_search(gpt2(), mesh, hardware_of(mesh), options, 64 * GIB, 2)
    assert search is not None
    for view in search.views:
        assert search.constraints(view).pins
    for candidate in map(search.candidate, search.plans(2)):
        for stage in candidate.stages:
            assert stage.view.axes["tp"] > 1
            assert stage.constraints == search.constraints(stage.view)
    with pytest.raises(OptionError, match="no parameter of the model"):
        candidates(gpt2(), mesh, 2, force={"nothing": "I@tp"})


def test_little_memory_forces_more_stages() -> None:
    """If nothing is sharded inside a stage, only stages divide the parameters."""
    mesh, whole = cluster(4), ["tensor", "zero1", "zero2", "zero3", "recompute"]
    costs, *_ = stage_costs(gpt2(), {"dp": 1, "tp": 1}, 16)
    least = []
    for share in (1.5, 0.6, 0.45):
        # In flight, 1F1B keeps about as much on each stage as one microbatch in all.
        budget_bytes = share * costs.total("static") + 1.3 * costs.total("activation")
        found = candidates(gpt2(), mesh, None, budget_bytes, 20, forbid=whole)
        least.append(min(len(c.ends) for c in found))
    assert least == sorted(least) and least[0] < least[-1], least


def test_gpipe_keeps_all_microbatches() -> None:
    mesh = cluster(4)
    hardware = hardware_of(mesh)
    bytes_of = []
    for schedule in ("1f1b", "gpipe"):
        options = Options.of(schedule=schedule)
        search = joint_search_on(gpt2(), mesh, hardware, options, 64 * GIB)
        problem = search.problem(16, 2)
        assert problem is not None
        bytes_of.append(problem.stage_bytes(1)[0, -1, 0])
    assert bytes_of[1] > bytes_of[0]


def exact_s(simulator: Simulator, candidate: Candidate) -> float:
    return simulator.solve(candidate).step_time_s


@pytest.mark.parametrize("hardware_name", ["cpu-local", "a100-80gb"])
def test_the_best_candidate_is_near_the_best_of_all_cuts(hardware_name: str) -> None:
    """Every cut in two between layers, solved and simulated."""
    analysis = wide_mlp()
    mesh = Mesh((2,), hardware=hardware_name)
    hardware = hardware_of(mesh)
    options = Options.of()

    def predicted(pipeline: object, costs: object) -> Predicted:
        between = link_between(mesh, hardware.links)
        return predict(pipeline, costs, "adamw", between)  # type: ignore[arg-type]

    simulator = Simulator(Evaluator(analysis, options, hardware, 64 * GIB), predicted)
    proposed = candidates(analysis, mesh, 2, n_best=4)
    best_s = min(exact_s(simulator, c) for c in proposed)
    layers = find_layers(analysis, find_runs(analysis))
    every = [
        replace(proposed[0], ends=(end, layers.ends[-1]), n_microbatches=m)
        for end in layers.ends[:-1]
        for m in (1, 2, 4, 8, 16, 32)
    ]
    assert best_s <= min(exact_s(simulator, c) for c in every) * 1.03


def test_climbing_stops_where_it_no_longer_helps() -> None:
    seen: list[int] = []

    def cost_s(m: int) -> float:
        seen.append(m)
        return {1: math.inf, 2: math.inf, 4: 5.0, 8: 3.0, 16: 4.0}[m]

    assert climb([1, 2, 4, 8, 16, 32], cost_s) == 8
    assert 32 not in seen
    assert climb([1, 2], cost_s) == 1
    assert climb([4], cost_s) == 4


def test_submeshes_share_nodes_or_have_whole_ones() -> None:
    assert submesh_sizes(cluster(2, 8)) == [1, 2, 4, 8]
    assert submesh_sizes(cluster(6, 4)) == [1, 2, 4, 8, 12, 16]
    assert submesh_sizes(cluster(6)) == [1, 2, 3]
