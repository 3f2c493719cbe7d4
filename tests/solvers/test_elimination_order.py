"""Orders of elimination: what is planned, and how often."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest

from autopar.passes.solvers.eliminate import (
    EliminationPlan,
    TableLimits,
    TooWide,
    minimise,
    plan_elimination,
    plan_order,
)
from autopar.passes.solvers.problem import (
    Axes,
    ChoiceProblem,
    Edge,
    Potentials,
    Weights,
)
from tests.helpers.problems import clique

# Per variable of a table, the code of every choice.
Table = dict[int, tuple[int, ...]]


def random_tables(seed: int) -> tuple[list[int], list[Table]]:
    """Sizes, and tables of one to four variables that distinguish some of their choices."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 13))
    sizes = rng.integers(1, 9, n).tolist()
    tables = []
    for _ in range(int(rng.integers(0, 3 * n))):
        scope = rng.choice(n, int(rng.integers(1, min(4, n) + 1)), replace=False).tolist()
        finest = rng.integers(1, 5)
        tables.append({v: tuple((np.arange(sizes[v]) // finest).tolist()) for v in scope})
        if rng.random() < 0.5:
            v = scope[0]
            tables[-1][v] = tuple(rng.integers(0, 3, sizes[v]).tolist())
    return sizes, tables


def planned(
    sizes: Sequence[int], tables: Sequence[Table], limits: TableLimits | None = None
) -> EliminationPlan:
    axes = [
        Axes(tuple(table), tuple(np.array(codes, dtype=np.intp) for codes in table.values()))
        for table in tables
    ]
    return plan_order(sizes, axes, limits=limits)


def joint(tables: Sequence[Table], v: int) -> Table:
    """The joint table of v and the variables that share tables with it."""
    found: dict[int, list[tuple[int, ...]]] = {}
    for table in tables:
        if v in table and len(table) > 1:
            for w, codes in table.items():
                found.setdefault(w, []).append(codes)
    out = {}
    for w, of in found.items():
        parts = list(zip(*of, strict=True))
        out[w] = tuple(parts.index(part) for part in parts)
    return out


def plain_order(
    free: Sequence[int], tables: Sequence[Table], by_fill: bool
) -> tuple[tuple[int, ...], int]:
    """The greedy order by its definition, and the entries of all joint tables."""
    order: list[int] = []
    entries, left, tables = 0, set(free), list(tables)

    def key(v: int) -> tuple[int, int, int]:
        table = joint(tables, v)
        pairs = itertools.combinations(table.keys() - {v}, 2)
        fill = sum(not any(u in t and w in t for t in tables) for u, w in pairs)
        size = math.prod(len(set(codes)) for codes in table.values())
        return (fill, size, v) if by_fill else (size, fill, v)

    while left:
        v = min(map(key, left))[-1]
        table = joint(tables, v)
        entries += math.prod(len(set(codes)) for codes in table.values())
        tables = [t for t in tables if v not in t]
        tables.append({w: codes for w, codes in table.items() if w != v})
        left.discard(v)
        order.append(v)
    return tuple(order), entries


def test_what_is_too_wide_is_said() -> None:
    problem, limits = clique(6, 3, seed=0), TableLimits(table_entries=2)
    with pytest.raises(TooWide, match="a table of 729 entries, "):
        plan_elimination(problem, limits)


def test_orders_are_greedy() -> None:
    for seed in range(60):
        sizes, tables = random_tables(seed)
        plain = [plain_order(range(len(sizes)), tables, by_fill) for by_fill in (False, True)]
        order, entries = min(plain, key=lambda of: of[1])
        plan = planned(sizes, tables)
        assert tuple(step.variable for step in plan.steps) == order, seed
        assert plan.entries == entries, seed
        assert sum(map(plan.joint_entries, plan.steps)) == entries
        assert max(map(plan.joint_entries, plan.steps)) == plan.largest


def test_a_variable_joined_to_many_that_do_not_matter() -> None:
    """A concatenation of the logits of 80 layers costs the same whatever the layers choose."""
    rng, n, of_both = np.random.default_rng(0), 80, np.zeros(2, dtype=np.intp)
    edges = [Edge(0, v, rng.random((3, 1)), columns=of_both) for v in range(1, n + 1)]
    chain = [Edge(v, v + 1, rng.random((2, 2))) for v in range(1, n)]
    own = (rng.random(3), *(rng.random(2) for _ in range(n)))
    zeros = tuple(np.zeros_like(of) for of in own)
    names = tuple(map(str, range(n + 1)))
    problem = ChoiceProblem(names, own, zeros, (*edges, *chain))
    value, choice = minimise(plan_elimination(problem), Potentials.of(problem, Weights()))
    along = own[1]
    for edge, after in zip(chain, own[2:], strict=True):
        along = (along[:, None] + edge.cost_s).min(axis=0) + after
    concatenated = own[0] + sum((e.cost_s[:, 0] for e in edges), np.zeros(3))
    assert value == pytest.approx(concatenated.min() + along.min(), rel=1e-12)
    assert problem.evaluate(choice).cost_s == pytest.approx(value, rel=1e-12)
