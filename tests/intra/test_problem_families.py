"""Problems that are built together are the same as those built alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from autopar.cost.laws import CostModel
from autopar.errors import BatchError
from autopar.mesh import Link, Mesh, factored_view
from autopar.options import Options
from autopar.passes.analysis import Analysis, Recomputable, cut
from autopar.passes.inter import n_operators
from autopar.passes.intra import (
    Constraints,
    IntraOpProblem,
    Prices,
    ProblemFamilies,
    intra_op_problem,
    recipe_cost,
)
from autopar.passes.solvers.choice import solve
from tests.helpers.harness import abstract_cost, language_model, model_case, placed, tiny_gpt2
from tests.helpers.machines import hardware_of
from tests.helpers.nightly import nightly
from tests.helpers.problems import solved

REL = 1e-12
LIMITS = {
    "free": Constraints(),
    "no ZeRO": Constraints(frozenset({"zero1", "zero2", "zero3"})),
    "Megatron": Constraints(frozenset({"sequence"}), ("data", "tensor"), 0),
    "data parallel": Constraints(roles=("data", "data")),
}
# With all four devices and with fewer, on both axes and on one.
SHAPES = ((2, 2), (4, 1), (1, 4), (2, 1), (1, 2))


def optimum(problem: IntraOpProblem, budget_bytes: float | None = None) -> list[float]:
    found = solved(solve(problem.under(budget_bytes, 1).numbers))
    return [found.totals.cost_s, found.totals.bytes]


def alone(
    analysis: Analysis, cost: CostModel, m: int, limits: Constraints, again: Recomputable | None
) -> IntraOpProblem:
    """Shares prices with no other problem."""
    return intra_op_problem(analysis, cost, m, limits, "adamw", None, again)


def assert_families_are_alone(
    analysis: Analysis, shapes: Sequence[tuple[int, ...]], counts: Sequence[int],
    limits: Constraints, again: Recomputable | None = None, share: float | None = None,
) -> None:  # fmt: skip
    """In any order of requests; `share` of the bytes of the fastest placements is the budget."""
    costs = tuple(map(abstract_cost, shapes))
    wanted = {}
    for cost in costs:
        for m in counts:
            problem = alone(analysis, cost, m, limits, again)
            budget_bytes = None if share is None else share * optimum(problem)[1]
            wanted[cost, m] = budget_bytes, optimum(problem, budget_bytes)
    for seed in range(2):
        problems = ProblemFamilies(analysis, "adamw", (costs,), counts, recomputable=again)
        order = list(wanted)
        random.Random(seed).shuffle(order)
        for cost, m in order:
            budget_bytes, expected = wanted[cost, m]
            found = problems.of(cost, m, limits).of(cost, m)
            assert optimum(found, budget_bytes) == pytest.approx(expected, rel=REL), (cost.mesh, m)


@pytest.mark.parametrize("limits", LIMITS)
def test_families_are_problems_alone(limits: str) -> None:
    """Many problems are built at once for all devices, few for a part of them."""
    assert_families_are_alone(model_case("mlp").analysis, SHAPES, (1, 2, 4), LIMITS[limits])


@nightly
def test_families_with_recompute_are_problems_alone() -> None:
    """Under a budget that some blocks must run again for."""
    analysis = language_model(tiny_gpt2, 2)
    again = Recomputable.of(analysis, Options())
    assert again is not None
    limits = Constraints(frozenset({"zero1", "zero2", "zero3", "tensor", "sequence"}))
    assert_families_are_alone(analysis, ((4, 1), (2, 1)), (1, 2, 4), limits, again, 0.95)


def test_numbers_of_microbatches_together_are_each_alone() -> None:
    """Also where rows of a microbatch, two of eight, no longer divide over four ranks; four ranks
    divide the heads, and eight do not."""
    shapes = ((2, 4), (2, 8))
    assert_families_are_alone(model_case("llama").analysis, shapes, (1, 8), Constraints())


def test_numbers_of_microbatches_that_do_not_divide_the_batch_are_refused() -> None:
    cost = abstract_cost((2, 4))
    problems = ProblemFamilies(model_case("llama").analysis, "adamw", ((cost,),), (1, 2, 4, 3))
    with pytest.raises(BatchError):
        problems.of(cost, 3, Constraints())


def test_machines_of_several_families_offer_the_same_choices() -> None:
    """Meshes that differ in their links alone are one abstract machine. What is chosen there is
    read on the real one."""
    mesh, (slow, fast) = Mesh((2, 4), hardware="cpu-local"), (Link(1e-5, 1e-9), Link(1e-6, 1e-10))
    analysis, hardware = model_case("llama").analysis, hardware_of(mesh)
    shapes = [{"dp": 2, "tp": 4}, {"dp": 4, "tp": 2}]
    real = [
        CostModel(factored_view(mesh, links, hardware.device, axes), torch.float64)
        for axes in shapes
        for links in ((slow, fast), (fast, slow))
    ]
    abstract = tuple(map(recipe_cost, real))
    problems = ProblemFamilies(analysis, "adamw", (tuple(real), abstract), (1, 2, 4))
    for cost, other in zip(real, abstract, strict=True):
        for m in (1, 2, 4):
            here, there = (problems.of(c, m, Constraints()).of(c, m) for c in (cost, other))
            assert here.numbers.names == there.numbers.names
            chosen = solved(solve(there.numbers)).choice
            assert placed(here, chosen) == placed(there, chosen)


@pytest.mark.parametrize("recomputes", [False, True])
def test_stages_that_share_prices_are_stages_alone(recomputes: bool) -> None:
    """Both halves of a chain of equal blocks."""
    analysis, cost = language_model(tiny_gpt2, 6), abstract_cost((2, 2))
    again = Recomputable.of(analysis, Options()) if recomputes else None
    n = n_operators(analysis.program)
    parts = [analysis.part(program) for program in cut(analysis.program, (n // 2, n))]
    prices, limits = Prices(), Constraints()
    found = [
        intra_op_problem(p, cost, 1, limits, "adamw", None, again, prices=prices) for p in parts
    ]
    assert [*map(optimum, found)] == [optimum(alone(p, cost, 1, limits, again)) for p in parts]
