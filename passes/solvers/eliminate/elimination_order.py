"""The order in which variables are eliminated, and what it costs.

Eliminating a variable joins all tables that mention it into one over its *separator*, the other
variables they mention. Tables distinguish classes of choices
(`passes/solvers/problem/partitions.py`). The joint table, which determines time and memory, has

    entries = n_classes(v) * product over w in the separator of n_classes(w)

(`EliminationPlan.joint_entries`). Pairs are eliminated first, at no cost
(`passes/solvers/problem/tables.py`), the others in a greedy order (`greedy_order.py`). Where a
table would be too large, *hubs* are conditioned on: each of their values is tried by itself
(`_planned`).

Variables may remain. The others are then eliminated into one table over them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property, lru_cache

from autopar.errors import AutoparError
from autopar.passes.solvers.eliminate.greedy_order import (
    GreedyOrder,
    InteractionGraph,
    greedy_order,
)
from autopar.passes.solvers.problem import (
    Axes,
    ChoiceProblem,
    EliminationStep,
    Partitions,
    PlacedTable,
    Scope,
    axes_of,
    seen_through,
    views,
)

HUBS_TRIED = 4
MAX_HUBS = 3


class TooWide(AutoparError):
    """No elimination order keeps the tables within the limits."""


@dataclass(frozen=True)
class TableLimits:
    """Upper limits on elimination, in table entries: of one joint table, of all tables kept in
    memory, of all joint tables in all branches; the number of branches; and one joint table of
    min-marginals.

    At 1e9 to 2e9 entries per second the defaults allow a few seconds, and 1 GB.
    """

    table_entries: int = 2**28
    kept_entries: int = 2**27
    total_entries: int = 2**32
    branches: int = 4096
    marginal_entries: int = 2**24

    def and_(self, other: TableLimits) -> TableLimits:
        """The stricter limits of both."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return TableLimits(*(min(pair) for pair in pairs))


@dataclass(frozen=True, eq=False)
class EliminationPlan:
    """Steps in order, and the tables `left` over the `remaining` variables; `left_over` are the
    partitions that these tables make of those variables.

    Tables that steps make are numbered after the given ones. `hubs` are axes of no table: their
    values are tried one by one. `entries` counts the entries of all joint tables in one branch,
    `largest` those of the largest, `kept` those of the tables that steps make, which stay in
    memory.
    """

    sizes: tuple[int, ...]
    given: tuple[Axes, ...]
    steps: tuple[EliminationStep, ...]
    hubs: Scope
    remaining: Scope
    left: tuple[PlacedTable, ...]
    left_over: tuple[int, ...]
    partitions: Partitions
    entries: int
    largest: int
    kept: int

    @property
    def branches(self) -> int:
        return math.prod(self.sizes[h] for h in self.hubs)

    def entries_of(self, step: EliminationStep) -> int:
        """The entries of the joint table that a step computes; a view computes none."""
        return 0 if step.is_view else self.joint_entries(step)

    def joint_entries(self, step: EliminationStep) -> int:
        """The entries of the joint table of a step's bucket."""
        of = (step.partition, *step.made.partitions)
        return math.prod(self.partitions.n_classes(p) for p in of)

    @property
    def order(self) -> Scope:
        return tuple(step.variable for step in self.steps)

    def within(self, limits: TableLimits) -> bool:
        return (
            self.largest <= limits.table_entries
            and self.kept <= limits.kept_entries
            and self.entries * self.branches <= limits.total_entries
            and self.branches <= limits.branches
        )


def plan_elimination(problem: ChoiceProblem, limits: TableLimits | None = None) -> EliminationPlan:
    """The cheapest order found, conditioned on up to `MAX_HUBS` hubs if need be.

    Raises `TooWide` when every plan found exceeds `limits`.
    """
    axes = axes_of(problem.edges, problem.cost_s, problem.bytes)
    return plan_order(problem.sizes, axes, limits=limits)


def plan_order(
    sizes: Sequence[int],
    tables: Iterable[Axes],
    remaining: Scope = (),
    whole: Scope = (),
    limits: TableLimits | None = None,
) -> EliminationPlan:
    """The cheapest order found for tables with these axes, of all variables but the `remaining`.
    The table that is left has every choice of the `whole` among these, and classes of the others.

    Problems that differ only in numbers have one plan. Raises `TooWide` as `plan_elimination` does.
    Where variables remain, no hub is conditioned on.
    """
    limits = limits or TableLimits()
    plan = _planned(tuple(sizes), tuple(tables), tuple(remaining), tuple(whole), limits)
    if not plan.within(limits):
        raise TooWide(
            f"elimination needs a table of {plan.largest:.3g} entries, {plan.entries:.3g} in all,"
            f" {plan.branches} times; the limits are {limits}",
            hint="solve the ILP instead",
        )
    return plan


# Plans that are too wide are cached too: the same tables recur.
@lru_cache(maxsize=256)
def _planned(
    sizes: tuple[int, ...],
    tables: tuple[Axes, ...],
    remaining: Scope,
    whole: Scope,
    limits: TableLimits,
) -> EliminationPlan:
    """The first plan within the limits, else the last one tried."""
    orders = _Orders.of(sizes, tables, remaining, whole)
    plan = orders.plan((), orders.cheapest(()))
    n_tables = [0] * len(sizes)
    for axes in tables:
        for v in axes.scope:
            n_tables[v] += 1
    while not plan.within(limits) and not remaining and len(plan.hubs) < MAX_HUBS:
        free = [v for v in range(len(sizes)) if v not in plan.hubs and n_tables[v]]
        free.sort(key=lambda v: (-n_tables[v], v))
        tried = free[:HUBS_TRIED]
        if all(plan.branches * sizes[h] > limits.branches for h in tried):
            break
        plan = orders.with_one_of(tried, plan.hubs)
    return plan


def _given(partitions: Partitions, sizes: Scope, table: int, axes: Axes) -> PlacedTable:
    codes = axes.written(sizes)
    of = tuple(partitions.of(c) for c in codes)
    return PlacedTable(table, axes.scope, codes, of, axes.follows)


@dataclass(frozen=True)
class _Orders:
    """Greedy orders of some tables, with hubs or without. With hubs, pairs are not viewed but
    eliminated like other variables."""

    sizes: tuple[int, ...]
    given: tuple[Axes, ...]
    tables: Sequence[PlacedTable]
    remaining: Scope
    whole: Scope
    partitions: Partitions
    views: Sequence[EliminationStep]

    @staticmethod
    def of(sizes: Scope, given: tuple[Axes, ...], remaining: Scope, whole: Scope) -> _Orders:
        partitions = Partitions()
        tables = [_given(partitions, sizes, t, axes) for t, axes in enumerate(given)]
        free = (v for v in range(len(sizes)) if v not in remaining)
        pairs = views(partitions, tables, free)
        return _Orders(sizes, given, tables, remaining, whole, partitions, pairs)

    def views_beside(self, hubs: Scope) -> Sequence[EliminationStep]:
        return () if hubs else self.views

    @cached_property
    def _given_graph(self) -> InteractionGraph:
        return self._graph_of(self.tables)

    def _graph_of(self, tables: Iterable[PlacedTable]) -> InteractionGraph:
        return InteractionGraph.of(
            self.partitions, len(self.sizes), ((t.scope, t.partitions) for t in tables)
        )

    def cheapest(self, hubs: Scope, most: float = math.inf) -> GreedyOrder | None:
        """The cheapest order of the variables that are not viewed; None: it has more entries than
        `most`."""
        pairs = self.views_beside(hubs)
        if hubs:
            graph = self._given_graph.without(hubs)
        else:
            graph = self._graph_of(seen_through(self.tables, pairs))
        fixed = {*self.remaining, *hubs, *(step.variable for step in pairs)}
        free = (v for v in range(len(self.sizes)) if v not in fixed)
        return greedy_order(graph, free, most)

    def with_one_of(self, tried: Iterable[int], hubs: Scope) -> EliminationPlan:
        """The plan with one more hub: the one of fewest entries over all branches."""
        found: tuple[int, Scope, GreedyOrder] | None = None
        for h in tried:
            of = (*hubs, h)
            branches = math.prod(self.sizes[v] for v in of)
            order = self.cheapest(of, math.inf if found is None else found[0] // branches)
            if order is not None:
                new = (order.entries * branches, of, order)
                found = new if found is None else min(found, new, key=lambda o: o[:2])
        assert found is not None
        return self.plan(*found[1:])

    def plan(self, hubs: Scope, order: GreedyOrder | None) -> EliminationPlan:
        assert order is not None
        return _Steps(self, hubs).plan(order.order)


class _Steps:
    """The steps of one order."""

    def __init__(self, orders: _Orders, hubs: Scope) -> None:
        self.orders, self.hubs, self.partitions = orders, hubs, orders.partitions
        self.of: list[dict[int, PlacedTable]] = [{} for _ in orders.sizes]
        for table in seen_through(orders.tables, orders.views_beside(hubs)):
            self._add(table.without(hubs) if hubs else table)

    def plan(self, order: Sequence[int]) -> EliminationPlan:
        steps, sizes_made, sizes_joint = [*self.orders.views_beside(self.hubs)], [], []
        for v in order:
            joins, bucket = self._joins(v), tuple(self.of[v].values())
            made = self._made(len(self.orders.tables) + len(steps), v, joins)
            steps.append(EliminationStep(v, joins[v], bucket, made, self._kind(joins, bucket)))
            sizes_made.append(math.prod(map(self.partitions.n_classes, made.partitions)))
            sizes_joint.append(sizes_made[-1] * self.partitions.n_classes(joins[v]))
            self._replace(bucket, made)
        remaining = self.orders.remaining
        left = tuple({t.table: t for v in remaining for t in self.of[v].values()}.values())
        return EliminationPlan(
            self.orders.sizes, self.orders.given, tuple(steps), self.hubs, remaining, left,
            self._left_over(left), self.partitions, sum(sizes_joint),
            max(sizes_joint, default=1), sum(sizes_made),
        )  # fmt: skip

    def _add(self, table: PlacedTable) -> None:
        for v in table.scope:
            self.of[v][table.table] = table

    def _joins(self, v: int) -> dict[int, int]:
        """Variable -> the join of the partitions by the tables of v. For v itself only tables that
        mention other variables count."""
        joined = self.partitions.joined
        tables = [table for table in self.of[v].values() if len(table.scope) > 1]
        if not tables:
            return {v: self.partitions.one_class(self.orders.sizes[v])}
        out: dict[int, int] = {v: tables[0].partitions[tables[0].scope.index(v)]}
        for table in tables:
            for w, partition in zip(table.scope, table.partitions, strict=True):
                out[w] = joined(out.get(w, partition), partition)
        return out

    def _kind(self, joins: dict[int, int], bucket: Sequence[PlacedTable]) -> Hashable:
        """Equal for steps that do the same with their tables."""
        place, exactly = {v: i for i, v in enumerate(joins)}, self.partitions.exactly
        of_tables = tuple(
            tuple((place[w], exactly(of)) for w, of in zip(t.scope, t.codes, strict=True))
            for t in bucket
        )
        return tuple(joins.values()), of_tables

    def _made(self, table: int, v: int, joins: dict[int, int]) -> PlacedTable:
        separator = tuple(w for w in joins if w != v)
        of = tuple(joins[w] for w in separator)
        return PlacedTable(table, separator, tuple(self.partitions.codes[p] for p in of), of)

    def _replace(self, bucket: Sequence[PlacedTable], made: PlacedTable) -> None:
        """Replace a bucket by the table made from it."""
        for table in bucket:
            for w in table.scope:
                del self.of[w][table.table]
        self._add(made)

    def _left_over(self, left: Sequence[PlacedTable]) -> tuple[int, ...]:
        out = []
        for v in self.orders.remaining:
            n_choices = self.orders.sizes[v]
            seen = {p for t in left for w, p in zip(t.scope, t.partitions, strict=True) if w == v}
            if v in self.orders.whole:
                seen = {self.partitions.singletons(n_choices)}
            out.append(self.partitions.join(seen or {self.partitions.one_class(n_choices)}))
        return tuple(out)
