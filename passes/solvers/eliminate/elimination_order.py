"""The order in which variables are eliminated, and what it costs.

Eliminating a variable joins all tables that mention it into one over its *separator*, the other
variables they mention. Tables distinguish classes of choices
(`passes/solvers/problem/partitions.py`). The joint table, which determines time and memory, has

    entries = n_classes(v) * product over w in the separator of n_classes(w)

(`EliminationPlan.joint_entries`). Pairs are eliminated first, at no cost
(`passes/solvers/problem/tables.py`), the others in a greedy order (`greedy_order.py`).

Variables may remain. The others are then eliminated into one table over them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache

from autopar.errors import AutoparError
from autopar.passes.solvers.eliminate.greedy_order import InteractionGraph, greedy_order
from autopar.passes.solvers.problem import (
    Axes,
    ChoiceProblem,
    EliminationStep,
    Partitions,
    PlacedTable,
    Scope,
    axes_of,
    replace_views,
    views,
)


class TooWide(AutoparError):
    """No elimination order keeps the tables within the limits."""


@dataclass(frozen=True)
class TableLimits:
    """Upper limits on elimination, in table entries: of one joint table, of all tables kept in
    memory, of all joint tables.

    At 1e9 to 2e9 entries per second the defaults allow a few seconds, and 1 GB.
    """

    table_entries: int = 2**28
    kept_entries: int = 2**27
    total_entries: int = 2**32

    def and_(self, other: TableLimits) -> TableLimits:
        """The stricter limits of both."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return TableLimits(*(min(pair) for pair in pairs))


@dataclass(frozen=True, eq=False)
class EliminationPlan:
    """Steps in order, and the tables `left` over the `remaining` variables; `left_over` are the
    partitions that these tables make of those variables.

    Tables that steps make are numbered after the given ones. `entries` counts the entries of all
    joint tables, `largest` those of the largest, `kept` those of the tables that steps make, which
    stay in memory.
    """

    sizes: tuple[int, ...]
    steps: tuple[EliminationStep, ...]
    remaining: Scope
    left: tuple[PlacedTable, ...]
    left_over: tuple[int, ...]
    partitions: Partitions
    entries: int
    largest: int
    kept: int

    def joint_entries(self, step: EliminationStep) -> int:
        """The entries of the joint table of a step's bucket."""
        of = (step.partition, *step.made.partitions)
        return math.prod(self.partitions.n_classes(p) for p in of)

    def within(self, limits: TableLimits) -> bool:
        return (
            self.largest <= limits.table_entries
            and self.kept <= limits.kept_entries
            and self.entries <= limits.total_entries
        )


def plan_elimination(problem: ChoiceProblem, limits: TableLimits | None = None) -> EliminationPlan:
    """The cheapest order found.

    Raises `TooWide` when it exceeds `limits`.
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
    """
    limits = limits or TableLimits()
    plan = _planned(tuple(sizes), tuple(tables), tuple(remaining), tuple(whole))
    if not plan.within(limits):
        raise TooWide(
            f"elimination needs a table of {plan.largest:.3g} entries, {plan.entries:.3g} in all;"
            f" the limits are {limits}",
            hint="solve the ILP instead",
        )
    return plan


# Plans that are too wide are cached too: the same tables recur.
@lru_cache(maxsize=256)
def _planned(
    sizes: tuple[int, ...], tables: tuple[Axes, ...], remaining: Scope, whole: Scope
) -> EliminationPlan:
    partitions = Partitions()
    given = [_given(partitions, sizes, t, axes) for t, axes in enumerate(tables)]
    pairs = views(partitions, given, (v for v in range(len(sizes)) if v not in remaining))
    seen = replace_views(given, pairs)
    graph = InteractionGraph.of(partitions, len(sizes), ((t.scope, t.partitions) for t in seen))
    fixed = {*remaining, *(step.variable for step in pairs)}
    order = greedy_order(graph, (v for v in range(len(sizes)) if v not in fixed))
    return _Steps(sizes, partitions, seen).plan(order, len(given), pairs, remaining, whole)


def _given(partitions: Partitions, sizes: Scope, table: int, axes: Axes) -> PlacedTable:
    codes = axes.written(sizes)
    of = tuple(partitions.of(c) for c in codes)
    return PlacedTable(table, axes.scope, codes, of, axes.follows)


class _Steps:
    """The steps of one order."""

    def __init__(self, sizes: Scope, partitions: Partitions, tables: Iterable[PlacedTable]) -> None:
        self.sizes, self.partitions = sizes, partitions
        self.of: list[dict[int, PlacedTable]] = [{} for _ in sizes]
        for table in tables:
            self._add(table)

    def plan(
        self, order: Iterable[int], n_given: int, pairs: Iterable[EliminationStep],
        remaining: Scope, whole: Scope,
    ) -> EliminationPlan:  # fmt: skip
        """The plan of an order, after the views of `pairs`."""
        steps, sizes_made, sizes_joint = [*pairs], [], []
        for v in order:
            joins, bucket = self._joins(v), tuple(self.of[v].values())
            made = self._made(n_given + len(steps), v, joins)
            steps.append(EliminationStep(v, joins[v], bucket, made, self._kind(joins, bucket)))
            sizes_made.append(math.prod(map(self.partitions.n_classes, made.partitions)))
            sizes_joint.append(sizes_made[-1] * self.partitions.n_classes(joins[v]))
            self._replace(bucket, made)
        left = tuple({t.table: t for v in remaining for t in self.of[v].values()}.values())
        return EliminationPlan(
            self.sizes, tuple(steps), remaining, left, self._left_over(left, remaining, whole),
            self.partitions, sum(sizes_joint), max(sizes_joint, default=1), sum(sizes_made),
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
            return {v: self.partitions.one_class(self.sizes[v])}
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

    def _left_over(
        self, left: Sequence[PlacedTable], remaining: Scope, whole: Scope
    ) -> tuple[int, ...]:
        out = []
        for v in remaining:
            n_choices = self.sizes[v]
            seen = {p for t in left for w, p in zip(t.scope, t.partitions, strict=True) if w == v}
            if v in whole:
                seen = {self.partitions.singletons(n_choices)}
            out.append(self.partitions.join(seen or {self.partitions.one_class(n_choices)}))
        return tuple(out)
