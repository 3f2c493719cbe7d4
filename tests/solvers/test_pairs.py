"""Variables that are pairs of two others are eliminated as views, with the same optimum."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autopar.passes.solvers.choice import solve
from autopar.passes.solvers.eliminate import (
    EliminationPlan,
    min_marginals,
    minimise,
    plan_elimination,
    plan_order,
)
from autopar.passes.solvers.problem import ChoiceProblem, Edge, Potentials, Weights, axes_of
from autopar.passes.solvers.repeats import Repeat, RepeatedPlan, RepeatedProblem
from autopar.passes.solvers.repeats.elimination import RepeatedElimination
from tests.helpers.problems import WEIGHTS, check_same, least, random_problem, unroll, weighed


def equality(n: int) -> np.ndarray:
    return np.where(np.eye(n, dtype=bool), 0.0, np.inf)


def with_pair(
    problem: ChoiceProblem, u: int, of: tuple[int, int], rng: np.random.Generator
) -> ChoiceProblem:
    """Adds a variable, the pair of classes of two variables' choices, in a table with u."""
    p, codes = problem.n_variables, []
    for w in of:
        _, classes = np.unique(rng.integers(0, 3, problem.sizes[w]), return_inverse=True)
        codes.append(classes.astype(np.intp))
    n, m = (int(of_w.max()) + 1 for of_w in codes)
    table = rng.random((problem.sizes[u], n * m)) * 1e-3
    table[rng.random(table.shape) < 0.2] = np.inf
    sizes = rng.integers(0, 4, table.shape).astype(float)
    places = np.divmod(np.arange(n * m), m)
    edges = [
        Edge(u, p, table, sizes),
        Edge(of[0], p, equality(n), None, codes[0], places[0]),
        Edge(p, of[1], equality(m), None, places[1], codes[1]),
    ]
    nothing = np.zeros(n * m)
    return replace(
        problem,
        names=(*problem.names, f"v{p}"),
        cost_s=(*problem.cost_s, nothing),
        bytes=(*problem.bytes, nothing),
        edges=(*problem.edges, *(edges if rng.random() < 0.5 else edges[::-1])),
    )


def with_pairs(seed: int) -> ChoiceProblem:
    """A random problem with one or two; the second may be in a table with the first."""
    rng = np.random.default_rng(seed)
    problem = random_problem(seed, n_max=5, k_max=3)
    for _ in range(int(rng.integers(1, 3))):
        if problem.n_variables >= 3:
            u, *of = rng.choice(problem.n_variables, 3, replace=False).tolist()
            problem = with_pair(problem, u, (of[0], of[1]), rng)
    return problem


def views_of(plan: EliminationPlan) -> list[int]:
    return [step.variable for step in plan.steps if step.is_view]


def test_the_optimum_is_the_same() -> None:
    n_views = 0
    for seed in range(60):
        problem = with_pairs(seed).merged()
        plan = plan_elimination(problem)
        n_views += len(views_of(plan))
        for weights in WEIGHTS:
            value, choice = minimise(plan, Potentials.of(problem, weights))
            assert value == pytest.approx(least(problem, weights), rel=1e-12), seed
            if value < np.inf:
                summed = weighed(problem.evaluate(choice), weights)
                assert summed == pytest.approx(value, rel=1e-12, abs=1e-15), seed
        check_same(problem, solve(problem))
    assert n_views > 30, n_views


def test_min_marginals_see_through_pairs() -> None:
    for seed in range(30):
        problem = with_pairs(seed).merged()
        potentials = Potentials.of(problem, Weights())
        found = min_marginals(plan_elimination(problem), potentials)
        plain = min_marginals(plan_order(problem.sizes, axes_of(problem.edges)), potentials)
        for ours, theirs in zip(found, plain, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-18)


def test_what_is_no_pair() -> None:
    """A variable with costs of its own, one that may not be every pair, one in two tables."""
    rng = np.random.default_rng(0)
    plain = ChoiceProblem(
        ("u", "x", "y"),
        tuple(np.ones(4) for _ in range(3)),
        tuple(np.zeros(4) for _ in range(3)),
    )
    problem = with_pair(plain, 0, (1, 2), rng)
    n = problem.sizes[3]
    assert n > 1 and views_of(plan_elimination(problem)) == [3]
    dear = replace(problem, cost_s=(*problem.cost_s[:3], np.arange(n, dtype=np.float64)))
    fewer = problem.restrict([*(np.ones(4, dtype=bool) for _ in range(3)), np.arange(n) < n - 1])
    twice = Edge(1, 3, rng.random((4, n)))
    free = replace(problem.edges[1], cost_s=np.zeros_like(problem.edges[1].cost_s))
    for other in (
        dear,
        fewer,
        replace(problem, edges=(*problem.edges, twice)),
        replace(problem, edges=(problem.edges[0], free, problem.edges[2])),
    ):
        assert not views_of(plan_elimination(other))
        check_same(other, solve(other))


@pytest.mark.parametrize("seed", [0, 1, 3, 4, 5])  # of 2, a class has all choices
def test_pairs_in_repeated_blocks(seed: int) -> None:
    """In each copy, a pair shares a table with the outputs of the copy before."""
    rng = np.random.default_rng(seed)
    sizes = [3, 3, 4, 2, 3]  # before, what is handed on, two that the pair is of, after
    joined = [(1, 2), (1, 3), (1, 4), (0, 3)]

    def table(u: int, v: int) -> Edge:
        return Edge(u, v, rng.random((sizes[u], sizes[v])))

    plain = ChoiceProblem(
        tuple(f"v{v}" for v in range(5)),
        tuple(rng.random(k) for k in sizes),
        tuple(rng.random(k) for k in sizes),
        tuple(table(u, v) for u, v in joined),
    )
    numbers = with_pair(plain, 0, (2, 3), rng)
    repeat = Repeat((1, 2, 3, 5), {0: 1}, frozenset([4]), 3)
    problem = RepeatedProblem.of_one(numbers, (repeat,))
    elimination = RepeatedElimination(problem, RepeatedPlan(problem.every))
    assert views_of(elimination.plan.blocks[0].plan)
    written, _ = unroll(problem)
    for weights in WEIGHTS:
        value, point = elimination.at(weights)
        assert value == pytest.approx(least(written, weights), rel=1e-12)
        assert weighed(point.totals, weights) == pytest.approx(value, rel=1e-12)
