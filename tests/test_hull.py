"""Corners of cost against bytes: on the hull of every choice counted out."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from autopar.passes.solvers import ChoiceProblem, Edge, Infeasible
from autopar.passes.solvers.hull import hull_corners
from autopar.passes.solvers.problem import FloatArray


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
