"""One optimum, found in three ways: by the folded problem of repeated blocks, by elimination on the
whole program's problem, and by the whole ILP, which defines it.

Each program has at least five blocks. A ResNet learns its batch statistics, so folding finds no two
equal blocks in it. A frozen one has equal blocks.

Ordinary runs solve the cheapest ILPs of each kind, `make nightly` all of them (ten minutes).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from autopar.cost.laws import CostModel
from autopar.passes.analysis import Analysis, Folded, find_runs, fold
from autopar.passes.intra import (
    Chooser,
    Chosen,
    Constraints,
    IntraOpProblem,
    PlacementRequest,
    choose,
    intra_op_problem,
)
from autopar.passes.solvers.choice import solve
from tests.helpers.captures import captured
from tests.helpers.harness import WIDTH, placed, random_rows, random_tokens, thread_step
from tests.helpers.machines import balanced_cost
from tests.helpers.models import families
from tests.helpers.models.blocks import N_BLOCKS, Block, Chain, SharedBlock, TwoStacks
from tests.helpers.models.families import FAMILIES
from tests.helpers.nightly import one_in, sampled
from tests.helpers.problems import solve_by_elimination, solved

REL = 1e-6
# Sums of the same numbers in another order.
ROUNDING_REL = 1e-9
# The optimum is proven long before; breaking ties takes longest.
SOLVER_S = 1000.0
NO_ZERO = "zero1 zero2 zero3 sequence"
BY_ROWS = f"{NO_ZERO} tensor"
BLOCKS = {
    "chain": lambda: Chain([Block(WIDTH) for _ in range(N_BLOCKS)]),
    "two stacks": TwoStacks,
    "shared": SharedBlock,
}
Case = tuple[str, ...]


@cache
def folded(name: str) -> Folded:
    if name in FAMILIES:
        return families.folded(name)
    torch.manual_seed(0)
    program = captured(BLOCKS[name](), random_rows(0, "x"), precision="fp64")
    analysis = Analysis.of(program)
    return fold(analysis, find_runs(analysis))


def cost_on(axes: str) -> CostModel:
    """A machine that hides no communication: the objective is a sum."""
    return replace(balanced_cost(tuple(map(int, axes.split("x")))), hides=False)


@cache
def by_blocks(name: str, axes: str, forbid: str, budget_bytes: float | None = None) -> Chosen:
    """The choice for the folded program, as the planner makes it."""
    ask = PlacementRequest(cost_on(axes), 1, Constraints(frozenset(forbid.split())))
    return Chooser(folded(name), "adamw").choose(ask, budget_bytes)


@cache
def whole_problem(name: str, axes: str, forbid: str) -> IntraOpProblem:
    limits = Constraints(frozenset(forbid.split()))
    return intra_op_problem(folded(name).whole, cost_on(axes), 1, limits, "adamw")


EVERY: list[Case] = [(name, axes, "") for axes in ("4", "2x2") for name in FAMILIES]
RESTRICTED: list[Case] = [
    (name, "2x2", forbid) for name in FAMILIES for forbid in (NO_ZERO, BY_ROWS)
]
SMALL: list[Case] = [
    *((name, axes, "") for axes in ("4", "2x2") for name in ("chain", "two stacks")),
    ("gpt2", "2x2", "zero1 zero2 zero3"),
    ("llama", "4", "data"),
]
BUDGETS: list[Case] = [
    *((name, "4", "", "0.75") for name in ("gpt2", "llama", "resnet")),
    ("gpt2", "4", "", "0.8"),
    ("llama", "4", "", "0.72"),
    ("frozen resnet", "4", "", "0.65"),
    *((name, "4", "zero1 zero2 sequence", "0.9") for name in ("gpt2", "frozen resnet")),
    ("chain", "4", "", "0.75"),
]


@one_in(6)
@pytest.mark.parametrize(
    ("name", "axes", "forbid"),
    sampled(
        [*EVERY, *SMALL],
        [*SMALL, *(case for case in EVERY if case[0] not in ("t5", "mixtral", "resnet"))],
    ),
)
def test_folded_is_eliminated(name: str, axes: str, forbid: str) -> None:
    chosen, problem = by_blocks(name, axes, forbid), whole_problem(name, axes, forbid)
    eliminated = solved(solve_by_elimination(problem.numbers))
    assert eliminated.gap == chosen.gap == 0
    # Launches of the optimizer are in a choice's objective, but not in the problem's.
    objective_s = eliminated.totals.cost_s + problem.launches_s
    assert chosen.objective_s == pytest.approx(objective_s, rel=REL)
    if name != "resnet":
        assert chosen.n_variables < problem.numbers.n_variables, "nothing was folded"
    assert chosen.size_bytes == pytest.approx(eliminated.totals.bytes, rel=REL)
    operators, storage = placed(problem, eliminated.choice)
    assert chosen.strategy.operators.keys() == operators.keys()
    assert chosen.strategy.storage.keys() == storage.keys()


@one_in(3)
@pytest.mark.parametrize(
    ("name", "axes", "forbid"),
    sampled(
        [*EVERY, *RESTRICTED],
        [
            *((name, "4", "") for name in ("gpt2", "llama", "frozen resnet")),
            ("gpt2", "2x2", BY_ROWS),
        ],
    ),
)
def test_folded_is_the_whole_ilp(name: str, axes: str, forbid: str) -> None:
    chosen, problem = by_blocks(name, axes, forbid), whole_problem(name, axes, forbid)
    whole = solved(solve(problem.numbers, "ilp"))
    assert whole.gap == 0
    assert chosen.objective_s == pytest.approx(whole.totals.cost_s + problem.launches_s, rel=REL)


@one_in(3)
@pytest.mark.parametrize(("name", "axes", "forbid", "share"), sampled(BUDGETS, BUDGETS[-2:]))
def test_the_gap_covers_the_optimum_within_a_budget(
    name: str, axes: str, forbid: str, share: str
) -> None:
    """`objective_s` (1 - gap) <= optimum <= `objective_s`, and the budget is kept."""
    free, problem = by_blocks(name, axes, forbid), whole_problem(name, axes, forbid)
    budget_bytes = float(share) * free.size_bytes
    chosen = by_blocks(name, axes, forbid, budget_bytes)
    whole = solved(solve(problem.under(budget_bytes, 1).numbers, "ilp", SOLVER_S))
    assert whole.gap == 0
    optimum_s = whole.totals.cost_s + problem.launches_s
    assert optimum_s > free.objective_s * (1 + REL), "the budget does not bind"
    assert optimum_s <= chosen.objective_s * (1 + ROUNDING_REL)
    assert chosen.bound_s <= optimum_s * (1 + ROUNDING_REL)
    assert 0 <= chosen.gap < 1
    assert chosen.size_bytes <= budget_bytes * (1 + ROUNDING_REL)


def test_a_gap_that_copies_leave_is_closed_with_all_blocks_apart() -> None:
    budget_bytes = 0.75 * by_blocks("chain", "4", "").size_bytes
    chosen = by_blocks("chain", "4", "", budget_bytes)
    assert chosen.gap <= 1e-3
    assert chosen.n_variables == chosen.n_written_out, "copies alone leave no gap"


def test_blocks_that_share_weights_are_not_copies() -> None:
    assert folded("shared").runs
    ask = PlacementRequest(cost_on("4"), 1, Constraints())
    whole = choose(folded("shared").whole, ask, "adamw", None)
    chosen = by_blocks("shared", "4", "")
    assert chosen.n_variables == whole.n_variables and chosen.strategy == whole.strategy


@pytest.mark.parametrize(("name", "share"), [("two stacks", None), ("gpt2", 0.75)])
def test_a_step_of_the_whole_program(name: str, share: float | None) -> None:
    """Within a budget, equal blocks may store and keep different things."""
    chosen = by_blocks(name, "2x2", "")
    if share is not None:
        chosen = by_blocks(name, "2x2", "", share * chosen.size_bytes)
    batch = random_rows(1, "x") if name == "two stacks" else random_tokens(1)
    step = thread_step(folded(name).whole, cost_on("2x2"), chosen.strategy, batch, 1)
    assert step.wrong == {}
