"""In which order variables are eliminated, and what that costs.

Eliminating a variable joins all tables that mention it into one over its *separator*, the other
variables they mention. Work and memory are products of sizes over the variable and its separator,
so the order decides: least table first, or least fill-in, whichever does less work in all. Where a
table would be too large, hubs are *conditioned* on: each of their values is tried by itself.

Variables may be left: they remain, and what is eliminated becomes one table over them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from itertools import permutations

from autopar.errors import AutoparError
from autopar.passes.solvers.problem import ChoiceProblem

Scope = tuple[int, ...]
HUBS_TRIED = 4
MAX_HUBS = 3


class TooWide(AutoparError):
    """No elimination order keeps the tables within the limits."""


@dataclass(frozen=True)
class Limits:
    """What elimination may use: entries of one joint table, kept in memory, and in all.

    At 2e8 to 1e9 entries per second the defaults allow about ten seconds, and 1 GB.
    """

    table_entries: int = 2**28
    kept_entries: int = 2**27
    total_entries: int = 2**32
    branches: int = 4096
    marginal_entries: int = 2**24

    def and_(self, other: Limits) -> Limits:
        """The narrower of both."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Limits(*(min(pair) for pair in pairs))


@dataclass(frozen=True)
class EliminationPlan:
    """The order, each variable's separator (in that order), the hubs, and what remains.

    `entries` counts the joint tables' entries in one branch, `largest` those of the largest
    table, `kept` those of the messages, which stay in memory.
    """

    sizes: tuple[int, ...]
    order: tuple[int, ...]
    separators: tuple[Scope, ...]
    hubs: Scope
    remaining: Scope
    entries: int
    largest: int
    kept: int

    @property
    def branches(self) -> int:
        return math.prod(self.sizes[h] for h in self.hubs)

    def within(self, limits: Limits) -> bool:
        return (
            self.largest <= limits.table_entries
            and self.kept <= limits.kept_entries
            and self.entries * self.branches <= limits.total_entries
            and self.branches <= limits.branches
        )


def plan_elimination(problem: ChoiceProblem, limits: Limits | None = None) -> EliminationPlan:
    """The cheapest order found, with up to `MAX_HUBS` hubs conditioned on if need be.

    Raises `TooWide` when every plan found exceeds `limits`.
    """
    return plan_order(problem.sizes, [(e.u, e.v) for e in problem.edges], (), limits)


def plan_order(
    sizes: Sequence[int],
    scopes: Iterable[Scope],
    remaining: Scope = (),
    limits: Limits | None = None,
) -> EliminationPlan:
    """The cheapest order found for tables over `scopes`, of all variables but the `remaining`.

    Problems that differ in numbers alone have one plan. Raises `TooWide` as `plan_elimination`
    does; where variables remain, no hub is conditioned on.
    """
    return _planned(tuple(sizes), tuple(scopes), tuple(remaining), limits or Limits())


@lru_cache(maxsize=256)
def _planned(
    sizes: tuple[int, ...], scopes: tuple[Scope, ...], remaining: Scope, limits: Limits
) -> EliminationPlan:
    neighbours: list[set[int]] = [set() for _ in sizes]
    for scope in scopes:
        for u, v in permutations(scope, 2):
            neighbours[u].add(v)
    plan = _best_order(sizes, neighbours, (), remaining)
    while not plan.within(limits):
        if remaining or len(plan.hubs) == MAX_HUBS:
            raise TooWide(
                f"elimination needs a table of {plan.largest:.3g} entries, {plan.entries:.3g} in"
                f" all, {plan.branches} times; the limits are {limits}",
                hint="solve the ILP instead",
            )
        free = [v for v in range(len(sizes)) if v not in plan.hubs and neighbours[v]]
        free.sort(key=lambda v: (-len(neighbours[v]), v))
        tried = [_best_order(sizes, neighbours, (*plan.hubs, h), ()) for h in free[:HUBS_TRIED]]
        if not tried:
            raise TooWide(f"one variable has {max(sizes)} choices", hint="solve the ILP instead")
        plan = min(tried, key=lambda p: (p.entries * p.branches, p.hubs))
    return plan


def _best_order(
    sizes: tuple[int, ...], neighbours: Sequence[set[int]], hubs: Scope, remaining: Scope
) -> EliminationPlan:
    plans = [
        _greedy_order(sizes, neighbours, hubs, remaining, by_fill) for by_fill in (False, True)
    ]
    return min(plans, key=lambda p: p.entries)


def _greedy_order(
    sizes: tuple[int, ...],
    neighbours: Sequence[set[int]],
    hubs: Scope,
    remaining: Scope,
    by_fill: bool,
) -> EliminationPlan:
    """Eliminate by least (table, fill-in), or (fill-in, table); a heap with stale entries."""
    graph = {v: neighbours[v] - set(hubs) for v in range(len(sizes)) if v not in hubs}

    def key(v: int) -> tuple[int, int, int]:
        around = graph[v]
        table = sizes[v] * math.prod(sizes[w] for w in around)
        # Each pair of neighbours not yet adjacent is counted from both ends.
        fill = sum(len(around) - 1 - len(graph[w] & around) for w in around)
        return (fill, table, v) if by_fill else (table, fill, v)

    current = {v: key(v) for v in graph if v not in remaining}
    heap = list(current.values())
    heapq.heapify(heap)
    order: list[int] = []
    cliques: dict[int, set[int]] = {}
    while heap:
        entry = heapq.heappop(heap)
        v = entry[-1]
        if current.get(v) != entry:
            continue
        del current[v]
        around = cliques[v] = graph.pop(v)
        order.append(v)
        touched = set(around)
        for w in around:
            graph[w].discard(v)
            if not around - {w} <= graph[w]:
                graph[w] |= around - {w}
                touched |= graph[w]
        for w in touched & current.keys():
            new = key(w)
            if new != current[w]:
                current[w] = new
                heapq.heappush(heap, new)
    position = {v: i for i, v in enumerate((*order, *remaining))}
    separators = tuple(tuple(sorted(cliques[v], key=lambda w: position[w])) for v in order)
    kept = [math.prod(sizes[w] for w in separator) for separator in separators]
    tables = [sizes[v] * entries for v, entries in zip(order, kept, strict=True)]
    return EliminationPlan(
        sizes, tuple(order), separators, hubs, remaining,
        sum(tables), max(tables, default=1), sum(kept),
    )  # fmt: skip
