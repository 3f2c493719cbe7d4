"""Messages in problems with repeated blocks: their bound is one, and near it choices are few."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from autopar.passes.solvers.eliminate import TooWide
from autopar.passes.solvers.problem import ChoiceProblem, Edge, Weights
from autopar.passes.solvers.repeats import Repeat, RepeatedProblem
from autopar.passes.solvers.repeats.messages import RepeatedMessages, UniformGraph
from tests.helpers.problems import WEIGHTS, least, random_repeated, seeds, unroll, weighed


def messages_of(problem: RepeatedProblem) -> RepeatedMessages | None:
    """None: its first or last copies are joined to others as no copy is."""
    try:
        return RepeatedMessages(problem, UniformGraph(problem.every))
    except TooWide:
        return None


def equal_blocks(seed: int, n: int = 4, k: int = 5, count: int = 20) -> RepeatedProblem:
    """Like a model's layers: a chain with a residual edge, reshards between few specs; blocks
    differ in nothing, and some choices are forbidden. One variable is joined to every block."""
    rng = np.random.default_rng(seed)
    specs = rng.integers(0, 4, (n, k))
    reshard = rng.integers(1, 9, (4, 4)) * 1e-4
    np.fill_diagonal(reshard, 0.0)
    tables = {
        pair: reshard[np.ix_(specs[pair[0]], rng.integers(0, 4, k))]
        for pair in [*itertools.pairwise(range(n)), (n - 1, 0), (n - 1, 1)]
    }
    outer, own = rng.random((2, k)) * 1e-3, [rng.random(k) * 1e-3 for _ in range(n)]
    for costs in own:
        costs[rng.random(k) < 0.2] = np.inf
    size = [rng.integers(0, 9, k).astype(float) for _ in range(n)]
    edges = []
    for block in range(3):
        at = [1 + block * n + i for i in range(n)]
        edges += [Edge(at[i], at[i + 1], tables[i, i + 1]) for i in range(n - 1)]
        edges.append(Edge(0, at[2], np.add.outer(outer[0], outer[1])))
        if block:
            edges += [Edge(at[0] - 1, at[i], tables[n - 1, i]) for i in (0, 1)]
    names = tuple(f"v{i}" for i in range(1 + 3 * n))
    numbers = ChoiceProblem(names, (outer[0], *own * 3), (outer[1], *size * 3), tuple(edges))
    copied, after = range(1 + n, 1 + 2 * n), range(1 + 2 * n, 1 + 3 * n)
    repeat = Repeat(tuple(copied), {n: 2 * n}, frozenset(after), count)
    return RepeatedProblem.of_one(numbers, (repeat,))


@pytest.mark.parametrize("seed", seeds(10, 200))
@pytest.mark.parametrize("make", [random_repeated, equal_blocks])
def test_the_optimum_is_between_bound_and_choice(make, seed: int) -> None:  # type: ignore[no-untyped-def]
    problem = make(seed)
    messages = messages_of(problem)
    if messages is None:
        assert make is random_repeated
        return
    written, _ = unroll(problem)
    for weights in WEIGHTS:
        bound, point = messages.at(weights)
        wanted = least(written, weights)
        assert bound <= wanted * (1 + 1e-9), (bound, wanted)
        if math.isinf(wanted):
            assert math.isinf(point.totals.cost_s)
        else:
            assert wanted <= weighed(point.totals, weights) * (1 + 1e-9)


def test_messages_find_and_prove_most_optima() -> None:
    gaps = []
    for seed in range(60):
        messages = messages_of(equal_blocks(seed))
        assert messages is not None
        bound, point = messages.at(Weights())
        if math.isfinite(bound):
            gaps.append(1 - bound / point.totals.cost_s)
    assert len(gaps) > 30
    assert sum(gap < 1e-9 for gap in gaps) > 0.9 * len(gaps)
