"""Cost against bytes: the corners of the lower hull of all choices.

A price p (seconds per byte) makes one cost of two, and elimination solves

    min over x of  cost(x) + p * bytes(x)

exactly; every optimum is a corner of the lower hull of the points (bytes(x), cost(x)). Starting
from the fastest and the leanest choice, the next price is the slope between two neighbouring
corners: either a corner between them comes out, or they are neighbours on the hull.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace

from autopar.passes.solvers.elimination import Weights
from autopar.passes.solvers.elimination_order import EliminationPlan, TooWide, plan_elimination
from autopar.passes.solvers.lagrangian import Elimination, Point
from autopar.passes.solvers.problem import FORBIDDEN, Choice, ChoiceProblem, Infeasible
from autopar.passes.solvers.reductions import Reduced, reduce
from autopar.passes.solvers.select import as_it_is, solve

# Relative to the price at which all bytes cost as much as all else: so low that bytes decide
# nothing but ties, and so high that seconds do.
_LOW, _HIGH = 1e-7, 1e7
# Corners closer than this (relative) are one.
_SAME_REL = 1e-6


def hull_corners(problem: ChoiceProblem, n_most: int) -> list[Choice] | Infeasible:
    """Up to `n_most` corners: the fastest choice first, the leanest second, then others.

    Of choices that cost the same any may come out. A problem too wide to eliminate: the optimum of
    `solve`. The budget is not read.
    """
    unlimited = replace(problem, budget_bytes=None)
    ready = as_it_is(unlimited)
    if ready is not None:
        return _Walk(*ready).corners(n_most)
    # A budget, however large, keeps choices that are dearer and smaller.
    reduced = reduce(replace(problem, budget_bytes=math.inf))
    if reduced is None:
        return FORBIDDEN
    try:
        return _Walk(reduced, plan_elimination(reduced.problem)).corners(n_most)
    except TooWide:
        pass
    found = solve(unlimited)
    return found if isinstance(found, Infeasible) else [found.choice]


class _Walk:
    """Elimination of one reduced problem at several prices."""

    def __init__(self, reduced: Reduced, plan: EliminationPlan) -> None:
        self.reduced, self.elimination = reduced, Elimination(reduced.problem, plan)

    def corners(self, n_most: int) -> list[Choice] | Infeasible:
        value, fastest = self.elimination.at(Weights())
        if math.isinf(value):
            return FORBIDDEN
        if n_most == 1:
            return [self.reduced.lift(fastest.choice)]
        totals = fastest.totals
        even = totals.cost_s / totals.bytes if totals.bytes and totals.cost_s else 1.0
        fastest, leanest = self._at(even * _LOW), self._at(even * _HIGH)
        found = dict.fromkeys((fastest.choice, leanest.choice))
        sides = deque([(fastest, leanest)])
        while sides and len(found) < n_most:
            fast, lean = sides.popleft()
            a, b = fast.totals, lean.totals
            saved_bytes, paid_s = a.bytes - b.bytes, b.cost_s - a.cost_s
            if saved_bytes <= _SAME_REL * a.bytes or paid_s <= _SAME_REL * a.cost_s:
                continue
            between = self._at(paid_s / saved_bytes)
            if between.choice not in found:
                found[between.choice] = None
                sides += [(fast, between), (between, lean)]
        return [self.reduced.lift(choice) for choice in found]

    def _at(self, s_per_byte: float) -> Point[Choice]:
        return self.elimination.at(Weights(size=s_per_byte))[1]
