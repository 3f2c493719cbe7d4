"""Exact min-sum variable elimination on tables: the fast path for graphs of small width.

Eliminating variable v replaces the tables that mention it by one table over its separator S_v, the
other variables they mention (`eliminate`):

    m_v(S_v) = min over x_v of [ unary_v(x_v) + sum of tables that mention v ]

Once all variables are eliminated, the constant that is left is the optimum (`minimise`). Walking
back, v takes the argmin of the same sum at the chosen values of S_v, a vector over x_v
(`Eliminated.chosen`). The parts:

- Tables are over classes of choices. Choices of v that no table distinguishes count as one, the
  cheapest of them.
- `elimination_order.py` plans the order. Where tables would be too large, `passes/solvers/choice`
  passes messages.
- Variables may remain. The result is then one table over them (`project`).
- Rows may hold several problems of one structure. `eliminate` runs compiled loops on each
  (`elimination_loops.py`).

Infinite entries need no care: nothing here subtracts them. Bucket elimination: Dechter, "Bucket
elimination: a unifying framework for reasoning", Artificial Intelligence 113 (1999).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autopar.arrays import Array, Codes
from autopar.passes.solvers.eliminate.elimination_code import Code, code_of
from autopar.passes.solvers.eliminate.elimination_loops import run_steps, walk_back
from autopar.passes.solvers.eliminate.elimination_order import EliminationPlan
from autopar.passes.solvers.problem import Choice, PlacedTable, Potentials


@dataclass(frozen=True, eq=False)
class Eliminated:
    """Problems after elimination: `numbers` [problems, numbers] in the places of `code`. `constant`
    [problems] is the least total of the parts that no remaining variable is joined to."""

    plan: EliminationPlan
    code: Code
    numbers: Array
    constant: Array

    def table(self, t: int) -> Array:
        """[problems, ...]: table t, given or made."""
        at, shape = self.code.table_at[t], self.code.shapes[t]
        return self.numbers[:, at : at + math.prod(shape)].reshape(len(self.numbers), *shape)

    def chosen(self, known: Mapping[int, Codes], n_rows: int = 1) -> Codes:
        """[rows, variables]: the best choices of all variables in the first problem. `known` holds
        the values [rows] of the remaining variables."""
        code = self.code
        out = np.zeros((n_rows, len(self.plan.sizes)), dtype=np.intp)
        for v, values in known.items():
            out[:, v] = values
        for row in out:
            walk_back(self.numbers[0], code.steps, code.reads, code.axes, code.places, row)
        return out

    def choice(self, known: Mapping[int, int]) -> Choice:
        """`chosen` for one value of each known variable."""
        (row,) = self.chosen({v: np.array([k]) for v, k in known.items()})
        return tuple(row.tolist())


@dataclass(frozen=True, eq=False)
class Projection:
    """What a plan leaves: `table` is [problems, classes of each remaining variable], the least
    total over all other variables."""

    eliminated: Eliminated
    table: Array

    def choices_at(self, remaining: Codes) -> Codes:
        """[rows, variables]: choices in the first problem that attain the table's entries, where
        `remaining` [rows, remaining variables] are the choices of those."""
        known = {v: remaining[:, k] for k, v in enumerate(self.eliminated.plan.remaining)}
        return self.eliminated.chosen(known, len(remaining))


def eliminate(plan: EliminationPlan, potentials: Potentials) -> Eliminated:
    """Eliminate all variables but the remaining ones."""
    code = code_of(plan, potentials.layout)
    n_given = potentials.layout.n_numbers
    numbers, scratch = np.empty((len(potentials.rows), code.n_numbers)), np.empty(code.n_scratch)
    numbers[:, :n_given] = potentials.rows
    for row in numbers:
        run_steps(row, code.steps, code.slots, code.sources, code.alone, code.places, scratch)
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
    """The least total of one problem, and a choice that attains it (infinite: none is allowed)."""
    eliminated = eliminate(plan, potentials)
    return float(eliminated.constant[0]), eliminated.choice({})


def over(
    plan: EliminationPlan, placed: PlacedTable, table: Array, joins: Mapping[int, int]
) -> Array:
    """A table over the classes of finer partitions `joins` (variable -> partition): [problems,
    ...], of length 1 for variables that it does not mention."""
    order = [placed.scope.index(v) for v in joins if v in placed.scope]
    out = table.transpose(0, *(k + 1 for k in order))
    for axis, k in enumerate(order):
        join = joins[placed.scope[k]]
        pick = placed.codes[k][plan.partitions.firsts[join]]
        if len(pick) != out.shape[axis + 1] or (pick[1:] <= pick[:-1]).any():
            out = np.take(out, pick, axis=axis + 1)
    shape = [plan.partitions.n_classes(p) if v in placed.scope else 1 for v, p in joins.items()]
    return np.ascontiguousarray(out).reshape(len(table), *shape)


def least_of_classes(array: Array, plan: EliminationPlan, partition: int, axis: int) -> Array:
    """The minimum of every class, along an axis of choices."""
    n = plan.partitions.n_classes(partition)
    if n == array.shape[axis]:
        return array
    if n == 1:
        return array.min(axis=axis, keepdims=True)
    order, starts = plan.partitions.grouped(partition)
    return np.minimum.reduceat(np.take(array, order, axis=axis), starts, axis=axis)
