"""Message passing: its bound is one, its choice is allowed, and on trees they meet."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from autopar.passes.solvers.choice import solve
from autopar.passes.solvers.choice.message_passing import MessageGraph, MessagePassing
from autopar.passes.solvers.eliminate import TableLimits, TooWide, plan_elimination
from autopar.passes.solvers.problem import ChoiceProblem, Edge, Numbers, Weights
from tests.helpers.problems import check_same, least, random_problem, seeds, weighed


def is_tree(problem: ChoiceProblem) -> bool:
    """No two ways between two variables."""
    root = list(range(problem.n_variables))

    def of(v: int) -> int:
        while root[v] != v:
            v = root[v]
        return v

    for e in problem.edges:
        if of(e.u) == of(e.v):
            return False
        root[of(e.u)] = of(e.v)
    return True


@pytest.mark.parametrize("seed", seeds(60, 240))
def test_bounds_and_choices(seed: int) -> None:
    problem = replace(random_problem(seed), budget_bytes=None)
    for weights in (Weights(), Weights(cost=2.0), Weights(size=1e-6)):
        wanted = least(problem, weights)
        bound, point = MessagePassing(problem).at(weights)
        if math.isinf(wanted):
            assert math.isinf(point.totals.cost_s)
            continue
        is_found = math.isfinite(point.totals.cost_s)
        total = weighed(point.totals, weights) if is_found else math.inf
        assert bound <= wanted * (1 + 1e-9) and wanted <= total * (1 + 1e-9)
        if is_tree(problem):
            assert bound == pytest.approx(total, rel=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_costs_below_nothing(seed: int) -> None:
    """What is paid for elsewhere may cost less than nothing here: messages end all the same."""
    problem = replace(random_problem(seed), budget_bytes=None)
    numbers, wanted = Numbers.of(problem), least(problem, Weights())
    row, layout = numbers.cost_s[0].copy(), numbers.layout
    for at, n in zip(layout.own_at, problem.sizes, strict=True):
        row[at : at + n] -= 1.0
    graph = MessageGraph.of(problem.sizes, problem.edges, layout)
    bound, choice = graph.bound_and_choice(row)
    if math.isinf(wanted):
        return
    assert bound <= (wanted - problem.n_variables) * (1 - 1e-9)
    if choice is not None:
        assert problem.evaluate(choice).cost_s >= wanted * (1 - 1e-9)


def test_some_random_problems_are_trees_and_some_are_forbidden() -> None:
    problems = [random_problem(seed) for seed in range(60)]
    assert 5 < sum(map(is_tree, problems)) < 55
    assert any(math.isinf(least(problem, Weights())) for problem in problems)


def chain_with_hubs(seed: int, n: int = 4, k: int = 3, n_hubs: int = 2) -> ChoiceProblem:
    """A chain whose variables all have an edge to every hub: a bias, or an encoder's output."""
    rng = np.random.default_rng(seed)
    pairs = [(v - 1, v, 1.0) for v in range(n_hubs + 1, n_hubs + n)]
    pairs += [(v, h, 0.3) for v in range(n_hubs, n_hubs + n) for h in range(n_hubs)]
    edges = [Edge(u, v, s * rng.random((k, k)), rng.random((k, k))) for u, v, s in pairs]
    own = tuple(rng.random(k) for _ in range(n_hubs + n))
    return ChoiceProblem(tuple(map(str, range(n_hubs + n))), own, own, tuple(edges))


def test_what_all_blocks_read_needs_no_tables() -> None:
    """Tables over a chain's state and all hubs are too large; messages and the ILP do without."""
    for seed in range(8):
        problem = chain_with_hubs(seed)
        with pytest.raises(TooWide):
            plan_elimination(problem, TableLimits(table_entries=3**3))
        check_same(problem, solve(problem, limits=TableLimits(table_entries=3**3)))
