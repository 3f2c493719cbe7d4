"""Exact min-sum variable elimination on tables: the fast path for graphs of small width.

Eliminating variable v replaces the tables that mention it by one table over its separator
S_v, the other variables they mention (`_project`):

    m_v(S_v) = min over x_v of [ unary_v(x_v) + sum of tables that mention v ]

until a constant, the optimum, is left; walking back, v takes the argmin of the same sum at
the chosen values of S_v (`_walk_back`), which is one vector: keeping the tables instead of
argmins makes the inner loop a plain minimum, three times faster. Work and memory are products
of sizes over {v} and S_v, so the order decides: least table first, or least fill-in,
whichever does less work in all (`plan_elimination`). Where a table would be too large, hubs
are *conditioned* on: each of their values is tried with the hub's edges folded into its
neighbours, best bound first (`minimise`).

`min_marginals` gives for every choice of every variable the least total that uses it, by a
second, downward pass. The messages are added up afresh instead of subtracting a variable's own
message, because infinity minus infinity is no number.

Infinite entries need no care: nothing here subtracts them. Bucket elimination: Dechter,
"Bucket elimination: a unifying framework for reasoning", Artificial Intelligence 113 (1999).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.errors import AutoparError
from autopar.passes.solvers.problem import Choice, ChoiceProblem, FloatArray

Scope = tuple[int, ...]
Factor = tuple[Scope, FloatArray]
# Tables are added up in blocks of this many entries, which stay in a CPU's cache.
BLOCK_ENTRIES = 2**16
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


@dataclass(frozen=True, eq=False)
class Potentials:
    """One weighted sum of a problem's costs: [K_v] per variable, [K_u, K_v] per pair u < v."""

    unary: tuple[FloatArray, ...]
    pairs: dict[tuple[int, int], FloatArray]

    @staticmethod
    def of(problem: ChoiceProblem, cost: float, tie: float, size: float) -> Potentials:
        """cost * cost_s + tie * tie + size * bytes; forbidden stays infinite.

        `problem` must be merged: one edge per pair.
        """

        def mix(cost_s: FloatArray, ties: FloatArray, sizes: FloatArray | None) -> FloatArray:
            if cost == 0:  # 0 * inf is NaN
                out = np.where(np.isfinite(cost_s), 0.0, np.inf)
            else:
                out = cost_s * cost
            if tie != 0:
                out += ties * tie
            if size != 0 and sizes is not None:
                out += sizes * size
            return out

        nodes = zip(problem.cost_s, problem.tie, problem.bytes, strict=True)
        unary = tuple(mix(c, t, b) for c, t, b in nodes)
        pairs = {(e.u, e.v): mix(e.cost_s, e.tie, e.bytes) for e in problem.edges}
        assert len(pairs) == len(problem.edges), "merge parallel edges first"
        return Potentials(unary, pairs)


@dataclass(frozen=True)
class EliminationPlan:
    """The order, each variable's separator (in that order), and the hubs.

    `entries` counts the joint tables' entries in one branch, `largest` those of the largest
    table, `kept` those of the messages, which stay in memory.
    """

    sizes: tuple[int, ...]
    order: tuple[int, ...]
    separators: tuple[Scope, ...]
    hubs: tuple[int, ...]
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
    limits = limits or Limits()
    sizes = problem.sizes
    neighbours: list[set[int]] = [set() for _ in sizes]
    for e in problem.edges:
        neighbours[e.u].add(e.v)
        neighbours[e.v].add(e.u)
    plan = _best_order(sizes, neighbours, ())
    while not plan.within(limits):
        if len(plan.hubs) == MAX_HUBS:
            raise TooWide(
                f"elimination needs a table of {plan.largest:.3g} entries, {plan.entries:.3g} in"
                f" all, {plan.branches} times; the limits are {limits}",
                hint="solve the ILP instead",
            )
        free = [v for v in range(len(sizes)) if v not in plan.hubs and neighbours[v]]
        free.sort(key=lambda v: (-len(neighbours[v]), v))
        tried = [_best_order(sizes, neighbours, (*plan.hubs, h)) for h in free[:HUBS_TRIED]]
        if not tried:
            raise TooWide(f"one variable has {max(sizes)} choices", hint="solve the ILP instead")
        plan = min(tried, key=lambda p: (p.entries * p.branches, p.hubs))
    return plan


def _best_order(
    sizes: tuple[int, ...], neighbours: Sequence[set[int]], hubs: tuple[int, ...]
) -> EliminationPlan:
    plans = [_greedy_order(sizes, neighbours, hubs, by_fill) for by_fill in (False, True)]
    return min(plans, key=lambda p: p.entries)


def _greedy_order(
    sizes: tuple[int, ...], neighbours: Sequence[set[int]], hubs: tuple[int, ...], by_fill: bool
) -> EliminationPlan:
    """Eliminate by least (table, fill-in), or (fill-in, table); a heap with stale entries."""
    graph = {v: neighbours[v] - set(hubs) for v in range(len(sizes)) if v not in hubs}

    def key(v: int) -> tuple[int, int, int]:
        around = graph[v]
        table = sizes[v] * math.prod(sizes[w] for w in around)
        # Each pair of neighbours not yet adjacent is counted from both ends.
        fill = sum(len(around) - 1 - len(graph[w] & around) for w in around)
        return (fill, table, v) if by_fill else (table, fill, v)

    current = {v: key(v) for v in graph}
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
        for w in touched:
            new = key(w)
            if new != current[w]:
                current[w] = new
                heapq.heappush(heap, new)
    position = {v: i for i, v in enumerate(order)}
    separators = tuple(tuple(sorted(cliques[v], key=lambda w: position[w])) for v in order)
    kept = [math.prod(sizes[w] for w in separator) for separator in separators]
    tables = [sizes[v] * entries for v, entries in zip(order, kept, strict=True)]
    return EliminationPlan(
        sizes, tuple(order), separators, hubs, sum(tables), max(tables, default=1), sum(kept)
    )


def minimise(plan: EliminationPlan, potentials: Potentials) -> tuple[float, Choice]:
    """The least total and a choice that attains it (infinite: none is allowed)."""
    best, best_choice = math.inf, (0,) * len(plan.sizes)
    for bound, values in _branches(plan, potentials):
        if bound >= best:
            break
        constant, branch = _condition(potentials, plan.hubs, values)
        value, tables = _upward(plan, branch)
        if constant + value < best:
            best = constant + value
            best_choice = _walk_back(plan, tables, values)
    return best, best_choice


def min_marginals(plan: EliminationPlan, potentials: Potentials) -> list[FloatArray]:
    """For each variable a [K_v] array: the least total over all choices with x_v = k.

    Raises `TooWide` when the tables that must be kept at once are too large.
    """
    if plan.largest > Limits.marginal_entries or plan.kept > Limits.kept_entries // 4:
        raise TooWide(
            f"min-marginals need {plan.kept} entries in all and {plan.largest} in one table"
        )
    out = [np.full(k, np.inf) for k in plan.sizes]
    for _, values in _branches(plan, potentials):
        constant, branch = _condition(potentials, plan.hubs, values)
        marginals = _downward(plan, branch)
        total = math.inf
        for v, marginal in marginals.items():
            np.minimum(out[v], marginal + constant, out=out[v])
            total = float(marginal.min())
        for h, k in zip(plan.hubs, values, strict=True):
            out[h][k] = min(out[h][k], constant + (total if marginals else 0.0))
    return out


def _branches(plan: EliminationPlan, potentials: Potentials) -> list[tuple[float, Choice]]:
    """(lower bound, values of the hubs), best first; one empty branch without hubs."""
    if not plan.hubs:
        return [(-math.inf, ())]
    out = []
    for values in itertools.product(*(range(plan.sizes[h]) for h in plan.hubs)):
        constant, branch = _condition(potentials, plan.hubs, values)
        bound = constant + sum(float(branch.unary[v].min()) for v in plan.order)
        out.append((bound, values))
    inner = [t for uv, t in potentials.pairs.items() if not set(uv) & set(plan.hubs)]
    rest = sum(float(t.min()) for t in inner)
    return sorted((bound + rest, values) for bound, values in out)


def _condition(
    potentials: Potentials, hubs: tuple[int, ...], values: Choice
) -> tuple[float, Potentials]:
    """Fix the hubs: their own cost as a constant, their edges folded into the neighbours."""
    if not hubs:
        return 0.0, potentials
    fixed = dict(zip(hubs, values, strict=True))
    constant = sum(float(potentials.unary[h][k]) for h, k in fixed.items())
    unary, pairs = list(potentials.unary), {}
    for (u, v), table in potentials.pairs.items():
        if u in fixed and v in fixed:
            constant += float(table[fixed[u], fixed[v]])
        elif u in fixed:
            unary[v] = unary[v] + table[fixed[u]]
        elif v in fixed:
            unary[u] = unary[u] + table[:, fixed[v]]
        else:
            pairs[u, v] = table
    return constant, Potentials(tuple(unary), pairs)


def _buckets(plan: EliminationPlan, potentials: Potentials) -> dict[int, list[Factor]]:
    """Each table with the first of its variables to be eliminated, which is its first axis."""
    position = {v: i for i, v in enumerate(plan.order)}
    buckets: dict[int, list[Factor]] = {v: [((v,), potentials.unary[v])] for v in plan.order}
    for (u, v), table in potentials.pairs.items():
        if position[u] < position[v]:
            buckets[u].append(((u, v), table))
        else:
            # Contiguous, because the sums run along the last axis.
            buckets[v].append(((v, u), np.ascontiguousarray(table.T)))
    return buckets


def _aligned(factors: Sequence[Factor], scope: Scope, sizes: Sequence[int]) -> list[FloatArray]:
    """The tables reshaped to broadcast over `scope`, small ones first.

    Every scope lists its variables in elimination order, so no axis needs to be moved.
    """
    out = []
    for inner, table in factors:
        out.append(table.reshape([sizes[w] if w in inner else 1 for w in scope]))
    return sorted(out, key=lambda t: t.size)


def _joint(factors: Sequence[Factor], scope: Scope, sizes: Sequence[int]) -> FloatArray:
    """The sum of the tables over all of `scope`."""
    total, *more = _aligned(factors, scope, sizes)
    for table in more:
        total = total + table
    return np.broadcast_to(total, tuple(sizes[w] for w in scope))


def _project(tables: Sequence[FloatArray], out: FloatArray) -> None:
    """Write the minimum over the first axis of the tables' sum, block by block.

    Without the first axis the tables broadcast to the shape of `out`.
    """
    n_first = max(len(t) for t in tables)
    entries = n_first * out.size
    if entries <= BLOCK_ENTRIES or out.ndim == 0:
        total, *more = tables
        for table in more:
            grown = np.broadcast_shapes(total.shape, table.shape)
            # Adding in place once the sum has its full shape saves most allocations.
            in_place = grown == total.shape and total is not tables[0]
            total = np.add(total, table, out=total) if in_place else total + table
        np.minimum.reduce(np.broadcast_to(total, (n_first, *out.shape)), axis=0, out=out)
        return
    step = max(1, BLOCK_ENTRIES * len(out) // entries)
    for start in range(0, len(out), step):
        # A single row loses its axis, so that the next axis can be cut in turn.
        at: Any = slice(start, start + step) if step > 1 else start
        whole: Any = slice(None) if step > 1 else 0
        _project([t[:, at if t.shape[1] > 1 else whole] for t in tables], out[at])


def _upward(plan: EliminationPlan, potentials: Potentials) -> tuple[float, dict[int, list[Factor]]]:
    """Eliminate in order: the least total, and the tables that mentioned each variable."""
    sizes, buckets = plan.sizes, _buckets(plan, potentials)
    constant = 0.0
    for v, separator in zip(plan.order, plan.separators, strict=True):
        message = np.empty([sizes[w] for w in separator])
        _project(_aligned(buckets[v], (v, *separator), sizes), message)
        if separator:
            buckets[separator[0]].append((separator, message))
        else:
            constant += float(message)
    return constant, buckets


def _walk_back(plan: EliminationPlan, buckets: dict[int, list[Factor]], values: Choice) -> Choice:
    chosen = dict(zip(plan.hubs, values, strict=True))
    for v in reversed(plan.order):
        total = np.zeros(plan.sizes[v])
        for scope, table in buckets[v]:
            at: Any = (slice(None), *(chosen[w] for w in scope[1:]))
            total += table[at]
        chosen[v] = int(total.argmin())
    return tuple(chosen[v] for v in range(len(plan.sizes)))


def _downward(plan: EliminationPlan, potentials: Potentials) -> dict[int, FloatArray]:
    """Min-marginals of the eliminated variables by an upward and a downward pass."""
    sizes, buckets = plan.sizes, _buckets(plan, potentials)
    children: dict[int, list[tuple[int, Factor]]] = {v: [] for v in plan.order}
    roots: dict[int, float] = {}
    for v, separator in zip(plan.order, plan.separators, strict=True):
        inputs = buckets[v] + [factor for _, factor in children[v]]
        message = np.empty([sizes[w] for w in separator])
        _project(_aligned(inputs, (v, *separator), sizes), message)
        if separator:
            children[separator[0]].append((v, (separator, message)))
        else:
            roots[v] = float(message)
    total, root_of = sum(roots.values()), {v: v for v in roots}
    down: dict[int, list[Factor]] = {v: [] for v in roots}
    out: dict[int, FloatArray] = {}
    for v, separator in zip(plan.order[::-1], plan.separators[::-1], strict=True):
        scope = (v, *separator)
        own = buckets[v] + down.pop(v)
        joint = _joint(own + [factor for _, factor in children[v]], scope, sizes)
        others = total - roots[root_of[v]] if math.isfinite(total) else math.inf
        out[v] = joint.min(axis=tuple(range(1, len(scope)))) + others
        for child, (child_scope, _) in children[v]:
            siblings = [factor for c, factor in children[v] if c != child]
            joint = _joint(own + siblings, scope, sizes)
            drop = tuple(i for i, w in enumerate(scope) if w not in child_scope)
            down[child] = [(child_scope, joint.min(axis=drop))]
            root_of[child] = root_of[v]
    return out
