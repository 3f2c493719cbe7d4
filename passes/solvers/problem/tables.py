"""The axes of tables, the steps that join tables, and variables that are pairs of two others.

A cost over three variables is written as the table of one variable u and a *pair* variable p. The
pair has no costs of its own. Two equalities join it to x and y
(`passes/intra/recompute_choice.py`):

    cost[u, p]  where  first(p) = a(x)  and  second(p) = b(y),   p = first(p) * n + second(p)

Given x and y only one p is possible, so there is nothing to minimise: the same memory is a table
[u, a, b] over u, x and y. Elimination joins this *view* (`views`) instead of trying all p with all
u, x and y.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.arrays import Array, Codes
from autopar.passes.solvers.problem.partitions import Partitions
from autopar.passes.solvers.problem.problem import Edge, codes_of

Scope = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Axes:
    """The axes of a table: its variables, and per variable the index of every choice on that axis
    (None: each choice has its own). For an equality, `follows` are the variables without costs of
    their own. Equal axes compare equal."""

    scope: Scope
    codes: tuple[Codes | None, ...]
    follows: Scope = ()

    def written(self, sizes: Scope) -> tuple[Codes, ...]:
        """The codes with None written out, where variable v has `sizes[v]` choices."""
        pairs = zip(self.scope, self.codes, strict=True)
        return tuple(codes_of(codes, sizes[v]) for v, codes in pairs)

    @cached_property
    def _key(self) -> tuple[Scope, tuple[bytes | None, ...], Scope]:
        codes = tuple(None if c is None else c.tobytes() for c in self.codes)
        return self.scope, codes, self.follows

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Axes) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def axes_of(edges: Iterable[Edge], *own: Sequence[Array]) -> tuple[Axes, ...]:
    """The axes of edges' tables; those of length 1 only where a variable follows an equality. `own`
    are the costs and bytes of all variables; without them no variable follows."""
    free = {v for v, of in enumerate(zip(*own, strict=True)) if not any(a.any() for a in of)}
    out = []
    for e in edges:
        ends = tuple(v for v in (e.u, e.v) if v in free)
        follows = ends if ends and _is_equality(e) else ()
        lengths = zip((e.u, e.v), (e.rows, e.columns), e.shape, strict=True)
        kept = [(v, codes) for v, codes, n in lengths if n > 1 or follows]
        out.append(Axes(tuple(v for v, _ in kept), tuple(of for _, of in kept), follows))
    return tuple(out)


def _is_equality(edge: Edge) -> bool:
    """Does it allow only equal indices, at no cost, in all problems?"""
    n, n_columns = edge.shape
    if n != n_columns or edge.cost_s.size != n * n:
        return False
    if edge.bytes is not None and edge.bytes.any():
        return False
    return np.array_equal(edge.cost_s.reshape(n, n), np.where(np.eye(n, dtype=bool), 0.0, np.inf))


@dataclass(frozen=True, eq=False)
class PlacedTable:
    """A table in a plan: its number and variables, and per axis the index of every choice (`codes`)
    and the partition these make; `follows` as in `Axes`."""

    table: int
    scope: Scope
    codes: tuple[Codes, ...]
    partitions: tuple[int, ...]
    follows: Scope = ()

    def codes_of(self, variable: int) -> Codes:
        """The index of each choice of a variable on its axis."""
        return self.codes[self.scope.index(variable)]


@dataclass(frozen=True, eq=False)
class EliminationStep:
    """The elimination of one variable.

    `bucket` are the tables that mention it. `partition` joins their partitions of it; tables of the
    variable alone do not count. `made` is the resulting table over the separator. Steps of equal
    `kind` do the same with their tables. A view computes nothing: `made` is the first table of its
    bucket, with the variable's axis split in two.
    """

    variable: int
    partition: int
    bucket: tuple[PlacedTable, ...]
    made: PlacedTable
    kind: Hashable = None
    is_view: bool = False


def views(
    partitions: Partitions, tables: Sequence[PlacedTable], variables: Iterable[int]
) -> list[EliminationStep]:
    """The steps of those variables that are pairs, in order. The tables they make are numbered
    after the given ones."""
    of: dict[int, dict[int, PlacedTable]] = {v: {} for v in variables}
    for table in tables:
        for w in of.keys() & table.scope:
            of[w][table.table] = table
    steps: list[EliminationStep] = []
    for v, mentioned in of.items():
        bucket = _pair_tables(v, list(mentioned.values()))
        if bucket is None:
            continue
        made = _view(partitions, len(tables) + len(steps), v, bucket)
        every = partitions.singletons(len(bucket[0].codes_of(v)))
        steps.append(EliminationStep(v, every, bucket, made, is_view=True))
        for table in bucket:
            for w in of.keys() & table.scope:
                del of[w][table.table]
        for w in of.keys() & made.scope:
            of[w][made.table] = made
    return steps


def replace_views(
    tables: Sequence[PlacedTable], steps: Sequence[EliminationStep]
) -> list[PlacedTable]:
    """The tables, with the bucket of every view replaced by what the view made."""
    gone = {table.table for step in steps for table in step.bucket}
    return [t for t in (*tables, *(step.made for step in steps)) if t.table not in gone]


def _pair_tables(
    v: int, tables: Sequence[PlacedTable]
) -> tuple[PlacedTable, PlacedTable, PlacedTable] | None:
    """(its only table, the equality with its first, the equality with its second) of a pair
    variable; None: it is not a pair."""
    equalities = [t for t in tables if v in t.follows]
    others = [t for t in tables if v not in t.follows]
    if len(equalities) != 2 or len(others) != 1:
        return None
    (table,) = others
    every = np.arange(len(table.codes_of(v)))
    for first, second in (equalities, equalities[::-1]):
        (a, x, of_x), (b, y, of_y) = _ends(first, v), _ends(second, v)
        n, m = int(a.max()) + 1, int(b.max()) + 1
        if (
            len(every) == n * m
            and np.array_equal(a * m + b, every)
            and np.array_equal(table.codes_of(v), every)
            and of_x.max() < n
            and of_y.max() < m
            and len({*table.scope, x, y}) == len(table.scope) + 2
        ):
            return table, first, second
    return None


def _ends(equality: PlacedTable, v: int) -> tuple[Codes, int, Codes]:
    """(indices of v's choices, the other variable, indices of that one's choices)."""
    (w,) = (w for w in equality.scope if w != v)
    return equality.codes_of(v), w, equality.codes_of(w)


def _view(
    partitions: Partitions,
    number: int,
    v: int,
    bucket: tuple[PlacedTable, PlacedTable, PlacedTable],
) -> PlacedTable:
    """The pair's table, over the two variables of the pair."""
    table, *equalities = bucket
    at = table.scope.index(v)
    _, ends, codes = zip(*(_ends(equality, v) for equality in equalities), strict=True)
    scope = (*table.scope[:at], *ends, *table.scope[at + 1 :])
    places = (*table.codes[:at], *codes, *table.codes[at + 1 :])
    return PlacedTable(number, scope, places, tuple(map(partitions.of, places)))
