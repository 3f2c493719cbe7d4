"""Sequential message passing, where elimination would take long: a bound and a choice.

Every edge (u, v) has a message each way, numbers that move costs between it and its variables and
leave each total as it is. A sweep visits the variables in order and back. It gives each edge the
share of a variable's belief that is due to it (`message_loops.py`):

    belief(s)[x]    own cost of s, and the messages to s
    message(s, t)   min over x_s of  share(s) belief(s)[x_s] - message(t, s)[x_s] + edge[x_s, x_t]

where share(s) is one by its number of earlier neighbours, or of later ones if there are more. On
the way back the least beliefs and least messages add up to a lower bound. On the way there each
variable in turn takes its best choice, given those before it. This is TRW-S (Kolmogorov,
"Convergent tree-reweighted message passing for energy minimization", IEEE TPAMI 28, 2006). The
bound never falls from sweep to sweep. Where it meets a choice, that is the optimum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from autopar.arrays import Array, BoolArray, Codes
from autopar.passes.solvers.choice.lagrangian import Bracket, Elimination, Point
from autopar.passes.solvers.choice.message_loops import (
    improve,
    pay_edges,
    reduce_edges,
    sweep_back,
    sweep_there,
)
from autopar.passes.solvers.choice.reductions import Reduced, drop_forbidden, restrict
from autopar.passes.solvers.eliminate import TableLimits, TooWide, plan_elimination
from autopar.passes.solvers.problem import (
    SAME_OPTIMUM_REL,
    Choice,
    ChoiceProblem,
    ChoiceTotals,
    Edge,
    Layout,
    Numbers,
    Weights,
)

MOST_SWEEPS = 300
# A bound so close to a total meets it. Ties differ by more (`TIE_WEIGHT_REL`).
CLOSED_REL = 1e-12
# The end: so many sweeps have lifted the bound by no more than this.
STALLED_REL = 1e-4
# How near bounds are of the choices that elimination tries, the nearest first. About a tenth of a
# second each.
NEAR_REL = (1e-7, 1e-3)
QUICK = TableLimits(2**26, 2**22, 2**27)
IMPOSSIBLE = Point[Any]((), ChoiceTotals(math.inf, math.inf))
C = TypeVar("C")


@dataclass(frozen=True, eq=False)
class MessagePassing:
    """Finds, at any weights, a lower bound on all totals (infinite: none is allowed), and a good
    choice; its cost is infinite where none is found. A `Minimiser` where the two are equal.

    Where messages leave a gap, choices whose bound is near the least are a small problem.
    Elimination within `limits` solves it. What it finds is the optimum if it is as near.
    """

    problem: ChoiceProblem
    limits: TableLimits = QUICK

    @cached_property
    def _numbers(self) -> Numbers:
        return Numbers.of(self.problem)

    @cached_property
    def _messages(self) -> MessageGraph:
        return MessageGraph.of(self.problem.sizes, self.problem.edges, self._numbers.layout)

    def at(self, weights: Weights) -> tuple[float, Point[Choice]]:
        row = self._numbers.at(weights).rows[0]
        bound, choice = self._messages.bound_and_choice(row, weights.cost)
        if math.isinf(bound):
            return bound, IMPOSSIBLE
        best = None if choice is None else Point(choice, self.problem.evaluate(choice))
        return close_gap(bound, best, weights, lambda most: self._best_near(row, weights, most))

    def _best_near(self, row: Array, weights: Weights, most: float) -> Point[Choice] | None:
        """The best of the choices whose bounds are at most this; None: none is allowed, or found
        quickly."""
        bound, slack = self._messages.slack(row, weights.cost)
        keep = [bound + more <= most for more in slack]
        part = None
        if all(mask.any() for mask in keep):
            part = drop_forbidden(restrict(Reduced.whole(self.problem), keep))
        if part is None:
            return None
        try:
            plan = plan_elimination(part.problem, self.limits)
        except TooWide:
            return None
        value, point = Elimination(part.problem, plan).at(weights)
        if math.isinf(value):
            return None
        choice = part.lift(point.choice)
        return Point(choice, self.problem.evaluate(choice))

    def marks(self, bracket: Bracket[Choice]) -> list[BoolArray]:
        """[choices] per variable: may the choice be in a solution no dearer than the best known?"""
        price, best = bracket.s_per_byte, bracket.best.totals
        row = self._numbers.at(Weights(size=price)).rows[0]
        self._messages.bound_and_choice(row)
        bound, slack = self._messages.slack(row)
        paid_s = price * self.problem.budget_bytes if self.problem.budget_bytes else 0.0
        most = best.cost_s + paid_s
        most += SAME_OPTIMUM_REL * most  # what is cheaper by rounding alone
        return [bound + more <= most for more in slack]


def close_gap(
    bound: float,
    best: Point[C] | None,
    weights: Weights,
    best_near: Callable[[float], Point[C] | None],
    near_rel: Sequence[float] = NEAR_REL,
) -> tuple[float, Point[C]]:
    """A bound and the best choice known, from others. `best_near` finds the best of the choices
    whose bounds are at most a number, if that is quick; infinitely near are those that may be
    better than the best known."""
    total = math.inf if best is None else _weighted_total(best.totals, weights)
    for more in near_rel:
        if total <= bound * (1 + CLOSED_REL):
            break
        near = best_near(total if math.isinf(more) else bound * (1 + more))
        if near is None:
            continue
        total_of_near = _weighted_total(near.totals, weights)
        if total_of_near < total:
            best, total = near, total_of_near
        if total <= bound * (1 + more):  # all that was left out is dearer
            bound = total
    return min(bound, total), best or IMPOSSIBLE


def _weighted_total(totals: ChoiceTotals, weights: Weights) -> float:
    cost_s = totals.cost_s * weights.cost if weights.cost else 0.0
    return cost_s + totals.bytes * weights.size


@dataclass(frozen=True, eq=False)
class MessageGraph:
    """Passes messages between the variables of one problem, or of some that differ in numbers.

    The first fields are the arrays of `message_loops.py`, in the order in which its functions take
    them. Any messages are right, so those of one sum of costs are the first ones of the next of its
    kind (`_last`).
    """

    variables: Codes
    links: Codes
    tables: Codes
    sides: Codes
    codes: Codes
    shares: Array
    n_messages: int
    _last: dict[float, Array] = field(default_factory=dict)

    @staticmethod
    def of(sizes: Sequence[int], edges: Sequence[Edge], layout: Layout) -> MessageGraph:
        before: list[list[tuple[int, int]]] = [[] for _ in sizes]
        after: list[list[tuple[int, int]]] = [[] for _ in sizes]
        sides, codes, n_codes, n_messages = [], [np.zeros(0, dtype=np.intp)], 0, 0
        for k, e in enumerate(edges):
            ends = zip((e.u, e.v), (e.v, e.u), (e.rows, e.columns), e.shape, strict=True)
            for side, (one, other, of_choices, n_places) in enumerate(ends):
                (after if one < other else before)[one].append((k, side))
                sides.append((one, n_codes, n_messages))
                known = np.arange(sizes[one]) if of_choices is None else of_choices
                codes.append(known.astype(np.intp))
                n_codes, n_messages = n_codes + sizes[one], n_messages + n_places
        rows, n_links = [], 0
        for at, n, b, a in zip(layout.own_at, sizes, before, after, strict=True):
            ends_at = n_links + len(b), n_links + len(b) + len(a)
            rows.append((at, n, n_links, *ends_at))
            n_links = ends_at[1]
        both = zip(before, after, strict=True)
        links = [link for b, a in zip(before, after, strict=True) for link in (*b, *a)]
        tables = [(at, *e.shape) for at, e in zip(layout.table_at, edges, strict=True)]
        return MessageGraph(
            np.array(rows, dtype=np.intp).reshape(-1, 5),
            np.array(links, dtype=np.intp).reshape(-1, 2),
            np.array(tables, dtype=np.intp).reshape(-1, 3),
            np.array(sides, dtype=np.intp).reshape(-1, 2, 3),
            np.concatenate(codes),
            np.array([1 / max(1, len(b), len(a)) for b, a in both]),
            n_messages,
        )

    def fresh_copy(self) -> MessageGraph:
        """The same graph without messages: for problems whose sums are others."""
        return replace(self, _last={})

    def bound_and_choice(
        self, row: Array, kind: float = 1.0, near_rel: float = CLOSED_REL, n_stalled: int = 20
    ) -> tuple[float, Choice | None]:
        """A lower bound on all sums of costs in a row (infinite: none is allowed), and the best
        choice found; None: there is none. It ends where the two are so near, or where so many
        sweeps change little."""
        messages = self._last.pop(kind, None)
        if messages is None:
            messages = np.zeros(self.n_messages)
        best, best_total, bounds = None, math.inf, list[float]()
        chosen = np.zeros(len(self.variables), dtype=np.intp)
        for _ in range(MOST_SWEEPS):
            total = sweep_there(row, *self._arrays, self.shares, messages, chosen, self._scratch)
            if total < best_total:
                best, best_total = chosen.copy(), total
            bound = self._swept_back(row, messages, np.zeros(0))
            if math.isinf(bound):
                return math.inf, None
            bounds.append(max((bound, *bounds[-1:])))
            if _has_ended(bounds, best_total, near_rel, n_stalled):
                break
        self._last[kind] = messages
        if best is None:
            return bounds[-1], None
        improve(row, *self._arrays, best, self._scratch)
        return min(bounds[-1], best_total), tuple(best.tolist())

    def slack(self, row: Array, kind: float = 1.0) -> tuple[float, list[Array]]:
        """A lower bound on all sums, and per variable how much more it is with each choice.

        With one choice alone the messages on the way back would be higher by no less, and a higher
        message makes no bound lower. `bound_and_choice` must have found a bound of this row.
        """
        messages, sizes = self._last[kind], self.variables[:, 1]
        chosen, out = np.zeros(len(sizes), dtype=np.intp), np.zeros(sizes.sum())
        sweep_there(row, *self._arrays, self.shares, messages, chosen, self._scratch)
        bound = self._swept_back(row, messages, out)
        return bound, np.split(out, np.cumsum(sizes)[:-1])

    def payments(self, row: Array, kind: float) -> Array:
        """Messages whose least beliefs and least edges add up to the bound of the last
        `bound_and_choice`, of this row."""
        paid = np.empty(self.n_messages)
        pay_edges(row, *self._arrays, self.shares, self._last[kind], self._scratch, paid)
        return paid

    def reduce(self, row: Array, messages: Array) -> tuple[Array, Array]:
        """(what edges cost at least in each of their rows and columns, less both messages, in the
        places of messages; the least of each edge)."""
        left = np.empty(self.n_messages)
        return left, reduce_edges(row, self.tables, self.sides, messages, left)

    def message(self, messages: Array, edge: int, side: int) -> Array:
        """The part of `messages` that an edge sends to a side."""
        at, n = self.sides[edge, side, 2], self.tables[edge, 1 + side]
        return messages[at : at + n]

    def places(self, edge: int, side: int) -> Codes:
        """[choices of the variable on that side]: their places in messages."""
        v, codes_at, at = self.sides[edge, side]
        found: Codes = at + self.codes[codes_at : codes_at + self.variables[v, 1]]
        return found

    def table(self, row: Array, edge: int) -> Array:
        """[rows, columns]: the costs of an edge."""
        at, n_rows, n_columns = self.tables[edge]
        return row[at : at + n_rows * n_columns].reshape(n_rows, n_columns)

    def _swept_back(self, row: Array, messages: Array, slack: Array) -> float:
        return sweep_back(row, *self._arrays, self.shares, messages, self._scratch, slack)

    @property
    def _arrays(self) -> tuple[Codes, Codes, Codes, Codes, Codes]:
        return self.variables, self.links, self.tables, self.sides, self.codes

    @cached_property
    def _scratch(self) -> Array:
        """Room for a number per choice, or per row or column."""
        longest = max(self.variables[:, 1].max(initial=1), self.tables[:, 1:].max(initial=1))
        return np.zeros((3, int(longest)))


def _has_ended(bounds: Sequence[float], best_total: float, near_rel: float, n_stalled: int) -> bool:
    if best_total <= bounds[-1] * (1 + near_rel):
        return True
    stalled = len(bounds) > n_stalled and math.isfinite(best_total)
    return stalled and bounds[-1] <= bounds[-1 - n_stalled] * (1 + STALLED_REL)
