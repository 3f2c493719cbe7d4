"""Corners of cost against bytes: on the hull of every choice counted out."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from autopar.passes.solvers import ChoiceProblem, Edge, Infeasible
from autopar.passes.solvers.hull import hull_corners


def random_problem(seed: int) -> ChoiceProblem:
    rng = np.random.default_rng(seed)
    sizes = [int(n) for n in rng.integers(1, 4, 5)]
    costs = [rng.integers(0, 9, n) * 1.0 for n in sizes]
    edges = []
    for u, v in ((0, 1), (1, 2), (2, 3), (0, 4)):
        cost = rng.integers(0, 9, (sizes[u], sizes[v])) * 1.0
        cost[rng.random(cost.shape) < 0.1] = np.inf
        edges.append(Edge(u, v, cost, np.zeros_like(cost), rng.integers(0, 9, cost.shape) * 1.0))
    zeros = tuple(np.zeros(n) for n in sizes)
    sized = tuple(rng.integers(0, 9, n) * 1.0 for n in sizes)
    return ChoiceProblem(tuple("abcde"), tuple(costs), zeros, sized, tuple(edges))


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
        assert len(hull_corners(problem, 1)) == 1
        assert len(hull_corners(problem, 3)) <= 3
        n_several += len(corners) > 2
    assert n_several > 20
