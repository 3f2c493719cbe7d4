"""Repeated blocks under a budget: branches partition all choices, exchanges fill the budget."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from autopar.passes.solvers.choice import Point, solve
from autopar.passes.solvers.problem import ChoiceProblem, Edge, Infeasible, Solution, Weights
from autopar.passes.solvers.repeats import (
    Repeat,
    RepeatedChoice,
    RepeatedPlan,
    RepeatedProblem,
)
from autopar.passes.solvers.repeats.elimination import Branch, RepeatedElimination
from autopar.passes.solvers.repeats.exchange import Exchanges
from tests.helpers.nightly import nightly
from tests.helpers.problems import REL, WEIGHTS, random_repeated, repeated_solver, unroll, weighed


def solved(
    problem: RepeatedProblem, budget_bytes: float, goal: float = 0.0
) -> Solution[RepeatedChoice]:
    found = repeated_solver(problem).solve(budget_bytes, gap_goal=goal)
    assert not isinstance(found, Infeasible)
    return found


def test_branches_part_all_choices() -> None:
    n_changing = 0
    for seed in range(30):
        problem = random_repeated(seed)
        elimination = RepeatedElimination(problem, RepeatedPlan(problem.every))
        for r, weights in ((r, w) for r in range(len(problem.repeats)) for w in WEIGHTS):
            whole, _ = elimination.at(weights)
            every: list[int | None] = [*range(elimination.n_states(r)), None]
            values = []
            for state in every:
                value, point = elimination.within(Branch(r, state)).at(weights)
                values.append(value)
                if math.isinf(value):
                    continue
                handed_on = elimination.states(r, point.choice)
                if state is not None:
                    assert handed_on == {state}
                else:
                    n_changing += len(handed_on) > 1
                summed = weighed(point.totals, weights)
                assert summed == pytest.approx(value, rel=REL, abs=1e-15)
            assert min(values) == pytest.approx(whole, rel=REL, abs=1e-15), (seed, r)
    assert n_changing > 10


def chain_of_states(n_copies: int, change_s: float) -> RepeatedProblem:
    """Each copy costs a second or a byte, and a change from the copy before costs extra."""
    pay = np.array([1.0, 0.0])
    change = np.array([[0.0, change_s], [change_s, 0.0]])
    numbers = ChoiceProblem(
        ("first", "copy"), (pay, pay), (1 - pay, 1 - pay),
        (Edge(0, 1, change),),
    )  # fmt: skip
    return RepeatedProblem.of_one(numbers, (Repeat((1,), {0: 1}, frozenset(), n_copies),))


def test_what_a_change_costs_is_in_the_bound() -> None:
    """A price of bytes alone mixes ten fast and ten lean copies for free, a bound of 10."""
    problem = chain_of_states(19, 6.0)
    found = solved(problem, 10.0)
    assert found.totals.cost_s == 16.0
    assert found.gap <= 0.5 / 16
    assert solved(problem, 2.0).totals.cost_s == 20.0  # a change is not worth it
    wanted = solve(replace(unroll(problem)[0], budget_bytes=10.0))
    assert not isinstance(wanted, Infeasible) and wanted.totals.cost_s == 16.0


def uneven_parts(n_copies: int) -> RepeatedProblem:
    """Copies of a large and a small part; each costs its bytes, or as many seconds."""
    large, small = np.array([7.0, 0.0]), np.array([2.0, 0.0])
    numbers = ChoiceProblem(("large", "small"), (large, small), (large[::-1], small[::-1]))
    return RepeatedProblem.of_one(numbers, (Repeat((0, 1), {}, frozenset(), n_copies),))


@pytest.mark.parametrize("budget_bytes", [9.0, 16.0, 24.0, 62.0])
def test_exchanges_fill_the_budget(budget_bytes: float) -> None:
    """A whole copy changes nine bytes, its parts two or seven."""
    found = solved(uneven_parts(10), budget_bytes)
    assert budget_bytes - 2 < found.totals.bytes <= budget_bytes
    assert found.totals.cost_s == 90.0 - found.totals.bytes


def test_exchanges_from_over_the_budget() -> None:
    problem = uneven_parts(10)
    fastest, lean = (RepeatedChoice(k, ((k,) * 10,)) for k in ((1, 1), (0, 0)))
    exchanges = Exchanges(problem, 40.0, [lean])
    found = exchanges.fit(Point(fastest, problem.evaluate(fastest)))
    assert found is not None and 40.0 - 7.0 < found.totals.bytes <= 40.0
    assert problem.evaluate(found.choice) == found.totals
    found = Exchanges(problem, 0.0, []).fit(Point(fastest, problem.evaluate(fastest)))
    assert found is not None and found.choice == lean


@nightly
def test_gaps_are_honest_and_closed_to_the_goal() -> None:
    """Longer problems than elsewhere, where a copy is a small part of the budget."""
    n_wide = n_all = 0
    for seed in range(24):
        problem = random_repeated(seed)
        long = tuple(replace(r, count=7) for r in problem.repeats)
        problem = RepeatedProblem.of_one(problem.numbers, long)
        elimination = RepeatedElimination(problem, RepeatedPlan(problem.every))
        value, fastest = elimination.at(Weights())
        if math.isinf(value) or fastest.totals.cost_s == 0:
            continue
        _, lean = elimination.at(Weights(0.0, size=1.0))
        budget_bytes = (2 * lean.totals.bytes + fastest.totals.bytes) / 3
        wanted = solve(replace(unroll(problem)[0], budget_bytes=budget_bytes))
        assert not isinstance(wanted, Infeasible)
        for goal in (0.0, 0.05):
            found = solved(problem, budget_bytes, goal)
            assert found.totals.bytes <= budget_bytes
            assert found.totals.cost_s * (1 - found.gap) <= wanted.totals.cost_s * (1 + REL)
            assert found.totals.cost_s >= wanted.totals.cost_s * (1 - REL)
            n_all += 1
            n_wide += found.gap > max(goal, 0.03)
    assert n_all > 20 and n_wide <= n_all // 4, (n_all, n_wide)


def test_above_a_limit_no_more_is_found_out() -> None:
    n_over = 0
    for seed in range(20):
        problem = random_repeated(seed)
        best = repeated_solver(problem).solve(None)
        if isinstance(best, Infeasible):
            continue
        cost_s = best.totals.cost_s
        over = repeated_solver(problem).solve(None, limit_s=cost_s * (1 - REL))
        under = repeated_solver(problem).solve(None, limit_s=cost_s * (1 + 2 * REL))
        assert not isinstance(over, Infeasible)
        assert under == best and best.settled
        assert over.totals.cost_s == pytest.approx(cost_s, rel=REL)
        assert over.settled == (cost_s == 0.0)
        n_over += not over.settled
    assert n_over > 5
