"""One optimum, found in three ways: by the folded problem of repeated blocks, by elimination on the
whole program's problem, and by the whole ILP, which defines it.

Five families, each with at least five blocks, on one axis and on two. A ResNet learns its batch
statistics, so folding finds no two equal blocks in it. A frozen one has equal blocks.

Most whole ILPs on two axes or under a budget take up to a minute each; those of T5 and Mixtral
under a budget take many. Ordinary runs solve the cheapest of each kind, `make nightly` all of them
(ten minutes).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from autopar.passes.intra import Chooser, Chosen, Constraints, PlacementRequest, intra_op_problem
from autopar.passes.solvers.choice import solve, solve_by_elimination
from autopar.passes.solvers.problem import ChoiceProblem, Infeasible, Solution
from tests.helpers.machines import balanced_cost
from tests.helpers.models.families import FAMILIES, folded
from tests.helpers.nightly import nightly, sampled
from tests.helpers.problems import solved

pytestmark = pytest.mark.usefixtures("nothing_hidden")
REL = 1e-6
# Sums of the same numbers in another order.
ROUNDING_REL = 1e-9
# The optimum is proven long before; breaking ties takes longest.
SOLVER_S = 1000.0
NO_ZERO = "zero1 zero2 zero3 sequence"
BY_ROWS = f"{NO_ZERO} tensor"
Case = tuple[str, ...]


@cache
def by_blocks(
    family: str, sizes: tuple[int, ...], forbid: str, budget_bytes: float | None = None
) -> Chosen:
    """The choice for the folded program, as the planner makes it."""
    ask = PlacementRequest(balanced_cost(sizes), 1, Constraints(frozenset(forbid.split())))
    return Chooser(folded(family), "adamw").choose(ask, budget_bytes)


@cache
def whole_problem(
    family: str, sizes: tuple[int, ...], forbid: str, budget_bytes: float | None = None
) -> ChoiceProblem:
    limits = Constraints(frozenset(forbid.split()))
    problem = intra_op_problem(folded(family).whole, balanced_cost(sizes), 1, limits, "adamw")
    return problem.under(budget_bytes, 1).numbers


def launches_s(family: str) -> float:
    """Of the optimizer; they are in a choice's objective, but not in the problem's."""
    problem = intra_op_problem(folded(family).whole, balanced_cost((4,)), 1, Constraints(), "adamw")
    assert problem.launches_s > 0
    return problem.launches_s


EVERY: list[Case] = [(family, axes, "") for axes in ("4", "2x2") for family in FAMILIES]
RESTRICTED: list[Case] = [
    (family, "2x2", forbid) for family in FAMILIES for forbid in (NO_ZERO, BY_ROWS)
]
BUDGETS: list[Case] = [
    *((family, "4", "", "0.75") for family in ("gpt2", "llama", "resnet")),
    ("gpt2", "4", "", "0.8"),
    ("llama", "4", "", "0.72"),
    ("frozen resnet", "4", "", "0.65"),
    *((family, "4", "zero1 zero2 sequence", "0.9") for family in ("gpt2", "frozen resnet")),
]


def sizes_of(axes: str) -> tuple[int, ...]:
    return tuple(map(int, axes.split("x")))


@pytest.mark.parametrize("solver", [solve_by_elimination, pytest.param(solve, marks=nightly)])
@pytest.mark.parametrize(
    ("family", "axes", "forbid"),
    sampled(EVERY, [case for case in EVERY if case[:2] != ("t5", "2x2")]),
)
def test_folded_is_eliminated(
    family: str,
    axes: str,
    forbid: str,
    solver: Callable[[ChoiceProblem], Solution | Infeasible],
) -> None:
    chosen = by_blocks(family, sizes_of(axes), forbid)
    problem = whole_problem(family, sizes_of(axes), forbid)
    eliminated = solved(solver(problem))
    assert eliminated.gap == chosen.gap == 0
    objective_s = eliminated.objective_s + launches_s(family)
    assert chosen.objective_s == pytest.approx(objective_s, rel=REL)
    if family != "resnet":
        assert chosen.n_variables < problem.n_variables, "nothing was folded"


@pytest.mark.parametrize(
    ("family", "axes", "forbid"),
    sampled(
        [*EVERY, *RESTRICTED],
        [*EVERY[: len(FAMILIES)], ("resnet", "2x2", BY_ROWS), ("gpt2", "2x2", BY_ROWS)],
    ),
)
def test_folded_is_the_whole_ilp(family: str, axes: str, forbid: str) -> None:
    chosen = by_blocks(family, sizes_of(axes), forbid)
    whole = solved(solve(whole_problem(family, sizes_of(axes), forbid), "ilp"))
    assert whole.gap == 0
    assert chosen.objective_s == pytest.approx(whole.objective_s + launches_s(family), rel=REL)


@pytest.mark.parametrize(
    ("family", "axes", "forbid", "share"),
    sampled(
        BUDGETS,
        [("resnet", "4", "", "0.75"), ("frozen resnet", "4", "zero1 zero2 sequence", "0.9")],
    ),
)
def test_the_gap_covers_the_optimum_within_a_budget(
    family: str, axes: str, forbid: str, share: str
) -> None:
    """`objective_s` (1 - gap) <= optimum <= `objective_s`, and the budget is kept."""
    sizes = sizes_of(axes)
    free = by_blocks(family, sizes, forbid)
    budget_bytes = float(share) * free.size_bytes
    chosen = by_blocks(family, sizes, forbid, budget_bytes)
    whole = solved(solve(whole_problem(family, sizes, forbid, budget_bytes), "ilp", SOLVER_S))
    assert whole.gap == 0
    optimum_s = whole.objective_s + launches_s(family)
    assert optimum_s > free.objective_s * (1 + REL), "the budget does not bind"
    assert optimum_s <= chosen.objective_s * (1 + ROUNDING_REL)
    assert chosen.bound_s <= optimum_s * (1 + ROUNDING_REL)
    assert 0 <= chosen.gap < 1
    assert chosen.size_bytes <= budget_bytes * (1 + ROUNDING_REL)
