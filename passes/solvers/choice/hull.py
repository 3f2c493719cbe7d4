"""Cost against bytes: the corners of the lower hull of all choices.

At a price p (seconds per byte) elimination solves (`_PriceWalk._at`)

    min over x of  cost(x) + p * bytes(x)

exactly. Every optimum is a corner of the lower hull of the points (bytes(x), cost(x)).
`_PriceWalk.corners` starts from the fastest and the leanest choice. The next price is the slope
between two neighbouring corners (`_Side.s_per_byte`). Either a corner between them comes out, or
they are neighbours on the hull. Problems that differ only in their numbers share one plan.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.passes.solvers.choice.reductions import reduce
from autopar.passes.solvers.choice.select import QUICK, QUICK_BRANCH, solve
from autopar.passes.solvers.eliminate import (
    ConditionedPlan,
    EliminationPlan,
    TooWide,
    minimise,
    minimise_conditioned,
    plan_conditioned,
    plan_elimination,
)
from autopar.passes.solvers.problem import (
    FORBIDDEN,
    Choice,
    ChoiceProblem,
    ChoiceProblems,
    Entries,
    Infeasible,
    Numbers,
    SomeProblems,
    Weights,
)

# Relative to the price at which all bytes cost as much as all else. At _LOW bytes decide only among
# choices of equal cost; at _HIGH seconds decide only among choices of equal bytes.
_LOW, _HIGH = 1e-7, 1e7
# Problems whose rows are written at once: some megabytes each.
_N_TOGETHER = 16
# Corners closer than this (relative) count as one.
_SAME_REL = 1e-6


def hull_corners(problem: ChoiceProblem, n_most: int) -> list[Choice] | Infeasible:
    """Up to `n_most` corners: the fastest choice first, the leanest second, then others.

    Among choices that cost the same, any may be returned. For a problem too wide to eliminate, the
    only corner is the optimum of `solve`. The budget is not read.
    """
    # With a budget, however large, `reduce` keeps choices that cost more and need fewer bytes.
    reduced = reduce(replace(problem, budget_bytes=math.inf))
    if reduced is None:
        return FORBIDDEN
    try:
        plan = plan_elimination(reduced.problem)
    except TooWide:
        found = solve(replace(problem, budget_bytes=None))
        return found if isinstance(found, Infeasible) else [found.choice]
    alone = ChoiceProblems.alone(reduced.problem)
    numbers = Numbers.of(alone.some((0,)))
    corners = _PriceWalk(numbers, Entries.of(alone, numbers.layout), plan).corners(n_most)
    return FORBIDDEN if corners is None else [reduced.lift(choice) for choice in corners]


def hull_corners_of(
    problems: SomeProblems, n_most: int, fastest: Sequence[Choice | None] | None = None
) -> list[list[Choice] | Infeasible]:
    """`hull_corners` of each problem. `fastest` may give some problems' fastest choices, whatever
    their bytes; None: not known."""
    plan: EliminationPlan | ConditionedPlan
    try:
        plan = plan_elimination(problems, QUICK)
    except TooWide:
        try:
            axes = problems.every.axes
            plan = plan_conditioned(problems.sizes, axes, limits=QUICK_BRANCH)
        except TooWide:
            return [hull_corners(problems.of(i), n_most) for i in range(problems.n_problems)]
    found: list[list[Choice] | Infeasible] = []
    for start in range(0, problems.n_problems, _N_TOGETHER):
        some = range(start, min(start + _N_TOGETHER, problems.n_problems))
        numbers = Numbers.of(problems.some(some))
        entries = Entries.of(problems, numbers.layout)
        for i in range(len(some)):
            walk = _PriceWalk(numbers.of_one(i), entries, plan)
            corners = walk.corners(n_most, fastest[start + i] if fastest else None)
            found.append(FORBIDDEN if corners is None else corners)
    return found


@dataclass
class _Side:
    """Two corners of the hull; there may be others between them."""

    fast: _Corner
    lean: _Corner

    @property
    def s_per_byte(self) -> float | None:
        """The price at which both cost the same; None: they count as one corner."""
        saved_bytes = self.fast.bytes - self.lean.bytes
        paid_s = self.lean.cost_s - self.fast.cost_s
        alike = saved_bytes <= _SAME_REL * self.fast.bytes or paid_s <= _SAME_REL * self.fast.cost_s
        return None if alike else paid_s / saved_bytes


@dataclass(frozen=True)
class _Corner:
    choice: Choice
    cost_s: float
    bytes: float


@dataclass(frozen=True)
class _PriceWalk:
    """Elimination of one problem at several prices."""

    numbers: Numbers
    entries: Entries
    plan: EliminationPlan | ConditionedPlan

    def corners(self, n_most: int, fastest: Choice | None = None) -> list[Choice] | None:
        """Up to `n_most` corners; None: nothing is allowed. `fastest` may be known."""
        free = self._at(0.0) if fastest is None else self._corner(fastest)
        if free is None:
            return None
        if n_most == 1:
            return [free.choice]
        # The price at which all bytes cost as much as all else.
        even = free.cost_s / free.bytes if free.bytes and free.cost_s else 1.0
        fast, lean = self._at(even * _LOW), self._at(even * _HIGH)
        assert fast is not None and lean is not None, "a price forbids nothing"
        found = dict.fromkeys((fast.choice, lean.choice))
        sides = deque([_Side(fast, lean)])
        while sides and len(found) < n_most:
            side = sides.popleft()
            if (price := side.s_per_byte) is None:
                continue
            between = self._at(price)
            assert between is not None
            if between.choice not in found:
                found[between.choice] = None
                sides += _Side(side.fast, between), _Side(between, side.lean)
        return list(found)

    def _at(self, s_per_byte: float) -> _Corner | None:
        potentials = self.numbers.at(Weights(size=s_per_byte))
        if isinstance(self.plan, ConditionedPlan):
            value, choice = minimise_conditioned(self.plan, potentials)
        else:
            value, choice = minimise(self.plan, potentials)
        return self._corner(choice) if math.isfinite(value) else None

    def _corner(self, choice: Choice) -> _Corner:
        return _Corner(choice, *self.numbers.totals(self.entries.at(choice)))
