"""Exact min-sum variable elimination on tables: the fast path for graphs of small width.

Eliminating variable v replaces the tables that mention it by one table over its separator
S_v, the other variables they mention (`_project`):

    m_v(S_v) = min over x_v of [ unary_v(x_v) + sum of tables that mention v ]

until a constant, the optimum, is left; walking back, v takes the argmin of the same sum at
the chosen values of S_v (`_walk_back`), which is one vector: keeping the tables instead of
argmins makes the inner loop a plain minimum, three times faster. The order is planned in
`elimination_order.py`; each value of its hubs is tried with the hub's tables folded into those
of its neighbours, best bound first (`minimise`). Where variables remain, what is left is one
table over them (`project`).

`min_marginals` gives for every choice of every variable the least total that uses it, by a
second, downward pass. The messages are added up afresh instead of subtracting a variable's own
message, because infinity minus infinity is no number.

Infinite entries need no care: nothing here subtracts them. Bucket elimination: Dechter,
"Bucket elimination: a unifying framework for reasoning", Artificial Intelligence 113 (1999).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from autopar.passes.solvers.elimination_order import EliminationPlan, Limits, Scope, TooWide
from autopar.passes.solvers.problem import Choice, ChoiceProblem, FloatArray

Factor = tuple[Scope, FloatArray]
# Tables are added up in blocks of this many entries, which stay in a CPU's cache.
BLOCK_ENTRIES = 2**16


class Weights(NamedTuple):
    """What is minimised: cost * cost_s + tie * ties + size * bytes."""

    cost: float = 1.0
    tie: float = 0.0
    size: float = 0.0

    def total(
        self, cost_s: FloatArray, ties: FloatArray, size_bytes: FloatArray | None
    ) -> FloatArray:
        """Of one table; what is forbidden stays infinite."""
        if self.cost == 0:  # 0 * inf is NaN
            out = np.where(np.isfinite(cost_s), 0.0, np.inf)
        else:
            out = cost_s * self.cost
        if self.tie != 0:
            out += ties * self.tie
        if self.size != 0 and size_bytes is not None:
            out += size_bytes * self.size
        return out


@dataclass(frozen=True, eq=False)
class Potentials:
    """One weighted sum of a problem's costs: [K_v] per variable, and a table per scope of two or
    more variables, in rising order."""

    unary: tuple[FloatArray, ...]
    tables: Mapping[Scope, FloatArray]

    @staticmethod
    def of(problem: ChoiceProblem, weights: Weights) -> Potentials:
        """`problem` must be merged: one edge per pair."""
        nodes = zip(problem.cost_s, problem.tie, problem.bytes, strict=True)
        unary = tuple(weights.total(*node) for node in nodes)
        tables: dict[Scope, FloatArray] = {
            (e.u, e.v): weights.total(e.cost_s, e.tie, e.bytes) for e in problem.edges
        }
        assert len(tables) == len(problem.edges), "merge parallel edges first"
        return Potentials(unary, tables)


@dataclass(frozen=True, eq=False)
class Projection:
    """What a plan leaves: [K of each remaining variable], the least total of all others."""

    plan: EliminationPlan
    table: FloatArray
    buckets: Mapping[int, list[Factor]]

    def choice_at(self, values: Choice) -> Choice:
        """The choice of all variables that attains the table's entry at `values`."""
        return _walk_back(
            self.plan, self.buckets, dict(zip(self.plan.remaining, values, strict=True))
        )


def project(plan: EliminationPlan, potentials: Potentials) -> Projection:
    """Eliminate all but the remaining variables."""
    constant, buckets = _upward(plan, potentials)
    factors = [factor for v in plan.remaining for factor in buckets[v]]
    if not factors:  # nothing remains
        return Projection(plan, np.array(constant), buckets)
    table = _joint(factors, plan.remaining, plan.sizes) + constant
    return Projection(plan, table, buckets)


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
            best_choice = _walk_back(plan, tables, dict(zip(plan.hubs, values, strict=True)))
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
    inner = [t for scope, t in potentials.tables.items() if not set(scope) & set(plan.hubs)]
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
    unary = list(potentials.unary)
    tables: dict[Scope, FloatArray] = {}
    for scope, table in potentials.tables.items():
        at: Any = tuple(fixed.get(v, slice(None)) for v in scope)
        left = tuple(v for v in scope if v not in fixed)
        if not left:
            constant += float(table[at])
        elif len(left) == 1:
            unary[left[0]] = unary[left[0]] + table[at]
        else:
            tables[left] = tables[left] + table[at] if left in tables else table[at]
    return constant, Potentials(tuple(unary), tables)


def _buckets(plan: EliminationPlan, potentials: Potentials) -> dict[int, list[Factor]]:
    """Each table with the first of its variables to be eliminated, which is its first axis."""
    every = (*plan.order, *plan.remaining)
    position = {v: i for i, v in enumerate(every)}
    buckets: dict[int, list[Factor]] = {v: [((v,), potentials.unary[v])] for v in every}
    for scope, table in potentials.tables.items():
        axes = sorted(range(len(scope)), key=lambda k: position[scope[k]])
        ordered = tuple(scope[k] for k in axes)
        # Contiguous, because the sums run along the last axis.
        buckets[ordered[0]].append((ordered, np.ascontiguousarray(table.transpose(axes))))
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


def _walk_back(
    plan: EliminationPlan, buckets: Mapping[int, list[Factor]], known: Mapping[int, int]
) -> Choice:
    """Every variable's argmin, the last eliminated first; hubs and remaining are `known`."""
    chosen = dict(known)
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
