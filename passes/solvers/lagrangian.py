"""The memory budget as a price per byte: a bound, a good choice, and which choices can go.

For a price p >= 0 (s/byte) elimination solves

    g(p) = min over x of cost(x) + p * bytes(x)          g(p) - p * budget <= optimum

The best price is where the lower hull of the points (bytes(x), cost(x)) crosses the budget.
`search` walks there along the hull: between a point that fits and one that does not, the next
price is the slope of the line through them; when no point lies below that line, it is the hull.
The points that fit are feasible choices, the best g is a bound.

A choice k of variable v can be in no solution as cheap as the best known one when its
min-marginal at price p, less p * budget, exceeds that cost (`keep_marks`). What is left is
small enough for the ILP to close the gap.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from autopar.passes.solvers.elimination import Potentials, Weights, minimise
from autopar.passes.solvers.elimination_order import EliminationPlan
from autopar.passes.solvers.marginals import min_marginals
from autopar.passes.solvers.problem import (
    SAME_OPTIMUM_REL,
    BoolArray,
    Choice,
    ChoiceProblem,
    Totals,
    within,
)

MAX_STEPS = 60


C = TypeVar("C")


@dataclass(frozen=True)
class Point(Generic[C]):
    """A choice and what it sums to."""

    choice: C
    totals: Totals


class Minimiser(Protocol[C]):
    """Finds, at any weights, the least total and a choice of it (infinite: none is allowed)."""

    def at(self, weights: Weights) -> tuple[float, Point[C]]: ...


@dataclass(frozen=True, eq=False)
class Elimination:
    """A `Minimiser`: of a merged problem, by a plan."""

    problem: ChoiceProblem
    plan: EliminationPlan

    def at(self, weights: Weights) -> tuple[float, Point[Choice]]:
        value, choice = minimise(self.plan, Potentials.of(self.problem, weights))
        return value, Point(choice, self.problem.evaluate(choice))


@dataclass(frozen=True)
class Bracket(Generic[C]):
    """The end of the search: the best feasible point, the bound, and the price that gave it; and
    where the budget lies between neighbours on the hull, the one over it and the one under."""

    best: Point[C]
    bound_s: float
    s_per_byte: float
    neighbours: tuple[Point[C], Point[C]] | None = None

    @property
    def closed(self) -> bool:
        return self.best.totals.cost_s <= self.bound_s * (1 + SAME_OPTIMUM_REL)


def leanest(minimiser: Minimiser[C]) -> Point[C]:
    """A choice of least bytes."""
    return minimiser.at(Weights(0.0, size=1.0))[1]


def search(
    minimiser: Minimiser[C],
    budget_bytes: float,
    fastest: Point[C],
    lean: Point[C],
    deadline: float,
) -> Bracket[C]:
    """Walk along the hull from `fastest`, optimal but over the budget, and `lean`, which fits."""
    over, under = fastest, lean
    best, bound_s, best_price = lean, fastest.totals.cost_s, 0.0
    for _ in range(MAX_STEPS):
        saved_s = under.totals.cost_s - over.totals.cost_s
        if saved_s <= 0 or time.perf_counter() > deadline:
            break
        price = saved_s / (over.totals.bytes - under.totals.bytes)
        value, point = minimiser.at(Weights(size=price))
        if value - price * budget_bytes > bound_s:
            bound_s, best_price = value - price * budget_bytes, price
        fits = within(budget_bytes, point.totals.bytes)
        if fits and point.totals.cost_s < best.totals.cost_s:
            best = point
        line = over.totals.cost_s + price * over.totals.bytes
        if value >= line * (1 - 1e-12):
            break
        over, under = (over, point) if fits else (point, under)
    return Bracket(best, bound_s, best_price, (over, under))


def keep_marks(
    problem: ChoiceProblem, plan: EliminationPlan, bracket: Bracket[Choice]
) -> list[BoolArray]:
    """Which choices may be in a solution no dearer than the best known one.

    Raises `TooWide` where min-marginals need too much memory.
    """
    assert problem.budget_bytes is not None
    price = bracket.s_per_byte
    paid_s = price * problem.budget_bytes
    cutoff = bracket.best.totals.cost_s + paid_s
    # Rounding in sums of this size, and choices that are the same optimum, stay.
    cutoff += SAME_OPTIMUM_REL * (abs(cutoff) + paid_s)
    marginals = min_marginals(plan, Potentials.of(problem, Weights(size=price)))
    return [m <= cutoff for m in marginals]
