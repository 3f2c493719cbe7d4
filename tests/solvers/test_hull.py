"""Corners of cost against bytes lie on the hull of all choices, enumerated."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from autopar.passes.solvers.choice.hull import hull_corners, hull_corners_of
from autopar.passes.solvers.problem import ChoiceProblem, ChoiceProblems, Edge, Infeasible
from autopar.passes.solvers.problem.problem import FloatArray


def random_problem(seed: int) -> ChoiceProblem:
    rng = np.random.default_rng(seed)
    sizes = [int(n) for n in rng.integers(1, 4, 5)]

    def numbers(*shape: int) -> FloatArray:
        return np.asarray(rng.integers(0, 9, shape), dtype=np.float64)

    costs = tuple(numbers(n) for n in sizes)
    edges = []
    for u, v in ((0, 1), (1, 2), (2, 3), (0, 4)):
        cost = numbers(sizes[u], sizes[v])
        cost[rng.random(cost.shape) < 0.1] = np.inf
        edges.append(Edge(u, v, cost, np.zeros_like(cost), numbers(*cost.shape)))
    zeros = tuple(np.zeros(n) for n in sizes)
    sized = tuple(numbers(n) for n in sizes)
    return ChoiceProblem(tuple("abcde"), costs, zeros, sized, tuple(edges))


def test_corners_are_on_the_hull_of_every_choice() -> None:
    n_several = 0
    for seed in range(150):
        problem = random_problem(seed)
        every = [problem.evaluate(x) for x in itertools.product(*map(range, problem.sizes))]
        points = [(t.bytes, t.cost_s) for t in every if math.isfinite(t.cost_s)]
        corners = hull_corners(problem, 20)
        if isinstance(corners, Infeasible):
            assert not points
            continue
        found = [problem.evaluate(choice) for choice in corners]
        fastest, leanest = found[0], found[1 % len(found)]
        assert (fastest.cost_s, fastest.bytes) == min((c, b) for b, c in points)
        assert (leanest.bytes, leanest.cost_s) == min(points)
        for price in (0.01, 0.1, 0.3, 1.0, 3.0, 10.0):
            least = min(c + price * b for b, c in points)
            assert min(t.cost_s + price * t.bytes for t in found) == pytest.approx(least)
        for n_most in (1, 3):
            few = hull_corners(problem, n_most)
            assert not isinstance(few, Infeasible) and len(few) <= n_most
        n_several += len(corners) > 2
    assert n_several > 20


def test_problems_that_walk_together_find_the_corners_of_each_alone() -> None:
    """Five problems of the same choices and edges, some of which forbid everything."""
    n_forbidden = 0
    for seed in range(30):
        rng = np.random.default_rng(seed)
        sizes, pairs = [3, 4, 2, 3], ((0, 1), (1, 2), (2, 3), (0, 2))

        def numbers(*shape: int, rng: np.random.Generator = rng) -> FloatArray:
            return np.asarray(rng.integers(0, 99, (5, *shape)), dtype=np.float64)

        edges = []
        for u, v in pairs:  # choices 0 and 1 of u are alike to v
            rows = np.minimum(np.arange(sizes[u]), 1)
            cost = numbers(2, sizes[v])
            cost[rng.random(cost.shape) < 0.4] = np.inf
            edges.append(Edge(u, v, cost, np.zeros((1, 2, sizes[v])), numbers(2, sizes[v]), rows))
        together = ChoiceProblems(
            5, tuple("abcd"), tuple(numbers(n) for n in sizes),
            tuple(np.zeros((1, n)) for n in sizes), tuple(numbers(n) for n in sizes), tuple(edges),
        )  # fmt: skip
        every = together.some(range(5))
        found = hull_corners_of(every, 4)
        known = [None if isinstance(of, Infeasible) else of[0] for of in hull_corners_of(every, 1)]
        for i, (corners, again) in enumerate(
            zip(found, hull_corners_of(every, 4, known), strict=True)
        ):
            assert again == corners  # what is fastest need not be found twice
            problem = together.of(i)
            alone = hull_corners(problem, 4)
            assert isinstance(corners, Infeasible) == isinstance(alone, Infeasible)
            if isinstance(corners, Infeasible) or isinstance(alone, Infeasible):
                n_forbidden += 1
                continue
            mine, theirs = ([problem.evaluate(x) for x in of] for of in (corners, alone))
            assert mine == theirs
    assert 5 < n_forbidden < 120
