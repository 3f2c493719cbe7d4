"""Cost against bytes: the corners of the lower hull of all choices.

A price p (seconds per byte) makes one cost of two, and elimination solves

    min over x of  cost(x) + p * bytes(x)

exactly; every optimum is a corner of the lower hull of the points (bytes(x), cost(x)). Starting
from the fastest and the leanest choice, the next price is the slope between two neighbouring
corners: either a corner between them comes out, or they are neighbours on the hull. Problems that
differ in their numbers alone walk together: every round eliminates all of them once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.passes.solvers.conditioning import (
    ConditionedPlan,
    minimise_conditioned,
    plan_conditioned,
)
from autopar.passes.solvers.elimination import minimise_all
from autopar.passes.solvers.elimination_order import (
    Axes,
    EliminationPlan,
    TooWide,
    plan_elimination,
)
from autopar.passes.solvers.potentials import Entries, Numbers, Weights
from autopar.passes.solvers.problem import (
    FORBIDDEN,
    Choice,
    ChoiceProblem,
    ChoiceProblems,
    FloatArray,
    Infeasible,
)
from autopar.passes.solvers.reductions import reduce
from autopar.passes.solvers.select import QUICK, QUICK_BRANCH, solve

# Relative to the price at which all bytes cost as much as all else: so low that bytes decide
# nothing but ties, and so high that seconds do.
_LOW, _HIGH = 1e-7, 1e7
# Problems whose numbers are written in rows at once: some megabytes each.
_N_TOGETHER = 16
# Corners closer than this (relative) are one.
_SAME_REL = 1e-6


def hull_corners(problem: ChoiceProblem, n_most: int) -> list[Choice] | Infeasible:
    """Up to `n_most` corners: the fastest choice first, the leanest second, then others.

    Of choices that cost the same any may come out. A problem too wide to eliminate: the optimum of
    `solve`. The budget is not read.
    """
    # A budget, however large, keeps choices that are dearer and smaller.
    reduced = reduce(replace(problem, budget_bytes=math.inf))
    if reduced is None:
        return FORBIDDEN
    try:
        plan = plan_elimination(reduced.problem)
    except TooWide:
        found = solve(replace(problem, budget_bytes=None))
        return found if isinstance(found, Infeasible) else [found.choice]
    (corners,) = _Walk(reduced.problem.several(), plan).corners(n_most)
    return FORBIDDEN if corners is None else [reduced.lift(choice) for choice in corners]


def hull_corners_of(problems: ChoiceProblems, n_most: int) -> list[list[Choice] | Infeasible]:
    """`hull_corners` of each."""
    plan: EliminationPlan | ConditionedPlan
    try:
        plan = plan_elimination(problems, QUICK)
    except TooWide:
        try:
            axes = (Axes.of(e) for e in problems.edges)
            plan = plan_conditioned(problems.sizes, axes, limits=QUICK_BRANCH)
        except TooWide:
            return [hull_corners(problems.of(i), n_most) for i in range(problems.n_problems)]
    found: list[list[Choice] | None] = []
    for start in range(0, problems.n_problems, _N_TOGETHER):
        some = range(start, min(start + _N_TOGETHER, problems.n_problems))
        found += _Walk(problems.some(some), plan).corners(n_most)
    return [FORBIDDEN if corners is None else corners for corners in found]


@dataclass
class _Side:
    """Two corners of a problem's hull, between which there may be others."""

    problem: int
    fast: _Corner
    lean: _Corner

    @property
    def s_per_byte(self) -> float | None:
        """The price at which they cost the same; None: they are one."""
        saved_bytes = self.fast.bytes - self.lean.bytes
        paid_s = self.lean.cost_s - self.fast.cost_s
        alike = saved_bytes <= _SAME_REL * self.fast.bytes or paid_s <= _SAME_REL * self.fast.cost_s
        return None if alike else paid_s / saved_bytes


@dataclass(frozen=True)
class _Corner:
    choice: Choice
    cost_s: float
    bytes: float


class _Walk:
    """Elimination of problems at several prices."""

    def __init__(self, problems: ChoiceProblems, plan: EliminationPlan | ConditionedPlan) -> None:
        self.n_problems, self.plan = problems.n_problems, plan
        self.numbers = Numbers.of(problems)
        self._entries = Entries.of(problems, self.numbers.layout)

    def corners(self, n_most: int) -> list[list[Choice] | None]:
        """Per problem; None where nothing is allowed."""
        every = list(range(self.n_problems))
        free = self._at(every, np.zeros(len(every)))
        allowed = [i for i in every if free[i] is not None]
        if n_most == 1 or not allowed:
            return [None if corner is None else [corner.choice] for corner in free]
        even = np.array([self._even(free[i]) for i in allowed])
        fastest, leanest = self._at(allowed, even * _LOW), self._at(allowed, even * _HIGH)
        found: dict[int, dict[Choice, None]] = {}
        sides: dict[int, deque[_Side]] = {}
        for i, fast, lean in zip(allowed, fastest, leanest, strict=True):
            assert fast is not None and lean is not None, "a price forbids nothing"
            found[i] = dict.fromkeys((fast.choice, lean.choice))
            sides[i] = deque([_Side(i, fast, lean)])
        while round_ := self._round(sides, found, n_most):
            prices = np.array([price for _, price in round_])
            corners = self._at([side.problem for side, _ in round_], prices)
            for (side, _), between in zip(round_, corners, strict=True):
                assert between is not None
                if between.choice not in found[side.problem]:
                    found[side.problem][between.choice] = None
                    sides[side.problem].append(_Side(side.problem, side.fast, between))
                    sides[side.problem].append(_Side(side.problem, between, side.lean))
        return [list(found[i]) if i in found else None for i in every]

    @staticmethod
    def _round(
        sides: Mapping[int, deque[_Side]], found: Mapping[int, Mapping[Choice, None]], n_most: int
    ) -> list[tuple[_Side, float]]:
        """The next side of every problem that wants more corners, and its price."""
        out = []
        for i, waiting in sides.items():
            while waiting and len(found[i]) < n_most:
                side = waiting.popleft()
                if (price := side.s_per_byte) is not None:
                    out.append((side, price))
                    break
        return out

    @staticmethod
    def _even(corner: _Corner | None) -> float:
        """The price at which all bytes cost as much as all else."""
        assert corner is not None
        return corner.cost_s / corner.bytes if corner.bytes and corner.cost_s else 1.0

    def _at(self, rows: Sequence[int], s_per_byte: FloatArray) -> list[_Corner | None]:
        """Some of the problems, one after the other: the numbers of one stay in the cache."""
        return [self._corner(i, price) for i, price in zip(rows, s_per_byte.tolist(), strict=True)]

    def _corner(self, problem: int, s_per_byte: float) -> _Corner | None:
        numbers = self.numbers.of_one(problem)
        potentials = numbers.at(Weights(size=s_per_byte))
        if isinstance(self.plan, ConditionedPlan):
            values, choices = minimise_conditioned(self.plan, potentials)
        else:
            values, choices = minimise_all(self.plan, potentials)
        if not math.isfinite(values[0]):
            return None
        (cost_s,), (size_bytes,) = numbers.totals(self._entries.at(choices))
        return _Corner(tuple(choices[0].tolist()), float(cost_s), float(size_bytes))
