"""Limits on the work of the ILP that do not depend on the machine."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pulp
import pytest

from autopar.passes.solvers.choice import WorkLimit, most_columns, solve, solve_ilp
from autopar.passes.solvers.choice.ilp import minimise_cost
from autopar.passes.solvers.problem import ChoiceProblem, Solution, TimeLimitError
from tests.helpers.problems import REL, chain_with_residuals


def tight(seed: int, share: float = 0.8) -> tuple[ChoiceProblem, Solution]:
    """A budget of a share of what the optimum needs, and the optimum within it."""
    problem = chain_with_residuals(16, 6, seed)
    free = solve(problem)
    assert isinstance(free, Solution)
    problem = replace(problem, budget_bytes=share * free.bytes)
    best = solve(problem, "ilp")
    assert isinstance(best, Solution) and best.gap == 0
    return problem, best


@pytest.mark.parametrize("seed", range(4))
def test_what_is_left_is_in_the_gap(seed: int) -> None:
    problem, best = tight(seed)
    for work_limit in (WorkLimit(0, 1), WorkLimit(None, 1), WorkLimit(None, 10**6)):
        found = solve(problem, work_limit=work_limit)
        assert isinstance(found, Solution)
        assert found == solve(problem, work_limit=work_limit)
        assert found.objective_s >= best.objective_s * (1 - REL)
        assert found.bound_s <= best.objective_s * (1 + REL)
        if work_limit.n_nodes > 1:
            assert found.gap == 0 and found.objective_s == pytest.approx(best.objective_s, rel=REL)


def test_programs_with_many_columns_are_not_solved() -> None:
    problem, _ = tight(0)
    assert most_columns(problem.sizes, [e.cost_s.shape for e in problem.edges]) > 10
    result = minimise_cost(problem.merged(), None, WorkLimit(10, 1))
    assert result.choice is None and not result.proven


def test_spent_before_anything_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped at once, HiGHS has an infinite objective, and PuLP a status that says feasible."""

    def stopped(program: pulp.LpProblem, solver: object) -> int:
        program.solverModel = SimpleNamespace(
            getInfo=lambda: SimpleNamespace(objective_function_value=math.inf, mip_dual_bound=0.0)
        )
        program.assignStatus(pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible)
        return pulp.LpStatusOptimal

    problem, _ = tight(0)
    monkeypatch.setattr(pulp.LpProblem, "solve", stopped)
    with pytest.raises(TimeLimitError, match="found no feasible choice in 3 nodes"):
        solve_ilp(problem, work_limit=WorkLimit(None, 3))
