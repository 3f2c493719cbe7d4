"""Exact min-sum variable elimination on tables: the fast path for graphs of small width.

Eliminating variable v replaces the tables that mention it by one table over its separator
S_v, the other variables they mention:

    m_v(S_v) = min over x_v of [ unary_v(x_v) + sum of tables that mention v ]

until a constant, the optimum, is left; walking back, v takes the argmin of the same sum at
the chosen values of S_v (`Eliminated.choices`), which is one vector. Tables are over classes of
choices: those of v that no table tells apart are one first, the least of them. The order is planned
in `elimination_order.py`; each value of its hubs is tried with the hub's tables folded into those
of its neighbours (`minimise`). Where variables remain, what is left is one table over them
(`project`).

Problems of one structure have arrays that begin with an axis of problems, of length 1 where they
agree; each is solved by compiled loops (`elimination_loops.py`).

Infinite entries need no care: nothing here subtracts them. Bucket elimination: Dechter,
"Bucket elimination: a unifying framework for reasoning", Artificial Intelligence 113 (1999).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.passes.solvers.elimination_code import Code, code_of
from autopar.passes.solvers.elimination_loops import eliminate as run
from autopar.passes.solvers.elimination_loops import walk_back
from autopar.passes.solvers.elimination_order import EliminationPlan, Placed
from autopar.passes.solvers.potentials import Potentials
from autopar.passes.solvers.problem import Choice, Codes, FloatArray

# [problems, variables]
Choices = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Eliminated:
    """Problems after elimination: `numbers` [problems, ...] as `code` places them, and the least
    totals [problems] of what no remaining variable is joined to."""

    plan: EliminationPlan
    code: Code
    numbers: FloatArray
    constant: FloatArray

    def table(self, t: int) -> FloatArray:
        """[problems, ...]: a table given or made."""
        at, shape = self.code.table_at[t], self.code.shapes[t]
        return self.numbers[:, at : at + math.prod(shape)].reshape(len(self.numbers), *shape)

    def choices(self, problems: Codes, known: Mapping[int, Codes]) -> Choices:
        """The choices of all variables, a row for each of some problems, where hubs and remaining
        variables are `known`."""
        code = self.code
        out = np.zeros((len(problems), len(self.plan.sizes)), dtype=np.intp)
        for v, values in known.items():
            out[:, v] = values
        for p, row in zip(problems.tolist(), out, strict=True):
            numbers = self.numbers[p if len(self.numbers) > 1 else 0]
            walk_back(numbers, code.steps, code.reads, code.axes, code.places, row)
        return out


@dataclass(frozen=True, eq=False)
class Projection:
    """What a plan leaves: [problems, classes of each remaining variable], the least total of all
    others."""

    eliminated: Eliminated
    table: FloatArray

    def choices_at(self, problems: Codes, remaining: Choices) -> Choices:
        """The choices of all variables that attain the table's entries where the remaining ones
        choose so, a row each of one of the problems."""
        known = {v: remaining[:, k] for k, v in enumerate(self.eliminated.plan.remaining)}
        return self.eliminated.choices(problems, known)


def eliminate(plan: EliminationPlan, potentials: Potentials) -> Eliminated:
    """All but the hubs, whose values are fixed, and the remaining variables."""
    code = code_of(plan, potentials.layout)
    n_given = potentials.layout.n_numbers
    numbers, scratch = np.empty((len(potentials.rows), code.n_numbers)), np.empty(code.n_scratch)
    numbers[:, :n_given] = potentials.rows
    for row in numbers:
        run(row, code.steps, code.slots, code.sources, code.alone, code.places, scratch)
    constant = np.zeros(len(numbers))
    for at in code.constants_at:
        constant += numbers[:, at]
    return Eliminated(plan, code, numbers, constant)


def project(plan: EliminationPlan, potentials: Potentials) -> Projection:
    """Eliminate all but the remaining variables, whose own costs are not read."""
    eliminated = eliminate(plan, potentials)
    constant = eliminated.constant
    shape = tuple(plan.partitions.n_classes(p) for p in plan.left_over)
    joins = dict(zip(plan.remaining, plan.left_over, strict=True))
    total = constant.reshape(len(constant), *(1 for _ in shape))
    for placed in plan.left:
        total = total + over(plan, placed, eliminated.table(placed.table), joins)
    return Projection(eliminated, np.broadcast_to(total, (len(total), *shape)))


def minimise(plan: EliminationPlan, potentials: Potentials) -> tuple[float, Choice]:
    """Of one problem the least total and a choice that attains it (infinite: none is allowed)."""
    values, choices = minimise_all(plan, potentials)
    return float(values[0]), tuple(choices[0].tolist())


def minimise_all(plan: EliminationPlan, potentials: Potentials) -> tuple[FloatArray, Choices]:
    """[problems]: the least totals (infinite: none is allowed); and choices that attain them."""
    n = len(potentials.rows)
    best, best_choices = np.full(n, np.inf), np.zeros((n, len(plan.sizes)), dtype=np.intp)
    for bounds, values in branches(plan, potentials):
        if not (bounds < best).any():
            continue
        constant, branch = condition(plan, potentials, values)
        eliminated = eliminate(plan, branch)
        totals = np.broadcast_to(constant + eliminated.constant, (n,))
        better = np.flatnonzero(totals < best)
        if len(better):
            known = {h: np.full(len(better), k) for h, k in zip(plan.hubs, values, strict=True)}
            best[better] = totals[better]
            best_choices[better] = eliminated.choices(better, known)
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
        bounds = constant + sum(branch.own[s.variable].min(axis=1) for s in plan.steps)
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
        constant = constant + potentials.own[h][:, k]
    tables = []
    for axes, table in zip(plan.given, potentials.tables, strict=True):
        at: Any = (slice(None),)
        for v, codes in zip(axes.scope, axes.codes, strict=True):
            if v not in fixed:
                at += (slice(None),)
            else:
                at += (fixed[v] if codes is None else int(codes[fixed[v]]),)
        tables.append(table[at])
    return constant, Potentials.given(potentials.own, tables)


def over(
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
