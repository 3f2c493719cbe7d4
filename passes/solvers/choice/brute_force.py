"""All combinations enumerated: the definition that the other solvers are tested against."""

from __future__ import annotations

import math

import numpy as np

from autopar.passes.solvers.problem import (
    BUDGET_REL,
    FORBIDDEN,
    ChoiceProblem,
    FloatArray,
    Infeasible,
    ProblemError,
    Solution,
    make_solution,
    over_budget,
)

MAX_CHOICES = 2**22


def solve_brute_force(problem: ChoiceProblem) -> Solution | Infeasible:
    """The exact optimum over all combinations; of equal ones that of the smallest indices.

    Raises `ProblemError` above `MAX_CHOICES` combinations.
    """
    n_choices = math.prod(problem.sizes)
    if n_choices > MAX_CHOICES:
        raise ProblemError(
            f"{n_choices} combinations are too many to enumerate",
            hint="use autopar.passes.solvers.solve",
        )
    cost, size = np.zeros(problem.sizes), np.zeros(problem.sizes)
    for v in range(problem.n_variables):
        cost += _along(problem, problem.cost_s[v], v)
        size += _along(problem, problem.bytes[v], v)
    for e in problem.edges:
        cost += _along(problem, e.dense(e.cost_s), e.u, e.v)
        size += _along(problem, e.dense(e.bytes_or_zero()), e.u, e.v)
    possible = np.isfinite(cost)
    if not possible.any():
        return FORBIDDEN
    if problem.budget_bytes is not None:
        min_bytes = float(size[possible].min())
        if not problem.fits(min_bytes):
            return over_budget(problem.budget_bytes, min_bytes)
        cost[size > problem.budget_bytes * (1 + BUDGET_REL)] = math.inf
    choice = [int(k) for k in np.unravel_index(int(cost.argmin()), problem.sizes)]
    return make_solution(problem, choice, None, "brute force")


def _along(problem: ChoiceProblem, array: FloatArray, *variables: int) -> FloatArray:
    """`array` shaped to broadcast along the axes of its variables in the joint table."""
    ordered = array if list(variables) == sorted(variables) else array.T
    shape = [k if v in variables else 1 for v, k in enumerate(problem.sizes)]
    return ordered.reshape(shape)
