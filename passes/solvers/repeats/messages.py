"""Messages in a problem with repeated blocks whose tables are too large for elimination.

If all copies had the same messages, one copy would stand for all. So messages are passed in the
*uniform* problem, in which N copies make the same choices (`UniformGraph`):

    a copy's own costs, its inner edges     count N times
    edges from one copy to the next         N - 1 times, from the copy to itself
    all else                                once

Messages move costs. Divided among the copies, they are messages of the problem in which each copy
chooses for itself, too, and any finite messages leave a lower bound (`UniformGraph._divide`). The
first and the last copy get what the others get from their neighbours (`_tie`). Then copies and the
rest of the problem are joined no longer, and messages in the rest alone bound that. What is
forbidden between copies is only dear here (`_DEAR`), because some copy may do what others cannot.

Choices whose bound is near the least are a small problem, which elimination solves. What it finds
is the optimum if it is as near.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from autopar.arrays import Array, BoolArray
from autopar.passes.solvers.choice import (
    QUICK,
    MessageGraph,
    Point,
    Reduced,
    close_gap,
    restrict,
)
from autopar.passes.solvers.eliminate import TooWide
from autopar.passes.solvers.problem import Choice, Edge, Layout, Weights, codes_of
from autopar.passes.solvers.repeats.elimination import RepeatedElimination
from autopar.passes.solvers.repeats.order import RepeatedPlan
from autopar.passes.solvers.repeats.repeats import (
    Repeat,
    RepeatedChoice,
    RepeatedProblem,
    RepeatedProblems,
)

# What is forbidden between copies costs so many times the dearest number.
_DEAR = 1e3
# How near bounds are of the choices that elimination tries, the nearest first.
_NEAR_REL = (1e-7, 1e-3, math.inf)
# Messages end where bound and choice are so near, which elimination closes, or after so many sweeps
# that change little.
_END = 1e-6, 10


@dataclass(frozen=True, eq=False)
class RepeatedMessages:
    """A `Minimiser` of a problem with repeated blocks, by messages; its bound may be below the
    total of its choice. Problems of one structure share `graph`."""

    problem: RepeatedProblem
    graph: UniformGraph

    def at(self, weights: Weights) -> tuple[float, Point[RepeatedChoice]]:
        """A lower bound on all totals (infinite: none is allowed), and a good choice."""
        row = self.problem.row.at(weights).rows[0]
        bound, slack, choice = self.graph.solve(row, weights.cost)
        best: Point[RepeatedChoice] | None = None
        if choice is not None:
            best = self._point(RepeatedChoice(choice, self.graph.copies(choice)))

        def best_near(most: float) -> Point[RepeatedChoice] | None:
            return self._best_near([bound + more <= most for more in slack], weights)

        found = close_gap(bound, best, weights, best_near, _NEAR_REL)
        if math.isfinite(found[0]) and math.isinf(found[1].totals.cost_s):  # none was found
            return RepeatedElimination(self.problem, RepeatedPlan(self.problem.every)).at(weights)
        return found

    def _point(self, choice: RepeatedChoice) -> Point[RepeatedChoice]:
        return Point(choice, self.problem.evaluate(choice))

    def _best_near(self, keep: list[BoolArray], weights: Weights) -> Point[RepeatedChoice] | None:
        """The best of the choices that are kept; None: none is allowed, or found quickly."""
        repeats = self.problem.repeats
        for u, v in (pair for repeat in repeats for pair in repeat.counterpart.items()):
            keep[u] = keep[v] = keep[u] | keep[v]
        if not keep or not all(mask.any() for mask in keep):
            return None
        part = restrict(Reduced.whole(self.problem.numbers), keep)
        problem = RepeatedProblem.of_one(part.problem, repeats)
        try:
            plan = RepeatedPlan(problem.every, QUICK)
        except TooWide:
            return None
        value, point = RepeatedElimination(problem, plan).at(weights)
        if math.isinf(value):
            return None
        copies = tuple(
            tuple(
                tuple(int(part.kept[v][k]) for v, k in zip(repeat.block, row, strict=True))
                for row in rows
            )
            for repeat, rows in zip(repeats, point.choice.copies, strict=True)
        )
        return self._point(RepeatedChoice(part.lift(point.choice.base), copies))


@dataclass(frozen=True)
class _Joined:
    """An edge of the uniform problem.

    table   its place among the problem's edges
    times   how often it counts
    ends    is u, is v a variable of a copy?
    inner   does it join a copy to itself, or to what all copies are joined to?
    """

    edge: Edge
    table: int
    times: int
    ends: tuple[bool, bool]
    inner: bool = True

    @property
    def kind(self) -> tuple[int, bool]:
        return self.times, self.inner


class UniformGraph:
    """The graphs of the uniform problem, and of what is no copy, for all problems of one structure.

    Raises `TooWide` where a variable is joined to itself in the next copy, or what is before or
    after the copies is joined to them as no copy is.
    """

    def __init__(self, problems: RepeatedProblems) -> None:
        self.problems, layout = problems, problems.layout
        self.edges = [*self._edges()]
        self._ends = [*self._find_ends()]
        counts = self._counts = [self._count(v) for v in range(len(problems.sizes))]
        self._kinds = [
            *dict.fromkeys((*((n, True) for n in counts), *(e.kind for e in self.edges)))
        ]
        begin = {kind: i * layout.n_numbers for i, kind in enumerate(self._kinds)}
        uniform = Layout(
            tuple(begin[n, True] + at for n, at in zip(counts, layout.own_at, strict=True)),
            layout.n_choices,
            tuple(begin[of.kind] + layout.table_at[of.table] for of in self.edges),
            tuple(of.edge.shape for of in self.edges),
            len(begin) * layout.n_numbers,
        )
        every = [joined.edge for joined in self.edges]
        self.graph = MessageGraph.of(problems.sizes, every, uniform)
        self._make_rest(uniform)

    def _make_rest(self, uniform: Layout) -> None:
        """The graph of what is no copy; its own costs follow the uniform row."""
        self._rest = [v for v, n in enumerate(self._counts) if n == 1]
        place = {v: i for i, v in enumerate(self._rest)}
        kept = [(i, of.edge) for i, of in enumerate(self.edges) if not any(of.ends)]
        sizes = tuple(self.problems.sizes[v] for v in self._rest)
        *own_at, n_numbers = np.cumsum([uniform.n_numbers, *sizes]).tolist()
        layout = Layout(
            tuple(own_at), sizes, tuple(uniform.table_at[i] for i, _ in kept),
            tuple(edge.shape for _, edge in kept), n_numbers,
        )  # fmt: skip
        edges = [replace(edge, u=place[edge.u], v=place[edge.v]) for _, edge in kept]
        self.rest = MessageGraph.of(sizes, edges, layout)

    def _count(self, v: int) -> int:
        """How many copies have a variable; what has one is no copy."""
        of = self.problems.owner.get(v)
        return 1 if of is None else self.problems.repeats[of].count

    def copies(self, choice: Choice) -> tuple[tuple[Choice, ...], ...]:
        """The choices of all copies, all as in `choice`."""
        repeats = self.problems.repeats
        return tuple((tuple(choice[v] for v in of.block),) * of.count for of in repeats)

    def _edges(self) -> Iterator[_Joined]:
        every = self.problems.numbers.edges
        for i in self.problems.once:
            ends = self._count(every[i].u) > 1, self._count(every[i].v) > 1
            yield _Joined(every[i], i, 1, ends, not any(ends))
        for repeat, copied in zip(self.problems.repeats, self.problems.copy_edges, strict=True):
            for i in copied:
                yield from self._copied(every[i], i, repeat)

    def _copied(self, edge: Edge, table: int, repeat: Repeat) -> Iterator[_Joined]:
        """The edges of all copies: one, or that of the first copy and those of the others."""
        n = repeat.count
        ends = tuple(n > 1 and v in repeat.block for v in (edge.u, edge.v))
        like = [repeat.counterpart.get(v, v) for v in (edge.u, edge.v)]
        if like == [edge.u, edge.v]:
            yield _Joined(edge, table, n, (ends[0], ends[1]))
            return
        yield _Joined(edge, table, 1, (ends[0], ends[1]), n == 1)
        if like[0] == like[1]:
            raise TooWide("a variable is joined to itself in the next copy")
        if n > 1:
            later = replace(edge, u=like[0], v=like[1])
            yield _Joined(later, table, n - 1, (True, True), inner=False)

    def _find_ends(self) -> Iterator[tuple[int, int, int]]:
        """(an edge of the first or the last copy alone, an edge between copies that looks the same
        to a variable of the copy, the side of that variable)."""
        between: dict[Hashable, list[int]] = {}
        for e, joined in enumerate(self.edges):
            if joined.ends == (True, True) and not joined.inner:
                for side in (0, 1):
                    between.setdefault(self._seen(e, side), []).append(e)
        for e, joined in enumerate(self.edges):
            if not joined.inner and joined.ends != (True, True):
                side = joined.ends.index(True)
                alike = between.get(self._seen(e, side))
                if not alike:
                    raise TooWide("the first or the last copy has an edge of its own")
                yield e, alike.pop(0), side
        if any(between.values()):
            raise TooWide("some copies have edges that the first or the last does not have")

    def _seen(self, e: int, side: int) -> Hashable:
        """What an edge tells apart of its variable on a side."""
        edge = self.edges[e].edge
        v, codes = (edge.v, edge.columns) if side else (edge.u, edge.rows)
        return v, side, codes_of(codes, self.problems.sizes[v]).tobytes()

    def solve(self, row: Array, kind: float) -> tuple[float, list[Array], Choice | None]:
        """(a lower bound on all sums of a row, how much more it is at least with each choice, a
        good choice of the uniform problem). The bound is infinite if nothing is allowed."""
        dear = _DEAR * row.max(where=np.isfinite(row), initial=0.0)
        eased = np.where(np.isfinite(row), row, dear)
        uniform = np.concatenate(
            [(row if inner else eased) * times for times, inner in self._kinds]
        )
        bound, choice = self.graph.bound_and_choice(uniform, kind, *_END)
        if math.isinf(bound):
            return bound, [], None
        bound, slack = self._divide(uniform, kind)
        return bound, slack, choice

    def _divide(self, uniform: Array, kind: float) -> tuple[float, list[Array]]:
        """The bound that messages leave if every copy has an equal share of them."""
        graph = self.graph
        sent = graph.payments(uniform, kind)
        for end, later, side in self._ends:
            self._tie(uniform, sent, end, later, side)
        left, least = graph.reduce(uniform, sent)
        bound = sum(
            of for of, joined in zip(least.tolist(), self.edges, strict=True) if any(joined.ends)
        )
        slack, own = list[Array](), list[Array]()
        for v, (own_at, n, first, _, end) in enumerate(graph.variables.tolist()):
            n_copies = self._counts[v]
            belief, more = uniform[own_at : own_at + n] / n_copies, np.zeros(n)
            for e, side in graph.links[first:end].tolist():
                joined = self.edges[e]
                places = graph.places(e, side)
                if n_copies > 1 and (joined.inner or all(joined.ends)):
                    belief = belief + sent[places] / joined.times
                    if joined.inner:  # the first and the last copy have other edges
                        more += (left[places] - least[e]) / joined.times
                elif n_copies == 1 and any(joined.ends):
                    belief = belief + sent[places]
            bound += n_copies * float(belief.min())
            if math.isinf(bound):
                return bound, []
            slack.append(belief - belief.min() + more)
            if n_copies == 1:
                own.append(slack[-1])
        if not own:
            return bound, slack
        own[0] = own[0] + bound  # what is near, is so beside the whole
        row = np.concatenate((uniform, *own))
        bound, _ = self.rest.bound_and_choice(row, kind, *_END)
        if math.isfinite(bound):
            for v, of in zip(self._rest, self.rest.slack(row, kind)[1], strict=True):
                slack[v] = of
        return bound, slack

    def _tie(self, uniform: Array, sent: Array, end: int, later: int, side: int) -> None:
        """Give a copy at an end the message that all others have; what it is joined to there gets
        the rest of the edge's costs."""
        graph, n_later = self.graph, self.edges[later].times
        message = graph.message(sent, end, side)
        message[:] = graph.message(sent, later, side) / n_later
        costs = graph.table(uniform, end)
        possible = np.isfinite(message)
        costs = (costs if side == 0 else costs.T)[possible] - message[possible, None]
        graph.message(sent, end, 1 - side)[:] = costs.min(axis=0, initial=np.inf)
