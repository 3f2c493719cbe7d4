"""The intra-operator problem of real programs: all solvers agree, and no recipe is faster."""

from __future__ import annotations

import math

import pytest

from autopar.mesh import Device, Link, Mesh
from autopar.options import Options
from autopar.passes.intra import Constraints, PlacementRequest, choose, intra_op_problem
from autopar.passes.lowering import lower
from autopar.passes.search import Planner
from autopar.passes.solvers.choice import solve, solve_brute_force
from tests.helpers.harness import MODELS, abstract_cost, free_problem, model_case
from tests.helpers.problems import solved


@pytest.mark.parametrize("model", MODELS)
def test_elimination_finds_the_optimum_of_the_whole_ilp(model: str) -> None:
    problem = free_problem(model, (4,), 1).numbers
    fast, whole = solved(solve(problem)), solved(solve(problem, "ilp"))
    assert whole.gap == 0.0
    assert fast.objective_s == pytest.approx(whole.objective_s, rel=1e-9)
    assert fast.tie == pytest.approx(whole.tie, rel=1e-6)


def test_both_agree_on_two_axes() -> None:
    problem = free_problem("mlp", (2, 2), 1).numbers
    fast, whole = solved(solve(problem)), solved(solve(problem, "ilp", 200.0))
    assert fast.objective_s == pytest.approx(whole.objective_s, rel=1e-6)


def test_brute_force_agrees_on_a_small_program() -> None:
    """With storage fixed to that of the optimum, the MLP has few enough choices to enumerate."""
    case = model_case("mlp")
    best = choose(
        case.analysis, PlacementRequest(abstract_cost((2,)), 1, Constraints()), "adamw", None
    )
    fixed = Constraints(storage=dict(best.strategy.storage))
    problem = intra_op_problem(case.analysis, abstract_cost((2,)), 1, fixed, "adamw").numbers
    assert math.prod(problem.sizes) > 1000, "too little to choose from"
    while math.prod(problem.sizes) > 2e6:  # keep the cheapest half of the widest variable
        widest = max(range(problem.n_variables), key=lambda v: problem.sizes[v])
        keep = [c >= 0 for c in problem.cost_s]
        keep[widest][len(keep[widest]) // 2 :] = False
        problem = problem.restrict(keep)
    assert solved(solve(problem)).objective_s == pytest.approx(
        solved(solve_brute_force(problem)).objective_s, rel=1e-12
    )


def test_consumers_alike_share_one_reshard() -> None:
    """Megatron's f after a norm: q, k and v of a Llama block read one reshard."""
    case, cost = model_case("llama"), abstract_cost((2,))
    limits = Constraints(frozenset({"sequence"}), ("tensor",), 0)
    chosen = choose(case.analysis, PlacementRequest(cost, 1, limits), "adamw", None)
    program = lower(case.analysis, chosen.strategy, cost)
    entries = [m for m in program.moves() if m.move.name == "i_to_r"]
    read = [m.source for m in entries]
    assert len(set(read)) == len(read), "a tensor is resharded twice to one placement"


@pytest.mark.parametrize("model", ["mlp", "bert-view"])
@pytest.mark.parametrize("s_per_byte", [1e-12, 1e-9, 1e-6])
def test_the_plan_is_never_worse_than_the_recipes(model: str, s_per_byte: float) -> None:
    """Over slow and fast links, the plan is the fastest of all candidates."""
    links = [Link(1e-6, s_per_byte)] * 2
    mesh = Mesh((1, 4), links=links, device=Device(1e12, 1e12, 1e12, 1e-6))
    # Only the MLP is planned with stages too; other tests do that for larger models.
    forbid = ["pipeline"] if model == "bert-view" else []
    options = Options.of(precision="fp64", forbid=forbid)

    outcome = Planner(model_case(model).analysis, mesh, options).run()
    times = [a.step_time_s for a in outcome.alternatives]
    assert len(times) >= 5
    least_s = outcome.solved.step_time_s
    assert all(time is None or least_s <= time * (1 + 1e-9) for time in times)
