"""The memory budget as a price per byte: a lower bound, a good choice, and which choices can go.

For a price p >= 0 (s/byte) elimination solves (`Hull.at`, `Hull.bound`)

    g(p) = min over x of cost(x) + p * bytes(x)          g(p) - p * budget <= optimum

The best price is where the lower hull of the points (bytes(x), cost(x)) crosses the budget.
`search` walks there along the hull. Between a point that fits and one that does not, the next price
is the slope of the line through them. If no point lies below that line, it is the hull. Points that
fit are feasible choices. The largest g(p) - p * budget is the lower bound.

Choice k of variable v is in no solution as cheap as the best known one if (`keep_marks`)

    min-marginal of (v, k) at price p  -  p * budget  >  cost of the best known solution

What is left is small enough for the ILP to close the gap.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, Protocol, TypeVar

from autopar.arrays import BoolArray
from autopar.passes.solvers.eliminate import (
    EliminationPlan,
    min_marginals,
    minimise,
)
from autopar.passes.solvers.problem import (
    SAME_OPTIMUM_REL,
    Choice,
    ChoiceProblem,
    ChoiceTotals,
    Numbers,
    Potentials,
    Weights,
    within,
)

MAX_STEPS = 60


C = TypeVar("C")


@dataclass(frozen=True)
class Point(Generic[C]):
    """A choice and its totals."""

    choice: C
    totals: ChoiceTotals


class Minimiser(Protocol[C]):
    """Finds, at any weights, the least total and a choice that attains it (infinite: none is
    allowed). One that is not exact returns a lower bound on the total."""

    def at(self, weights: Weights) -> tuple[float, Point[C]]: ...


@dataclass(frozen=True, eq=False)
class Elimination:
    """A `Minimiser` of a merged problem, by an elimination plan."""

    problem: ChoiceProblem
    plan: EliminationPlan

    @cached_property
    def _numbers(self) -> Numbers:
        return Numbers.of(self.problem)

    def at(self, weights: Weights) -> tuple[float, Point[Choice]]:
        value, choice = minimise(self.plan, self._numbers.at(weights))
        return value, Point(choice, self.problem.evaluate(choice))


@dataclass(frozen=True)
class Bracket(Generic[C]):
    """The result of the search: the best feasible point, the lower bound, and the price that gave
    it. `neighbours` are the corners of the hull around the budget: the one over it, the one within
    it."""

    best: Point[C]
    bound_s: float
    s_per_byte: float
    neighbours: tuple[Point[C], Point[C]] | None = None

    @property
    def closed(self) -> bool:
        return self.best.totals.cost_s <= self.bound_s * (1 + SAME_OPTIMUM_REL)

    @property
    def open_bound_s(self) -> float | None:
        """The bound; None: the best is proven."""
        return None if self.closed else self.bound_s

    def is_within(self, gap_goal: float) -> bool:
        """Is the best proven, or that near to it?"""
        return self.closed or self.best.totals.cost_s * (1 - gap_goal) <= self.bound_s


class Hull(Generic[C]):
    """What is known of a problem's lower hull: corners, and least totals at prices of bytes.

    It does not depend on the budget, so results for one budget serve the others.
    """

    def __init__(self, minimiser: Minimiser[C]) -> None:
        self.minimiser = minimiser
        self.corners: list[Point[C]] = []
        self._values: list[tuple[float, float]] = []
        self._sides: set[tuple[ChoiceTotals, ChoiceTotals]] = set()

    def at(self, s_per_byte: float) -> tuple[float, Point[C]]:
        """The least total at a price (infinite: none is allowed), and a corner that attains it."""
        value, point = self.minimiser.at(Weights(size=s_per_byte))
        if math.isfinite(value):
            self.corners.append(point)
            self._values.append((s_per_byte, value))
        return value, point

    @cached_property
    def fastest(self) -> Point[C] | None:
        """The cheapest choice, whatever its bytes; None: nothing is allowed."""
        value, point = self._free
        return point if math.isfinite(value) else None

    @property
    def least_cost_s(self) -> float:
        """The least cost, whatever the bytes, or a bound on it."""
        return self._free[0]

    @cached_property
    def _free(self) -> tuple[float, Point[C]]:
        return self.at(0.0)

    @cached_property
    def leanest(self) -> Point[C]:
        """A choice of least bytes, if any choice is allowed."""
        _, point = self.minimiser.at(Weights(0.0, size=1.0))
        self.corners.append(point)
        return point

    def bound(self, budget_bytes: float) -> tuple[float, float]:
        """(the highest known lower bound on the cost of what fits, its price)."""
        return max((value - p * budget_bytes, p) for p, value in self._values)

    def around(self, budget_bytes: float) -> tuple[Point[C], Point[C]]:
        """The known corners around a budget that the fastest exceeds and the leanest does not: (the
        one over it, the one that fits)."""
        fits = [within(budget_bytes, c.totals.bytes) for c in self.corners]
        over = (c for c, f in zip(self.corners, fits, strict=True) if not f)
        under = (c for c, f in zip(self.corners, fits, strict=True) if f)
        return (
            min(over, key=lambda c: (c.totals.bytes, c.totals.cost_s)),
            min(under, key=lambda c: (c.totals.cost_s, c.totals.bytes)),
        )

    def is_side(self, over: Point[C], under: Point[C]) -> bool:
        """Are these corners known to be neighbours on the hull?"""
        return (over.totals, under.totals) in self._sides

    def add_side(self, over: Point[C], under: Point[C]) -> None:
        self._sides.add((over.totals, under.totals))


def search(
    hull: Hull[C], budget_bytes: float, deadline: float = math.inf, limit_s: float = math.inf
) -> Bracket[C]:
    """Walk along the hull to the budget, which the fastest choice exceeds and the leanest does not.
    Stop early at the deadline, or once the lower bound reaches `limit_s`."""
    over, under = hull.around(budget_bytes)
    for _ in range(MAX_STEPS):
        saved_s = under.totals.cost_s - over.totals.cost_s
        if saved_s <= 0 or hull.is_side(over, under) or time.perf_counter() > deadline:
            break
        if hull.bound(budget_bytes)[0] >= limit_s:
            break
        price = saved_s / (over.totals.bytes - under.totals.bytes)
        _, point = hull.at(price)
        line = over.totals.cost_s + price * over.totals.bytes
        if point.totals.cost_s + price * point.totals.bytes >= line * (1 - 1e-12):
            hull.add_side(over, under)
            break
        fits = within(budget_bytes, point.totals.bytes)
        over, under = (over, point) if fits else (point, under)
    _, best = hull.around(budget_bytes)
    return Bracket(best, *hull.bound(budget_bytes), (over, under))


def keep_marks(
    problem: ChoiceProblem, plan: EliminationPlan, bracket: Bracket[Choice]
) -> list[BoolArray]:
    """[K_v] per variable: may the choice be in a solution no dearer than the best known one?

    Raises `TooWide` where min-marginals need too much memory.
    """
    assert problem.budget_bytes is not None
    price = bracket.s_per_byte
    paid_s = price * problem.budget_bytes
    cutoff = bracket.best.totals.cost_s + paid_s
    # Slack for rounding in sums of this size, and for choices that are the same optimum.
    cutoff += SAME_OPTIMUM_REL * (abs(cutoff) + paid_s)
    marginals = min_marginals(plan, Potentials.of(problem, Weights(size=price)))
    return [m <= cutoff for m in marginals]
