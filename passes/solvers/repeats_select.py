"""Which choices a problem with repeated blocks takes: the optimum, or nearly so under a budget.

Without a budget that binds, elimination finds the optimum, and of equals one of least tie, as
`select.py` does of a problem written out. Under one, the price of bytes gives a bound and a choice
that fits (`lagrangian.py`); their distance is the gap. It is closed from both sides:

    choices   from one corner of the hull to the next all copies change at once. Some take those of
              the corner over the budget, as many as there is room for (`_mixed`), and exchanges in
              single copies do the rest (`repeats_exchange.py`)
    bounds    prices mix corners for nothing, but copies that hand on unlike states are joined by
              one that pays to change. So all choices are parted into *branches* (`Branch`): all
              copies hand on one state, for each state, or some copy changes it. The least bound of
              all branches is one of the problem, and each is searched unless its bound is high
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass

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
from autopar.passes.solvers.repeats_elimination import Branch, RepeatedElimination
from autopar.passes.solvers.repeats_exchange import Exchanges
from autopar.passes.solvers.select import QUICK, break_ties


@dataclass(frozen=True)
class RepeatedSolution:
    """A choice within the budget, and how far (relative) it may be from the cheapest."""

    choice: RepeatedChoice
    totals: Totals
    gap: float


def solve_repeated(
    problem: RepeatedProblem, time_limit_s: float | None = None, gap_goal: float = 0.0
) -> RepeatedSolution | Infeasible:
    """The cheapest choice within the budget of `problem.numbers`, or near it; a gap no wider than
    `gap_goal` is not closed further.

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
    found = _Search(smaller, budget_bytes, gap_goal, deadline).solved(elimination, fastest, lean)
    return _solution(problem, kept, found.best, _gap(found.best, found.bound_s))


@dataclass(frozen=True)
class _Found:
    """The best choice known, and a bound on all."""

    best: Point[RepeatedChoice]
    bound_s: float


@dataclass(frozen=True)
class _Search:
    """What is cheap within a budget, until it is proven to `gap_goal`."""

    problem: RepeatedProblem
    budget_bytes: float
    gap_goal: float
    deadline: float

    def solved(
        self,
        elimination: RepeatedElimination,
        fastest: Point[RepeatedChoice],
        lean: Point[RepeatedChoice],
    ) -> _Found:
        """By prices, exchanges, and, while that leaves too much, branches."""
        found, bracket = self._priced(elimination, fastest, lean)
        if self._is_proven(found.best, found.bound_s) or bracket.neighbours is None:
            return found
        best, bound_s = found.best, math.inf
        for branch in self._branches(elimination, bracket.neighbours):
            of_branch = self._within(elimination.within(branch), bracket.s_per_byte, best)
            best = min(best, of_branch.best, key=lambda point: point.totals.cost_s)
            bound_s = min(bound_s, of_branch.bound_s)
        if math.isinf(bound_s):
            return found
        return _Found(best, max(found.bound_s, bound_s))

    def _priced(
        self,
        elimination: RepeatedElimination,
        fastest: Point[RepeatedChoice],
        lean: Point[RepeatedChoice],
    ) -> tuple[_Found, Bracket[RepeatedChoice]]:
        """By prices of bytes, and exchanges between the corners of the hull that they lead to."""
        seen = [fastest, lean]
        walked = _Recorded(elimination, seen)
        bracket = search(walked, self.budget_bytes, fastest, lean, self.deadline)
        best = bracket.best
        if not self._is_proven(best, bracket.bound_s) and bracket.neighbours is not None:
            exchanges = Exchanges(self.problem, [point.choice for point in seen])
            for start in _mixed(self.problem, *bracket.neighbours):
                found = exchanges.fitted(start)
                if found is not None and found.totals.cost_s < best.totals.cost_s:
                    best = found
        return _Found(best, bracket.bound_s), bracket

    def _branches(
        self,
        elimination: RepeatedElimination,
        neighbours: tuple[Point[RepeatedChoice], Point[RepeatedChoice]],
    ) -> list[Branch]:
        """All choices, by what copies hand on in one repeat; none where all that is known hands on
        the same."""
        for r in range(len(self.problem.repeats)):
            if len(set.union(*(elimination.states(r, p.choice) for p in neighbours))) > 1:
                every = range(elimination.n_states(r))
                return [*(Branch(r, s) for s in every), Branch(r, None)]
        return []

    def _within(
        self, elimination: RepeatedElimination, s_per_byte: float, best: Point[RepeatedChoice]
    ) -> _Found:
        """In one branch; only a bound where nothing in it betters what is known by enough."""
        value, _ = elimination.at(Weights(size=s_per_byte))
        bound_s = value - s_per_byte * self.budget_bytes
        if math.isinf(value) or self._is_proven(best, bound_s):
            return _Found(best, bound_s)
        _, fastest = elimination.at(Weights())
        if within(self.budget_bytes, fastest.totals.bytes):
            return _Found(fastest, fastest.totals.cost_s)
        lean = leanest(elimination)
        if not within(self.budget_bytes, lean.totals.bytes):
            return _Found(best, math.inf)
        found, _ = self._priced(elimination, fastest, lean)
        return _Found(found.best, max(bound_s, found.bound_s))

    def _is_proven(self, best: Point[RepeatedChoice], bound_s: float) -> bool:
        return _gap(best, bound_s) <= self.gap_goal


@dataclass(frozen=True)
class _Recorded:
    """A minimiser that keeps what it found."""

    minimiser: RepeatedElimination
    seen: list[Point[RepeatedChoice]]

    def at(self, weights: Weights) -> tuple[float, Point[RepeatedChoice]]:
        value, point = self.minimiser.at(weights)
        self.seen.append(point)
        return value, point


def _mixed(
    problem: RepeatedProblem, over: Point[RepeatedChoice], under: Point[RepeatedChoice]
) -> list[Point[RepeatedChoice]]:
    """Choices near the budget of which as many copies as there is room for, or one more, the first
    or the last, are as in `over`, and the others as in `under`; what is no copy as in either."""
    found = {
        point.choice: point
        for ends, is_first in itertools.product((under, over), (True, False))
        for point in _fullest(problem, ends.choice, over.choice, under.choice, is_first)
    }
    return [point for point in found.values() if math.isfinite(point.totals.cost_s)]


def _fullest(
    problem: RepeatedProblem, ends: RepeatedChoice, over: RepeatedChoice, under: RepeatedChoice,
    is_first: bool,
) -> list[Point[RepeatedChoice]]:  # fmt: skip
    """With the most copies as in `over` that fit, and with one more; bytes rise with them."""
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
    return [at(n) for n in range(low, min(low + 1, n_most) + 1)]


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


def _gap(best: Point[RepeatedChoice], bound_s: float) -> float:
    cost_s = best.totals.cost_s
    proven = cost_s <= bound_s * (1 + SAME_OPTIMUM_REL)
    return 0.0 if proven else 1 - max(bound_s, 0.0) / cost_s


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
