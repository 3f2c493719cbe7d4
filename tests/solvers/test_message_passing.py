"""Message passing: its bound is one, its choice is allowed, and on trees they meet."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autopar.passes.solvers.choice.message_passing import MessagePassing
from autopar.passes.solvers.problem import ChoiceProblem, Weights
from tests.helpers.problems import least, random_problem, seeds, weighed


def is_tree(problem: ChoiceProblem) -> bool:
    """No two ways between two variables."""
    root = list(range(problem.n_variables))

    def of(v: int) -> int:
        while root[v] != v:
            v = root[v]
        return v

    for e in problem.edges:
        if of(e.u) == of(e.v):
            return False
        root[of(e.u)] = of(e.v)
    return True


@pytest.mark.parametrize("seed", seeds(60, 240))
def test_bounds_and_choices(seed: int) -> None:
    problem = replace(random_problem(seed), budget_bytes=None)
    for weights in (Weights(), Weights(cost=2.0), Weights(size=1e-6)):
        wanted = least(problem, weights)
        bound, point = MessagePassing(problem).at(weights)
        if math.isinf(wanted):
            assert math.isinf(point.totals.cost_s)
            continue
        is_found = math.isfinite(point.totals.cost_s)
        total = weighed(point.totals, weights) if is_found else math.inf
        assert bound <= wanted * (1 + 1e-9) and wanted <= total * (1 + 1e-9)
        if is_tree(problem):
            assert bound == pytest.approx(total, rel=1e-9)


def test_some_random_problems_are_trees_and_some_are_forbidden() -> None:
    problems = [random_problem(seed) for seed in range(60)]
    assert 5 < sum(map(is_tree, problems)) < 55
    assert any(math.isinf(least(problem, Weights())) for problem in problems)
