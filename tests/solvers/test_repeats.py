"""Problems with repeated blocks have the optimum of the problem written out, at any weights."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from autopar.passes.solvers.choice import most_columns, solve
from autopar.passes.solvers.eliminate import TableLimits, TooWide
from autopar.passes.solvers.problem import (
    Choice,
    ChoiceProblem,
    Edge,
    Infeasible,
    ProblemError,
    Weights,
)
from autopar.passes.solvers.repeats import Repeat, RepeatedChoice, RepeatedPlan, RepeatedProblem
from autopar.passes.solvers.repeats.elimination import RepeatedElimination
from autopar.passes.solvers.repeats.powers import Power
from tests.helpers.problems import (
    REL,
    WEIGHTS,
    least,
    random_repeated,
    repeated_solver,
    seeds,
    unroll,
    weighed,
)


def written_out(problem: RepeatedProblem, choice: RepeatedChoice) -> Choice:
    """A choice in the numbering of `unroll(problem)`."""
    out = [(k,) for k in choice.base]
    for repeat, rows in zip(problem.repeats, choice.copies, strict=True):
        for v, column in zip(repeat.block, zip(*rows, strict=True), strict=True):
            out[v] = column
    return tuple(itertools.chain.from_iterable(out))


@pytest.mark.parametrize("seed", seeds(60, 200))
def test_the_optimum_is_that_of_the_problem_written_out(seed: int) -> None:
    problem = random_repeated(seed)
    written, where = unroll(problem)
    assert written.n_variables == sum(map(len, where))
    tables = [e.cost_s.shape for e in written.edges]
    assert problem.every.unrolled_size(most_columns) == most_columns(written.sizes, tables)
    elimination = RepeatedElimination(problem, RepeatedPlan(problem.every))
    for weights in WEIGHTS:
        value, point = elimination.at(weights)
        expected = least(written, weights)
        assert value == pytest.approx(expected, rel=REL, abs=1e-15)
        if math.isinf(value):
            continue
        flat = written.evaluate(written_out(problem, point.choice))
        assert point.totals.bytes == flat.bytes
        assert point.totals.cost_s == pytest.approx(flat.cost_s, rel=REL)
        assert weighed(flat, weights) == pytest.approx(value, rel=REL, abs=1e-15)


def test_many_copies() -> None:
    n_feasible = 0
    for seed in range(12):
        problem = random_repeated(seed)
        many = tuple(replace(repeat, count=40 + seed) for repeat in problem.repeats)
        longer = RepeatedProblem.of_one(problem.numbers, many)
        value, point = RepeatedElimination(longer, RepeatedPlan(longer.every)).at(Weights())
        assert value == pytest.approx(least(unroll(longer)[0], Weights()), rel=REL, abs=1e-15)
        if math.isfinite(value):
            n_feasible += 1
            assert [len(rows) for rows in point.choice.copies] == [40 + seed] * len(many)
    assert n_feasible > 3


@pytest.mark.parametrize("n", [1, 2, 3, 6, 7, 80])
def test_powers(n: int) -> None:
    rng = np.random.default_rng(n)
    table = rng.integers(0, 9, (2, 5, 5)).astype(float)
    table[rng.random(table.shape) < 0.3] = np.inf
    wanted = np.where(np.eye(5, dtype=bool), 0.0, np.inf)[None].repeat(2, axis=0)
    for _ in range(n):
        wanted = (wanted[:, :, :, None] + table[:, None]).min(axis=2)
    power = Power.of(table, n)
    assert np.array_equal(power.table, wanted)
    for case, start, end in np.ndindex(2, 5, 5):
        if math.isinf(wanted[case, start, end]):
            continue
        path = power.path(case, start, end)
        assert len(path) == n + 1 and (path[0], path[-1]) == (start, end)
        steps = [table[case, a, b] for a, b in itertools.pairwise(path)]
        assert sum(steps) == wanted[case, start, end]


def chain(*edges: tuple[int, int]) -> ChoiceProblem:
    two = np.zeros(2)
    made = tuple(Edge(u, v, np.zeros((2, 2))) for u, v in edges)
    return ChoiceProblem(("a", "b", "c"), (two,) * 3, (two,) * 3, made)


def test_blocks_that_are_joined_otherwise_are_refused() -> None:
    with pytest.raises(ProblemError, match="cannot be joined"):
        RepeatedProblem.of_one(chain((0, 1), (1, 2)), (Repeat((1,), {}, frozenset({2}), 2),))
    with pytest.raises(ProblemError, match="cannot be the like"):
        RepeatedProblem.of_one(chain((0, 1)), (Repeat((1,), {0: 2}, frozenset(), 2),))
    with pytest.raises(ProblemError, match="two repeated blocks"):
        RepeatedProblem.of_one(chain(), (Repeat((1,), {}, frozenset(), 2),) * 2)
    joined = (Repeat((1,), {}, frozenset(), 2), Repeat((2,), {}, frozenset(), 2))
    with pytest.raises(ProblemError, match="cannot be joined"):
        RepeatedProblem.of_one(chain((1, 2)), joined)


def test_blocks_that_hand_on_too_much_are_refused() -> None:
    problem = random_repeated(3)
    with pytest.raises(TooWide):
        RepeatedPlan(problem.every, TableLimits(table_entries=1))


def test_under_a_budget() -> None:
    """The optimum of the problem written out lies within the gap."""
    for seed in range(60):
        problem = random_repeated(seed)
        written, _ = unroll(problem)
        budget_bytes = float(np.random.default_rng(seed).integers(0, 4 * written.n_variables))
        found = repeated_solver(problem).solve(budget_bytes)
        wanted = solve(replace(written, budget_bytes=budget_bytes))
        if isinstance(wanted, Infeasible):
            assert isinstance(found, Infeasible)
            assert found.min_bytes == wanted.min_bytes
            continue
        assert not isinstance(found, Infeasible)
        flat = written.evaluate(written_out(problem, found.choice))
        assert flat.bytes == found.totals.bytes <= budget_bytes
        assert flat.cost_s == pytest.approx(found.totals.cost_s, rel=REL)
        low = found.totals.cost_s * (1 - found.gap) * (1 - REL)
        assert low <= wanted.totals.cost_s <= found.totals.cost_s * (1 + REL)
