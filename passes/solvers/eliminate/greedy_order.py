"""Greedy elimination orders: by smallest table, or by least fill-in, whichever has fewer entries.

An order depends on how tables *see* variables. `seen[v][w]` is the partition of w by the tables of
both v and w. `own[v]` is the partition of v by all tables of v and another variable. The joint
table of v has (`InteractionGraph._entries`)

    entries[v] = n_classes(own[v]) * product over neighbours w of n_classes(seen[v][w])

Eliminating v leaves one table over its neighbours, whose partitions are at least as fine as those
of the tables it replaces (`InteractionGraph.eliminate`):

    seen[w][u] becomes the join of seen[w][u] and seen[v][u], for all neighbours u, w of v

Partitions become coarser in one case: if w is v's only neighbour, its tables with v are gone, and
`own[w]` is computed again.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence

from autopar.passes.solvers.problem import Partitions


class InteractionGraph:
    """How tables see variables, while those are eliminated.

    `around[v]` are the neighbours of v as bits, `entries[v]` the entries of its joint table.
    `fill[v]` is twice its fill-in: twice the number of pairs of its neighbours that are not
    adjacent.
    """

    def __init__(self, partitions: Partitions, seen: list[dict[int, int]]) -> None:
        self.partitions, self.seen = partitions, seen
        self.around = [sum(1 << w for w in row) for row in seen]
        variables = range(len(seen))
        self.own = [self._own(v) for v in variables]
        self.entries = [self._entries(v) for v in variables]
        self.fill = [self._fill(v) for v in variables]

    @staticmethod
    def of(
        partitions: Partitions,
        n_variables: int,
        tables: Iterable[tuple[Sequence[int], Sequence[int]]],
    ) -> InteractionGraph:
        """From tables as (variables, the partitions that the table makes of them)."""
        seen: list[dict[int, int]] = [{} for _ in range(n_variables)]
        for scope, made in tables:
            for v in scope:
                row = seen[v]
                for w, partition in zip(scope, made, strict=True):
                    if w != v:
                        row[w] = partitions.joined(row.get(w, partition), partition)
        return InteractionGraph(partitions, seen)

    def copy(self) -> InteractionGraph:
        out = InteractionGraph.__new__(InteractionGraph)
        out.partitions, out.seen = self.partitions, [dict(row) for row in self.seen]
        out.around, out.own = list(self.around), list(self.own)
        out.entries, out.fill = list(self.entries), list(self.fill)
        return out

    def eliminate(self, v: int) -> set[int]:
        """Eliminate v. Returns the variables whose `entries` or `fill` may have changed."""
        joined, seen, around = self.partitions.joined, self.seen, self.around
        joins, neighbours = seen[v], around[v]
        changed = set(joins)
        if self.fill[v]:
            changed |= self._filled(v)
        for w, own in joins.items():
            row = seen[w]
            del row[v]
            for u, partition in joins.items():
                if u != w and row.setdefault(u, partition) != partition:
                    row[u] = joined(row[u], partition)
            around[w] = (around[w] | neighbours) & ~(1 << v | 1 << w)
            self.own[w] = joined(self.own[w], own)
        if len(joins) == 1:
            (w,) = joins
            self.own[w] = self._own(w)
        for w in joins:
            self.entries[w], self.fill[w] = self._entries(w), self._fill(w)
        return changed

    def _filled(self, v: int) -> set[int]:
        """Update the `fill` of variables next to two neighbours of v that become adjacent; returns
        these variables."""
        changed, others = set(), ~(self.around[v] | 1 << v)
        for w in _members(self.around[v]):
            for u in _members(self.around[v] & ~self.around[w] & -(2 << w)):
                for x in _members(self.around[u] & self.around[w] & others):
                    self.fill[x] -= 2
                    changed.add(x)
        return changed

    def _own(self, v: int) -> int:
        """-1: no table joins v to another variable."""
        rows = [self.seen[w][v] for w in self.seen[v]]
        return self.partitions.join(rows) if rows else -1

    def _entries(self, v: int) -> int:
        if not self.seen[v]:
            return 1
        n_classes = self.partitions.n_classes
        return math.prod(map(n_classes, self.seen[v].values())) * n_classes(self.own[v])

    def _fill(self, v: int) -> int:
        around, here = self.around, self.around[v]
        n_others = len(self.seen[v]) - 1
        return sum(n_others - (around[w] & here).bit_count() for w in self.seen[v])


def _members(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def greedy_order(start: InteractionGraph, free: Iterable[int]) -> tuple[int, ...]:
    """The order of fewer entries of two: by least (table, fill-in) and by least (fill-in, table) of
    the `free` variables."""
    free = tuple(free)
    order, entries = _greedy(start.copy(), free, False, math.inf)
    by_fill, fewer = _greedy(start, free, True, entries)
    return by_fill if fewer < entries else order


def _greedy(
    graph: InteractionGraph, free: Iterable[int], by_fill: bool, most: float
) -> tuple[tuple[int, ...], int]:
    """(one greedy order, the entries of all its joint tables), by a heap with stale entries; ends
    where it has `most` entries or more."""
    first, second = (graph.fill, graph.entries) if by_fill else (graph.entries, graph.fill)
    current = {v: (first[v], second[v], v) for v in free}
    heap = list(current.values())
    heapq.heapify(heap)
    order, entries = [], 0
    while heap and entries < most:
        key = heapq.heappop(heap)
        v = key[-1]
        if current.get(v) != key:
            continue
        del current[v]
        order.append(v)
        entries += graph.entries[v]
        for w in graph.eliminate(v):
            if w in current and current[w] != (new := (first[w], second[w], w)):
                current[w] = new
                heapq.heappush(heap, new)
    return tuple(order), entries
