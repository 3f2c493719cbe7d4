"""Which choices a problem with repeated blocks takes: the optimum, or nearly so under a budget.

Without a budget that binds, elimination finds the optimum, and of equals one of least tie, as
`select.py` does of a problem written out. Under one, the price of bytes gives a bound and a choice
that fits (`lagrangian.py`); their distance is the gap. From one corner of the hull to the next all
copies change at once, so what fits may leave much of the budget: then some copies take the choices
of the corner over the budget, as many as there is room for (`_mixed`).
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.passes.solvers.elimination import Weights
from autopar.passes.solvers.elimination_order import TooWide
from autopar.passes.solvers.lagrangian import Bracket, Point, leanest, search
from autopar.passes.solvers.problem import (
    FORBIDDEN,
    SAME_OPTIMUM_REL,
    Infeasible,
    Totals,
    over_budget,
    within,
)
from autopar.passes.solvers.repeats import RepeatedChoice, RepeatedProblem
from autopar.passes.solvers.repeats_elimination import RepeatedElimination
from autopar.passes.solvers.select import QUICK, break_ties


@dataclass(frozen=True)
class RepeatedSolution:
    """A choice within the budget, and how far (relative) it may be from the cheapest."""

    choice: RepeatedChoice
    totals: Totals
    gap: float


def solve_repeated(
    problem: RepeatedProblem, time_limit_s: float | None = None
) -> RepeatedSolution | Infeasible:
    """The cheapest choice within the budget of `problem.numbers`, or near it.

    Raises `TooWide` where a table would be too large.
    """
    deadline = time.perf_counter() + (math.inf if time_limit_s is None else time_limit_s)
    smaller, kept = problem, tuple(np.arange(k) for k in problem.numbers.sizes)
    try:
        elimination = RepeatedElimination(problem, QUICK)
    except TooWide:
        reduced = problem.reduced()
        if reduced is None:
            return FORBIDDEN
        smaller, kept = reduced
        elimination = RepeatedElimination(smaller)
    numbers = smaller.numbers
    value, fastest = elimination.at(Weights())
    if math.isinf(value):
        return FORBIDDEN
    most = max((repeat.count for repeat in problem.repeats), default=1)
    chosen = break_ties(numbers, elimination, fastest, most)
    budget_bytes = numbers.budget_bytes
    if budget_bytes is None or within(budget_bytes, chosen.totals.bytes):
        return _solution(problem, kept, chosen, 0.0)
    lean = fastest
    if not within(budget_bytes, fastest.totals.bytes):
        lean = leanest(elimination)
        if not within(budget_bytes, lean.totals.bytes):
            return over_budget(numbers, lean.totals.bytes)
    bracket = search(elimination, budget_bytes, fastest, lean, deadline)
    if not bracket.closed and bracket.neighbours is not None:
        found = _mixed(smaller, *bracket.neighbours)
        best = min((bracket.best, *found), key=lambda point: point.totals.cost_s)
        bracket = replace(bracket, best=best)
    return _solution(problem, kept, bracket.best, _gap(bracket))


def _mixed(
    problem: RepeatedProblem, over: Point[RepeatedChoice], under: Point[RepeatedChoice]
) -> list[Point[RepeatedChoice]]:
    """Choices within the budget of which as many copies as there is room for, the first or the
    last, are as in `over`, and the others as in `under`; what is no copy as in either."""
    found = [
        _fullest(problem, ends.choice, over.choice, under.choice, is_first)
        for ends, is_first in itertools.product((under, over), (True, False))
    ]
    fits = (p for p in found if within(problem.numbers.budget_bytes, p.totals.bytes))
    return [point for point in fits if math.isfinite(point.totals.cost_s)]


def _fullest(
    problem: RepeatedProblem, ends: RepeatedChoice, over: RepeatedChoice, under: RepeatedChoice,
    is_first: bool,
) -> Point[RepeatedChoice]:  # fmt: skip
    """With the most copies as in `over` that fit; bytes rise with them."""
    n_most = max(repeat.count for repeat in problem.repeats)

    def at(n: int) -> Point[RepeatedChoice]:
        pair, fraction = (over, under), n / n_most
        if not is_first:
            pair, fraction = (under, over), 1 - fraction
        choice = _joined(problem, ends, *pair, fraction)
        return Point(choice, problem.evaluate(choice))

    low, high = 0, n_most
    while low < high:
        middle = (low + high + 1) // 2
        if within(problem.numbers.budget_bytes, at(middle).totals.bytes):
            low = middle
        else:
            high = middle - 1
    return at(low)


def _joined(
    problem: RepeatedProblem, ends: RepeatedChoice, first: RepeatedChoice, last: RepeatedChoice,
    fraction: float,
) -> RepeatedChoice:  # fmt: skip
    """This fraction of every repeat's copies from `first`, the rest from `last`; what is no copy
    from `ends`."""
    base, copies = list(ends.base), []
    for r, repeat in enumerate(problem.repeats):
        n = round(fraction * repeat.count)
        rows = (*first.copies[r][:n], *last.copies[r][n:])
        copies.append(rows)
        for v, k in zip(repeat.block, rows[-1], strict=True):
            base[v] = k
    return RepeatedChoice(tuple(base), tuple(copies))


def _gap(bracket: Bracket[RepeatedChoice]) -> float:
    cost_s = bracket.best.totals.cost_s
    proven = cost_s <= bracket.bound_s * (1 + SAME_OPTIMUM_REL)
    return 0.0 if proven else 1 - max(bracket.bound_s, 0.0) / cost_s


def _solution(
    problem: RepeatedProblem,
    kept: tuple[NDArray[np.intp], ...],
    point: Point[RepeatedChoice],
    gap: float,
) -> RepeatedSolution:
    """In the indices of the problem before it was reduced."""
    base = tuple(int(of_v[k]) for of_v, k in zip(kept, point.choice.base, strict=True))
    copies = tuple(
        tuple(
            tuple(int(kept[v][k]) for v, k in zip(repeat.block, row, strict=True)) for row in rows
        )
        for repeat, rows in zip(problem.repeats, point.choice.copies, strict=True)
    )
    return RepeatedSolution(RepeatedChoice(base, copies), point.totals, gap)
