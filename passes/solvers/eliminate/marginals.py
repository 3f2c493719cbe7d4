"""Min-marginals, the least total for every choice of every variable: elimination up, then down.

    marginal_v(k) = min over x with x_v = k of total(x)                          (`min_marginals`)

Going down, each table that a step made receives the least total of everything outside it
(`_downward`). This is summed afresh. To subtract the variable's own message would be wrong for
infinite entries: infinity minus infinity is not a number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np

from autopar.arrays import Array
from autopar.passes.solvers.eliminate.elimination import eliminate, least_of_classes, over
from autopar.passes.solvers.eliminate.elimination_order import EliminationPlan, TooWide
from autopar.passes.solvers.problem import EliminationStep, PlacedTable, Potentials

# Entries of the largest joint table, and of all tables that are kept at once.
MOST_JOINT, MOST_KEPT = 2**24, 2**25


def min_marginals(plan: EliminationPlan, potentials: Potentials) -> list[Array]:
    """For each variable of one problem a [K_v] array: the least total over all choices with x_v =
    k.

    Raises `TooWide` when the tables that must be kept at once are too large.
    """
    largest = max(map(plan.joint_entries, plan.steps), default=1)
    if largest > MOST_JOINT or plan.kept > MOST_KEPT:
        raise TooWide(f"min-marginals need {plan.kept} entries in all and {largest} in one table")
    marginals = dict(_downward(plan, potentials))
    return [marginals[v] for v in range(len(plan.sizes))]


def _downward(plan: EliminationPlan, potentials: Potentials) -> Iterable[tuple[int, Array]]:
    """(variable, min-marginals [K_v]) of the eliminated variables of one problem."""
    eliminated = eliminate(plan, potentials)
    tables = {t: eliminated.table(t) for t in eliminated.code.shapes}
    step_of = {step.made.table: step for step in plan.steps}
    total = float(eliminated.constant[0])
    roots = {t: float(tables[t][0]) for t, step in step_of.items() if not step.made.scope}
    # By made table: the least total of everything outside it, over its axes; and its root.
    down: dict[int, Array] = {}
    root_of = {root: root for root in roots}
    for step in reversed(plan.steps):
        made, root = step.made, root_of[step.made.table]
        others = total - roots[root] if math.isfinite(total) else math.inf
        own = _own_costs(step, potentials, tables)
        others_of = dict(_other_tables(plan, step, tables))
        above = down.pop(made.table)[:, None] if made.scope else np.zeros((1, 1))
        joint = np.zeros((1, plan.partitions.n_classes(step.partition), *(1 for _ in made.scope)))
        joint = sum(others_of.values(), joint + above)
        of_class = plan.partitions.codes[step.partition]
        around = joint.min(axis=tuple(range(2, joint.ndim)))[:, of_class]
        yield step.variable, (own + around)[0] + others
        for child in step.bucket:
            if child.table not in step_of:
                continue
            root_of[child.table] = root
            if len(child.scope) == 1:
                alone = [t for t in step.bucket if len(t.scope) == 1 and t is not child]
                rest = sum((tables[t.table][:, t.codes[0]] for t in alone), around)
                rest = rest + potentials.own[step.variable]
                down[child.table] = least_of_classes(rest, plan, child.partitions[0], 1)
            else:
                least = least_of_classes(own, plan, step.partition, 1)
                rest = least.reshape(*least.shape, *(1 for _ in made.scope)) + above
                rest = sum((t for placed, t in others_of.items() if placed is not child), rest)
                down[child.table] = _coarser(plan, rest, _joint_partitions(step), child)


def _own_costs(step: EliminationStep, potentials: Potentials, tables: Mapping[int, Array]) -> Array:
    """[problems, choices]: what the variable costs by itself."""
    total = potentials.own[step.variable]
    for placed in step.bucket:
        if len(placed.scope) == 1:
            total = total + tables[placed.table][:, placed.codes[0]]
    return total


def _joint_partitions(step: EliminationStep) -> dict[int, int]:
    """Variable -> partition of the joint table: the eliminated variable, then its separator."""
    separator = zip(step.made.scope, step.made.partitions, strict=True)
    return {step.variable: step.partition, **dict(separator)}


def _other_tables(
    plan: EliminationPlan, step: EliminationStep, tables: Mapping[int, Array]
) -> Iterable[tuple[PlacedTable, Array]]:
    """The tables of a bucket with other variables, over the joint table's classes."""
    joins = _joint_partitions(step)
    for placed in step.bucket:
        if len(placed.scope) > 1:
            yield placed, over(plan, placed, tables[placed.table], joins)


def _coarser(
    plan: EliminationPlan, joint: Array, joins: Mapping[int, int], placed: PlacedTable
) -> Array:
    """The minimum of a joint table over the coarser classes of one of the tables in it."""
    shape = [plan.partitions.n_classes(p) for p in joins.values()]
    out = np.broadcast_to(joint, (len(joint), *shape))
    kept = [v for v in joins if v in placed.scope]
    out = out.min(axis=tuple(k + 1 for k, v in enumerate(joins) if v not in placed.scope))
    for axis, v in enumerate(kept):
        fine, coarse = joins[v], placed.partitions[placed.scope.index(v)]
        of_class = plan.partitions.codes[coarse][plan.partitions.firsts[fine]]
        order = np.argsort(of_class, kind="stable")
        starts = np.searchsorted(of_class[order], np.arange(plan.partitions.n_classes(coarse)))
        out = np.minimum.reduceat(np.take(out, order, axis=axis + 1), starts, axis=axis + 1)
    return out.transpose(0, *(kept.index(v) + 1 for v in placed.scope))
