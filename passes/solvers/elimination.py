"""Exact min-sum variable elimination on tables: the fast path for graphs of small width.

Eliminating variable v replaces the tables that mention it by one table over its separator
S_v, the other variables they mention (`made_of`):

    m_v(S_v) = min over x_v of [ unary_v(x_v) + sum of tables that mention v ]

until a constant, the optimum, is left; walking back, v takes the argmin of the same sum at
the chosen values of S_v (`walk_back`), which is one vector. Tables are over classes of choices:
those of v that no table tells apart are one first, the least of them. The order is planned in
`elimination_order.py`; each value of its hubs is tried with the hub's tables folded into those
of its neighbours (`minimise`). Where variables remain, what is left is one table over them
(`project`).

Several problems of one structure are solved together: every array begins with an axis of problems,
of length 1 where they agree.

Infinite entries need no care: nothing here subtracts them. Bucket elimination: Dechter,
"Bucket elimination: a unifying framework for reasoning", Artificial Intelligence 113 (1999).
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.passes.solvers.elimination_order import EliminationPlan, Placed, Step
from autopar.passes.solvers.least_sums import least_sum
from autopar.passes.solvers.problem import (
    Choice,
    ChoiceProblem,
    ChoiceProblems,
    Codes,
    FloatArray,
)

# [problems, variables]
Choices = NDArray[np.intp]


class Weights(NamedTuple):
    """What is minimised: cost * cost_s + tie * ties + size * bytes. Of several problems, `size` may
    be one each."""

    cost: float = 1.0
    tie: float = 0.0
    size: float | FloatArray = 0.0

    def total(
        self, cost_s: FloatArray, ties: FloatArray, size_bytes: FloatArray | None
    ) -> FloatArray:
        """Of one table; what is forbidden stays infinite."""
        if self.cost == 0:  # 0 * inf is NaN
            out = np.where(np.isfinite(cost_s), 0.0, np.inf)
        else:
            out = cost_s * self.cost
        if self.tie != 0:
            out = out + ties * self.tie
        if size_bytes is None:
            return out
        if isinstance(self.size, np.ndarray):
            each: FloatArray = self.size.reshape(-1, *(1 for _ in size_bytes.shape[1:]))
            return out + size_bytes * each
        return out + size_bytes * self.size if self.size != 0 else out


class Weighted:
    """Weighs the tables of a problem, or of several, equal ones once: alike blocks share their
    numbers."""

    def __init__(self, weights: Weights, several: bool = False) -> None:
        self.weights, self.several = weights, several
        self._known: dict[Hashable, FloatArray] = {}

    def __call__(
        self, cost_s: FloatArray, ties: FloatArray, size_bytes: FloatArray | None
    ) -> FloatArray:
        """`Weights.total`: [problems, ...]."""
        arrays = (cost_s, ties) if size_bytes is None else (cost_s, ties, size_bytes)
        # Of views, the memory they show is what they have in common.
        key = tuple((a.ctypes.data, a.shape, a.strides) for a in arrays)
        if key not in self._known:
            found = self.weights.total(cost_s, ties, size_bytes)
            self._known[key] = found if self.several else found[None]
        return self._known[key]


@dataclass(frozen=True, eq=False)
class Potentials:
    """One weighted sum of costs: [problems, K_v] per variable, and [problems, ...] per table of
    the plan that it is for."""

    unary: tuple[FloatArray, ...]
    tables: tuple[FloatArray, ...]

    @staticmethod
    def of(problem: ChoiceProblem | ChoiceProblems, weights: Weights) -> Potentials:
        """Of one problem, for `plan_elimination` of it, or of several."""
        total = Weighted(weights, isinstance(problem, ChoiceProblems))
        nodes = zip(problem.cost_s, problem.tie, problem.bytes, strict=True)
        unary = tuple(total(*node) for node in nodes)
        return Potentials(unary, tuple(total(e.cost_s, e.tie, e.bytes) for e in problem.edges))

    @property
    def n_problems(self) -> int:
        return max((len(array) for array in (*self.unary, *self.tables)), default=1)


@dataclass(frozen=True, eq=False)
class Projection:
    """What a plan leaves: [problems, classes of each remaining variable], the least total of all
    others."""

    plan: EliminationPlan
    potentials: Potentials
    tables: Mapping[int, FloatArray]
    table: FloatArray

    def choices_at(self, problems: Codes, remaining: Choices) -> Choices:
        """The choices of all variables that attain the table's entries where the remaining ones
        choose so, a row each of one of the problems."""
        known = {v: remaining[:, k] for k, v in enumerate(self.plan.remaining)}
        return walk_back(self.plan, self.potentials, self.tables, known, problems)


def project(plan: EliminationPlan, potentials: Potentials) -> Projection:
    """Eliminate all but the remaining variables, whose own costs are not read."""
    constant, tables = upward(plan, potentials)
    shape = tuple(plan.partitions.n_classes(p) for p in plan.left_over)
    joins = dict(zip(plan.remaining, plan.left_over, strict=True))
    parts = [_over(plan, placed, tables[placed.table], joins) for placed in plan.left]
    total = constant.reshape(len(constant), *(1 for _ in shape))
    for part in parts:
        total = total + part
    table = np.broadcast_to(total, (len(total), *shape))
    return Projection(plan, potentials, tables, table)


def minimise(plan: EliminationPlan, potentials: Potentials) -> tuple[float, Choice]:
    """Of one problem the least total and a choice that attains it (infinite: none is allowed)."""
    values, choices = minimise_all(plan, potentials)
    return float(values[0]), tuple(choices[0].tolist())


def minimise_all(plan: EliminationPlan, potentials: Potentials) -> tuple[FloatArray, Choices]:
    """[problems]: the least totals (infinite: none is allowed); and choices that attain them."""
    n = potentials.n_problems
    best, best_choices = np.full(n, np.inf), np.zeros((n, len(plan.sizes)), dtype=np.intp)
    for bounds, values in branches(plan, potentials):
        if not (bounds < best).any():
            continue
        constant, branch = condition(plan, potentials, values)
        totals, tables = upward(plan, branch)
        totals = np.broadcast_to(constant + totals, (n,))
        better = np.flatnonzero(totals < best)
        if len(better):
            known = {h: np.full(len(better), k) for h, k in zip(plan.hubs, values, strict=True)}
            best[better] = totals[better]
            best_choices[better] = walk_back(plan, branch, tables, known, better)
    return best, best_choices


def branches(
    plan: EliminationPlan, potentials: Potentials
) -> list[tuple[FloatArray, tuple[int, ...]]]:
    """(lower bound of every problem, values of the hubs), best first; one branch without hubs."""
    if not plan.hubs:
        return [(np.full(1, -np.inf), ())]
    out = []
    for values in itertools.product(*(range(plan.sizes[h]) for h in plan.hubs)):
        constant, branch = condition(plan, potentials, values)
        bounds = constant + sum(branch.unary[s.variable].min(axis=1) for s in plan.steps)
        for table in branch.tables:
            bounds = bounds + table.reshape(len(table), -1).min(axis=1)
        out.append((bounds, values))
    return sorted(out, key=lambda branch: (float(branch[0].min()), branch[1]))


def condition(
    plan: EliminationPlan, potentials: Potentials, values: tuple[int, ...]
) -> tuple[FloatArray, Potentials]:
    """Fix the hubs: their own cost as a constant, their axes left out of tables."""
    constant = np.zeros(1)
    if not plan.hubs:
        return constant, potentials
    fixed = dict(zip(plan.hubs, values, strict=True))
    for h, k in fixed.items():
        constant = constant + potentials.unary[h][:, k]
    tables = []
    for axes, table in zip(plan.given, potentials.tables, strict=True):
        at: Any = (slice(None),)
        for v, codes in zip(axes.scope, axes.codes, strict=True):
            if v not in fixed:
                at += (slice(None),)
            else:
                at += (fixed[v] if codes is None else int(codes[fixed[v]]),)
        tables.append(table[at])
    return constant, replace(potentials, tables=tuple(tables))


def _over(
    plan: EliminationPlan, placed: Placed, table: FloatArray, joins: Mapping[int, int]
) -> FloatArray:
    """A table over the classes of some partitions, finer than its own: [problems, ...], of length
    1 for variables that it does not mention."""
    order = [placed.scope.index(v) for v in joins if v in placed.scope]
    out = table.transpose(0, *(k + 1 for k in order))
    for axis, k in enumerate(order):
        join = joins[placed.scope[k]]
        pick = placed.codes[k][plan.partitions.firsts[join]]
        if len(pick) != out.shape[axis + 1] or (pick[1:] <= pick[:-1]).any():
            out = np.take(out, pick, axis=axis + 1)
    shape = [plan.partitions.n_classes(p) if v in placed.scope else 1 for v, p in joins.items()]
    return np.ascontiguousarray(out).reshape(len(table), *shape)


def own_costs(step: Step, potentials: Potentials, tables: Mapping[int, FloatArray]) -> FloatArray:
    """[problems, choices]: what a variable costs by itself."""
    total = potentials.unary[step.variable]
    for placed in step.bucket:
        if len(placed.scope) == 1:
            total = total + tables[placed.table][:, placed.codes[0]]
    return total


def joint_partitions(step: Step) -> dict[int, int]:
    """The partitions of the joint table: the variable's, then its separator's."""
    separator = zip(step.made.scope, step.made.partitions, strict=True)
    return {step.variable: step.partition, **dict(separator)}


def other_tables(
    plan: EliminationPlan, step: Step, tables: Mapping[int, FloatArray]
) -> Iterable[tuple[Placed, FloatArray]]:
    """The tables of a bucket that are of more than its variable, over the joint one's classes."""
    joins = joint_partitions(step)
    for placed in step.bucket:
        if len(placed.scope) > 1:
            yield placed, _over(plan, placed, tables[placed.table], joins)


def made_of(
    plan: EliminationPlan, step: Step, potentials: Potentials, tables: Mapping[int, FloatArray]
) -> FloatArray:
    """[problems, classes of the separator]: the least over the step's variable."""
    own = least_of_classes(own_costs(step, potentials, tables), plan, step.partition, 1)
    parts = [own.reshape(*own.shape, *(1 for _ in step.made.scope))]
    parts += (table for _, table in other_tables(plan, step, tables))
    shape = tuple(plan.partitions.n_classes(p) for p in step.made.partitions)
    out = np.empty((max(len(part) for part in parts), *shape))
    least_sum(parts, out)
    return out


def least_of_classes(
    array: FloatArray, plan: EliminationPlan, partition: int, axis: int
) -> FloatArray:
    """The least of every class, along an axis of choices."""
    n = plan.partitions.n_classes(partition)
    if n == array.shape[axis]:
        return array
    if n == 1:
        return array.min(axis=axis, keepdims=True)
    order, starts = plan.partitions.grouped(partition)
    return np.minimum.reduceat(np.take(array, order, axis=axis), starts, axis=axis)


def upward(
    plan: EliminationPlan, potentials: Potentials
) -> tuple[FloatArray, dict[int, FloatArray]]:
    """Eliminate in order: [problems], the least totals; and all tables, given and made."""
    tables = dict(enumerate(potentials.tables))
    constant = sum((t for t in potentials.tables if t.ndim == 1), np.zeros(1))
    # Copies of a block have the same tables, so what is made of them is the same.
    known: dict[Hashable, FloatArray] = {}
    for step in plan.steps:
        of_tables = (id(tables[placed.table]) for placed in step.bucket)
        key = (step.kind, id(potentials.unary[step.variable]), *of_tables)
        if key not in known:
            known[key] = made_of(plan, step, potentials, tables)
        message = known[key]
        if step.made.scope:
            tables[step.made.table] = message
        else:
            constant = constant + message
    return constant, tables


def walk_back(
    plan: EliminationPlan,
    potentials: Potentials,
    tables: Mapping[int, FloatArray],
    known: Mapping[int, Codes],
    problems: Codes,
) -> Choices:
    """Every variable's argmin, the last eliminated first; hubs and remaining are `known`. A row for
    each of some problems."""
    chosen = dict(known)

    def rows(array: FloatArray) -> FloatArray:
        found: FloatArray = array if len(array) == 1 else array[problems]
        return found

    for step in reversed(plan.steps):
        total = rows(potentials.unary[step.variable])
        for placed in step.bucket:
            table = tables[placed.table]
            at: list[Any] = [problems if len(table) > 1 else np.zeros_like(problems)]
            own = placed.codes[0]
            for v, codes in zip(placed.scope, placed.codes, strict=True):
                if v == step.variable:
                    at.append(slice(None))
                    own = codes
                else:
                    at.append(codes[chosen[v]])
            total = total + table[tuple(at)][:, own]
        chosen[step.variable] = np.broadcast_to(total.argmin(axis=1), problems.shape)
    out = np.zeros((len(problems), len(plan.sizes)), dtype=np.intp)
    for v, values in chosen.items():
        out[:, v] = values
    return out
