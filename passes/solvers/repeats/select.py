"""The solver of problems with repeated blocks: the optimum, or nearly so under a budget.

Without a budget that binds, elimination finds the optimum; messages do, or nearly so, where its
tables would be too large (`messages.py`). Under a budget that binds, the price of bytes gives a
lower bound and a choice that fits (`passes/solvers/choice/lagrangian.py`). Their distance is the
gap. It is closed from both sides:

    choices   from one corner of the hull to the next all copies change at once. As many copies as
              fit take the choices of the corner over the budget (`_mixtures`). Exchanges in single
              copies do the rest (`exchange.py`)
    bounds    prices mix corners for nothing, but between copies that hand on different states one
              copy pays for the change. So all choices are divided into *branches*
              (`_branches_of`): all copies hand on one state, for each state, or some copy changes
              it. The least bound of all branches is a lower bound of the problem. Branches with a
              high bound are skipped
"""

from __future__ import annotations

import itertools
import math
import time
from contextlib import suppress
from functools import cache, cached_property

from autopar.caching import once
from autopar.passes.solvers.choice import QUICK, Bracket, Hull, Point, search
from autopar.passes.solvers.eliminate import TableLimits, TooWide
from autopar.passes.solvers.problem import (
    FORBIDDEN,
    SAME_OPTIMUM_REL,
    Infeasible,
    Solution,
    infeasible_budget,
    within,
)
from autopar.passes.solvers.repeats.elimination import Branch, RepeatedElimination
from autopar.passes.solvers.repeats.exchange import Exchanges
from autopar.passes.solvers.repeats.messages import RepeatedMessages, UniformGraph
from autopar.passes.solvers.repeats.order import RepeatedPlan
from autopar.passes.solvers.repeats.repeats import RepeatedChoice, RepeatedProblem, RepeatedProblems

# The best known choice, and a lower bound on all.
_Found = tuple[Point[RepeatedChoice], float]
# How problems of one structure are solved: by elimination, or by messages.
QuickPlan = RepeatedPlan | UniformGraph


def quick_plan(problems: RepeatedProblems) -> QuickPlan | None:
    """The plan of elimination, a quick one if there is one; the graph for messages if its tables
    would be too large.

    None: other solvers are quicker. Without repeated blocks that is so if elimination would take
    long.
    """
    for limits in (QUICK, TableLimits()) if problems.repeats else (QUICK,):
        with suppress(TooWide):
            return RepeatedPlan(problems, limits)
    with suppress(TooWide):
        return UniformGraph(problems) if problems.repeats else None
    return None


class RepeatedSolver:
    """Solves one problem within any budgets; results for one budget serve the others. `plan` is the
    `quick_plan` of the problem and its siblings."""

    def __init__(self, problem: RepeatedProblem, plan: QuickPlan) -> None:
        self.problem, self.plan = problem, plan
        self._hull = Hull(self._minimiser)

    @cached_property
    def _minimiser(self) -> RepeatedElimination | RepeatedMessages:
        if isinstance(self.plan, RepeatedPlan):
            return RepeatedElimination(self.problem, self.plan)
        return RepeatedMessages(self.problem, self.plan)

    def of(self, problem: RepeatedProblem) -> RepeatedSolver:
        """The solver of a problem with other costs."""
        return RepeatedSolver(problem, self.plan)

    def least_at(self, s_per_byte: float) -> float:
        """The least cost with a price on bytes, or a bound on it; infinite: nothing is allowed."""
        value, _ = self._hull.at(s_per_byte)
        return value

    def solve(
        self,
        budget_bytes: float | None,
        time_limit_s: float | None = None,
        gap_goal: float = 0.0,
        limit_s: float = math.inf,
    ) -> Solution[RepeatedChoice] | Infeasible:
        """The cheapest choice within the budget, or near it; a gap of at most `gap_goal` is not
        closed further. It stops with a choice and its gap once no choice can be below `limit_s`.
        """
        deadline = time.perf_counter() + (math.inf if time_limit_s is None else time_limit_s)
        hull = self._hull
        if hull.fastest is None:
            return FORBIDDEN
        if within(budget_bytes, hull.fastest.totals.bytes):
            fastest, gap = hull.fastest, _gap(hull.fastest, hull.least_cost_s)
            is_settled = fastest.totals.cost_s <= limit_s
            return Solution(fastest.choice, fastest.totals, gap, is_settled)
        assert budget_bytes is not None, "everything is within no budget"
        if not within(budget_bytes, hull.leanest.totals.bytes):
            return infeasible_budget(budget_bytes, hull.leanest.totals.bytes)
        best, bound_s = self._search(budget_bytes, gap_goal, deadline, limit_s)
        gap = _gap(best, bound_s)
        return Solution(best.choice, best.totals, gap, settled=bound_s < limit_s)

    def _search(
        self, budget_bytes: float, gap_goal: float, deadline: float, limit_s: float
    ) -> _Found:
        """By prices, then exchanges, then branches while the gap is too wide."""
        bracket = search(self._hull, budget_bytes, deadline, limit_s)
        if bracket.bound_s >= limit_s:
            return bracket.best, bracket.bound_s
        best, bound_s = self._exchange(self._hull, bracket, budget_bytes, gap_goal)
        if _gap(best, bound_s) <= gap_goal or bracket.neighbours is None:
            return best, bound_s
        least_s = math.inf
        for branch in self._branches_of(bracket.neighbours):
            if time.perf_counter() > deadline:
                return best, bound_s
            found = self._search_branch(
                self._branch(branch), bracket, best, budget_bytes, gap_goal, deadline
            )
            best = min(best, found[0], key=lambda point: point.totals.cost_s)
            least_s = min(least_s, found[1])
        return best, bound_s if math.isinf(least_s) else max(bound_s, least_s)

    def _exchange(
        self,
        hull: Hull[RepeatedChoice],
        bracket: Bracket[RepeatedChoice],
        budget_bytes: float,
        gap_goal: float,
    ) -> _Found:
        """Improve the best choice by exchanges between the corners around the budget."""
        best, bound_s, neighbours = bracket.best, bracket.bound_s, bracket.neighbours
        if _gap(best, bound_s) <= gap_goal or neighbours is None or not self.problem.repeats:
            return best, bound_s
        exchanges = Exchanges(self.problem, budget_bytes, [of.choice for of in hull.corners])
        for start in _mixtures(self.problem, budget_bytes, *neighbours):
            found = exchanges.fit(start)
            if found is not None and found.totals.cost_s < best.totals.cost_s:
                best = found
            if _gap(best, bound_s) <= gap_goal:
                break
        return best, bound_s

    def _branches_of(
        self, neighbours: tuple[Point[RepeatedChoice], Point[RepeatedChoice]]
    ) -> list[Branch]:
        """Branches that cover all choices, by what copies hand on in one repeat; none where both
        neighbours hand on one and the same state, or tables would be too large."""
        elimination = self._minimiser
        if isinstance(elimination, RepeatedMessages):
            return []
        for r in range(len(self.problem.repeats)):
            if len(set.union(*(elimination.states(r, p.choice) for p in neighbours))) > 1:
                every = range(elimination.n_states(r))
                return [*(Branch(r, s) for s in every), Branch(r, None)]
        return []

    @once
    def _branch(self, branch: Branch) -> Hull[RepeatedChoice]:
        assert isinstance(self._minimiser, RepeatedElimination), "messages have no branches"
        return Hull(self._minimiser.within(branch))

    def _search_branch(
        self,
        hull: Hull[RepeatedChoice],
        whole: Bracket[RepeatedChoice],
        best: Point[RepeatedChoice],
        budget_bytes: float,
        gap_goal: float,
        deadline: float,
    ) -> _Found:
        """Search one branch; only its bound where it cannot improve the best enough."""
        value, _ = hull.at(whole.s_per_byte)
        if math.isinf(value):
            return best, math.inf
        bound_s, _ = hull.bound(budget_bytes)
        if _gap(best, bound_s) <= gap_goal:
            return best, bound_s
        assert hull.fastest is not None, "a price forbids nothing"
        if within(budget_bytes, hull.fastest.totals.bytes):
            return hull.fastest, hull.fastest.totals.cost_s
        if not within(budget_bytes, hull.leanest.totals.bytes):
            return best, math.inf
        bracket = search(hull, budget_bytes, deadline)
        return self._exchange(hull, bracket, budget_bytes, gap_goal)


def _mixtures(
    problem: RepeatedProblem, budget_bytes: float, over: Point[RepeatedChoice],
    under: Point[RepeatedChoice],
) -> list[Point[RepeatedChoice]]:  # fmt: skip
    """Choices near the budget: the first or the last n copies are as in `over`, the others as in
    `under`. n is the most that fit, or one more. What is outside copies is as in either."""
    found = {
        point.choice: point
        for ends, is_first in itertools.product((under, over), (True, False))
        for point in _fullest(
            problem, budget_bytes, ends.choice, over.choice, under.choice, is_first
        )
    }
    return [point for point in found.values() if math.isfinite(point.totals.cost_s)]


def _fullest(
    problem: RepeatedProblem, budget_bytes: float, ends: RepeatedChoice, over: RepeatedChoice,
    under: RepeatedChoice, is_first: bool,
) -> list[Point[RepeatedChoice]]:  # fmt: skip
    """With the most copies as in `over` that fit, and with one more; bytes rise with them."""
    n_most = max(repeat.count for repeat in problem.repeats)

    @cache
    def at(n: int) -> Point[RepeatedChoice]:
        pair, fraction = (over, under), n / n_most
        if not is_first:
            pair, fraction = (under, over), 1 - fraction
        choice = _mixture(problem, ends, *pair, fraction)
        return Point(choice, problem.evaluate(choice))

    low, high = 0, n_most
    while low < high:
        middle = (low + high + 1) // 2
        if within(budget_bytes, at(middle).totals.bytes):
            low = middle
        else:
            high = middle - 1
    return [at(n) for n in range(low, min(low + 1, n_most) + 1)]


def _mixture(
    problem: RepeatedProblem, ends: RepeatedChoice, first: RepeatedChoice, last: RepeatedChoice,
    fraction: float,
) -> RepeatedChoice:  # fmt: skip
    """This fraction of every repeat's copies from `first`, the rest from `last`; what is outside
    copies from `ends`."""
    base, copies = list(ends.base), []
    for r, repeat in enumerate(problem.repeats):
        n = round(fraction * repeat.count)
        rows = (*first.copies[r][:n], *last.copies[r][n:])
        copies.append(rows)
        for v, k in zip(repeat.block, rows[-1], strict=True):
            base[v] = k
    return RepeatedChoice(tuple(base), tuple(copies))


def _gap(best: Point[RepeatedChoice], bound_s: float) -> float:
    """The relative distance of the best cost to the lower bound; 0 to `SAME_OPTIMUM_REL`."""
    cost_s = best.totals.cost_s
    proven = cost_s <= bound_s * (1 + SAME_OPTIMUM_REL)
    return 0.0 if proven else 1 - max(bound_s, 0.0) / cost_s
