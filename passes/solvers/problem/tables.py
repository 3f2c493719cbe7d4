"""What tables are over, the steps that join them, and variables that are pairs of two others.

Costs over three variables are written as those of one with the *pair* of the other two, a variable
without costs of its own that equalities join to both (`recompute_choice.py`):

    cost[u, p]  where  first(p) = a(x)  and  second(p) = b(y),   p = first(p) * n + second(p)

Where x and y have values there is one p to choose, so nothing is to be found out: in the same
places is a table [u, a, b] over u, x and y. That *view* is what elimination joins, instead of
trying all p beside all u, x and y.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.passes.solvers.problem.partitions import Partitions
from autopar.passes.solvers.problem.problem import Codes, Edge, FloatArray, codes_of

Scope = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Axes:
    """What a table is over: variables, and per variable the place of every choice on that axis
    (None: each choice has its own). Of an equality, `follows` are the variables without costs of
    their own. Alike axes are equal."""

    scope: Scope
    codes: tuple[Codes | None, ...]
    follows: Scope = ()

    def written(self, sizes: Scope) -> tuple[Codes, ...]:
        """With a place for every choice, of `sizes` by variable."""
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


def axes_of(edges: Iterable[Edge], *own: Sequence[FloatArray]) -> tuple[Axes, ...]:
    """Of edges between variables whose `own` costs, ties and bytes may be known."""
    free = {v for v, of in enumerate(zip(*own, strict=True)) if not any(a.any() for a in of)}
    out = []
    for e in edges:
        ends = tuple(v for v in (e.u, e.v) if v in free)
        follows = ends if ends and _is_equality(e) else ()
        out.append(Axes((e.u, e.v), (e.rows, e.columns), follows))
    return tuple(out)


def _is_equality(edge: Edge) -> bool:
    """Does it allow equal places alone, at no cost, in all problems?"""
    n, n_columns = edge.cost_s.shape[-2:]
    if n != n_columns or edge.cost_s.size != n * n:
        return False
    if edge.tie.any() or (edge.bytes is not None and edge.bytes.any()):
        return False
    return np.array_equal(edge.cost_s.reshape(n, n), np.where(np.eye(n, dtype=bool), 0.0, np.inf))


@dataclass(frozen=True, eq=False)
class PlacedTable:
    """A table in a plan: its variables, the place of every choice on their axes, and the partitions
    that this makes; `follows` as in `Axes`."""

    table: int
    scope: Scope
    codes: tuple[Codes, ...]
    partitions: tuple[int, ...]
    follows: Scope = ()

    def codes_of(self, variable: int) -> Codes:
        """The place of each of its choices."""
        return self.codes[self.scope.index(variable)]

    def without(self, variables: Scope) -> PlacedTable:
        """Without the axes of variables whose values are fixed."""
        kept = [k for k, v in enumerate(self.scope) if v not in variables]
        return PlacedTable(
            self.table,
            tuple(self.scope[k] for k in kept),
            tuple(self.codes[k] for k in kept),
            tuple(self.partitions[k] for k in kept),
        )


@dataclass(frozen=True, eq=False)
class EliminationStep:
    """One variable eliminated. `bucket` are the tables that mention it; `partition` joins theirs of
    the variable, where they are of more than it; what is `made` is a table over the separator.
    Steps of one `kind` do the same with their tables. Of a view nothing is to be done: what it made
    is the first of its bucket, with two axes for the variable's."""

    variable: int
    partition: int
    bucket: tuple[PlacedTable, ...]
    made: PlacedTable
    kind: Hashable = None
    is_view: bool = False


def views(
    partitions: Partitions, tables: Sequence[PlacedTable], variables: Iterable[int]
) -> list[EliminationStep]:
    """Of those of some variables that are pairs, in order; what they make is numbered after the
    tables."""
    of: dict[int, dict[int, PlacedTable]] = {v: {} for v in variables}
    for table in tables:
        for w in of.keys() & table.scope:
            of[w][table.table] = table
    steps: list[EliminationStep] = []
    for v, mentioned in of.items():
        bucket = _as_pair(v, list(mentioned.values()))
        if bucket is None:
            continue
        made = _view(partitions, len(tables) + len(steps), v, bucket)
        every = partitions.of_all(len(bucket[0].codes_of(v)))
        steps.append(EliminationStep(v, every, bucket, made, is_view=True))
        for table in bucket:
            for w in of.keys() & table.scope:
                del of[w][table.table]
        for w in of.keys() & made.scope:
            of[w][made.table] = made
    return steps


def seen_through(
    tables: Sequence[PlacedTable], steps: Sequence[EliminationStep]
) -> list[PlacedTable]:
    """Some tables, with what views made in the place of their buckets."""
    gone = {table.table for step in steps for table in step.bucket}
    return [t for t in (*tables, *(step.made for step in steps)) if t.table not in gone]


def _as_pair(
    v: int, tables: Sequence[PlacedTable]
) -> tuple[PlacedTable, PlacedTable, PlacedTable] | None:
    """The only table that a variable is in beside equalities with its first and its second; None
    where it is no pair."""
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
    """The places of v's choices, what it is joined to, and the places of that one's."""
    (w,) = (w for w in equality.scope if w != v)
    return equality.codes_of(v), w, equality.codes_of(w)


def _view(
    partitions: Partitions,
    number: int,
    v: int,
    bucket: tuple[PlacedTable, PlacedTable, PlacedTable],
) -> PlacedTable:
    """The table of a pair, over what the pair is of."""
    table, *equalities = bucket
    at = table.scope.index(v)
    _, ends, codes = zip(*(_ends(equality, v) for equality in equalities), strict=True)
    scope = (*table.scope[:at], *ends, *table.scope[at + 1 :])
    places = (*table.codes[:at], *codes, *table.codes[at + 1 :])
    return PlacedTable(number, scope, places, tuple(map(partitions.of, places)))
