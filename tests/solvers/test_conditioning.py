"""Branch and bound over hubs finds the optimum of elimination, with small tables."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from autopar.passes.solvers.choice import WorkLimit, solve
from autopar.passes.solvers.eliminate import (
    ConditionedPlan,
    TableLimits,
    TooWide,
    conditioning,
    minimise_conditioned,
    plan_conditioned,
    plan_elimination,
)
from autopar.passes.solvers.problem import ChoiceProblem, Edge, Potentials, Weights, axes_of
from autopar.passes.solvers.repeats import RepeatedProblem
from autopar.passes.solvers.repeats import order as repeats_plan
from autopar.passes.solvers.repeats.elimination import RepeatedElimination
from tests.helpers.nightly import nightly
from tests.helpers.problems import (
    REL,
    WEIGHTS,
    check_same,
    clique,
    least,
    random_problem,
    random_repeated,
    solved,
    weighed,
)


@pytest.fixture(autouse=True)
def small_tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Limits so low that the core and its hubs are not empty."""
    conditioning._planned.cache_clear()
    for module in (conditioning, repeats_plan):
        monkeypatch.setattr(module, "FIRST_ENTRIES", 8)
    monkeypatch.setattr(conditioning, "CORE_ENTRIES", 6)
    yield
    conditioning._planned.cache_clear()


def conditioned(problem: ChoiceProblem, limits: TableLimits | None = None) -> ConditionedPlan:
    return plan_conditioned(problem.sizes, axes_of(problem.edges), limits=limits)


def chain_with_hubs(seed: int, n: int = 8, k: int = 4, n_hubs: int = 3) -> ChoiceProblem:
    """A chain whose variables all have an edge to every hub, sometimes by classes of choices."""
    rng = np.random.default_rng(seed)
    edges = []

    def join(u: int, v: int, strength: float) -> None:
        rows = rng.integers(0, k, 2 * k) if v < n_hubs else None
        if rows is not None:
            rows[:k] = np.arange(k)
        cost = rng.random((k, k)) * strength
        cost[rng.random((k, k)) < 0.1] = np.inf
        edges.append(Edge(u, v, cost, rng.random((k, k)), None, rows))

    for v in range(n_hubs, n_hubs + n):
        if v > n_hubs:
            join(v - 1, v, 1.0)
        for h in range(n_hubs):
            join(v, h, 0.3)
    sizes = [2 * k] * n_hubs + [k] * n
    cost = [rng.random(s) for s in sizes]
    names = tuple(f"v{i}" for i in range(len(sizes)))
    return ChoiceProblem(names, tuple(cost), tuple(cost), tuple(edges))


@nightly
def test_the_optimum_is_that_of_elimination() -> None:
    n_hubs = 0
    problems = [random_problem(seed) for seed in range(80)]
    problems += [chain_with_hubs(seed) for seed in range(20)]
    for i, problem in enumerate(problems):
        problem = replace(problem, budget_bytes=None).merged()
        plan = conditioned(problem)
        n_hubs += len(plan.hubs)
        for weights in (Weights(), Weights(size=0.3)):
            wanted = least(problem, weights)
            value, choice = minimise_conditioned(plan, Potentials.of(problem, weights))
            assert value == pytest.approx(wanted, rel=REL, abs=1e-15), i
            if math.isfinite(wanted):
                summed = weighed(problem.evaluate(choice), weights)
                assert summed == pytest.approx(wanted, rel=REL, abs=1e-15), i
    assert n_hubs > 60


def test_tables_without_hubs_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditioning, "CORE_ENTRIES", 4**2)
    problem = chain_with_hubs(0)
    plan = conditioned(problem)
    assert set(plan.hubs) == {0, 1, 2}
    assert plan_elimination(problem).largest >= 4**5
    assert max(plan.first.largest, plan.core.largest) <= 4**3
    with pytest.raises(TooWide, match="beside 3 hubs"):
        conditioned(problem, TableLimits(table_entries=2))


@pytest.mark.parametrize("is_too_wide", [False, True])
def test_a_problem_that_messages_leave_open(
    is_too_wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hubs are tried, unless they have too many values; the ILP may not work."""
    if is_too_wide:
        monkeypatch.setattr(conditioning, "MOST_ENTRIES", 1)
    limits, n_open = TableLimits(table_entries=3**4), 0
    for seed in range(6):
        problem = clique(6, 3, seed)
        with pytest.raises(TooWide):
            plan_elimination(problem, limits)
        assert conditioned(problem, limits).hubs
        found = solved(solve(problem, limits=limits, work_limit=WorkLimit(0, 1)))
        n_open += found.gap > 0
        if not is_too_wide:
            check_same(problem, found)
    assert (n_open > 0) == is_too_wide


def test_repeated_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with longer runs, where powers of tables are computed per branch."""
    n_conditioned = 0
    for seed in range(30):
        problem = random_repeated(seed)
        for count in (None, 9):
            repeats = tuple(replace(r, count=count or r.count) for r in problem.repeats)
            problem = RepeatedProblem.alone(problem.numbers, repeats)
            with monkeypatch.context() as patch:
                patch.setattr(repeats_plan, "FIRST_ENTRIES", 2**30)
                plain = RepeatedElimination.of(problem)
            conditioned = RepeatedElimination.of(problem)
            plan = conditioned.plan.plan
            n_conditioned += isinstance(plan, ConditionedPlan) and bool(plan.hubs)
            for weights in WEIGHTS:
                wanted, _ = plain.at(weights)
                value, point = conditioned.at(weights)
                assert value == pytest.approx(wanted, rel=REL, abs=1e-15), seed
                if math.isfinite(value):
                    assert weighed(point.totals, weights) == pytest.approx(
                        value, rel=REL, abs=1e-15
                    )
    assert n_conditioned > 5
