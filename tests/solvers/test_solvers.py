"""Every solver against all choices, enumerated, on small problems; properties on larger ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pulp
import pytest

from autopar.errors import OptionError
from autopar.passes.solvers.choice import (
    Solver,
    WorkLimit,
    conflict,
    most_columns,
    solve,
    solve_ilp,
)
from autopar.passes.solvers.eliminate import (
    TableLimits,
    TooWide,
    min_marginals,
    minimise,
    plan_elimination,
)
from autopar.passes.solvers.problem import (
    ChoiceProblem,
    Edge,
    Infeasible,
    Potentials,
    ProblemError,
    Solution,
    TimeLimitError,
    Weights,
)
from autopar.passes.solvers.problem.problem import merged
from tests.helpers.problems import (
    REL,
    chain_with_residuals,
    check_same,
    clique,
    random_problem,
    seeds,
    solve_brute_force,
    solve_by_elimination,
    solved,
)

# Tables of a few entries: every graph with a cycle is too wide.
TINY = TableLimits(table_entries=16)
NO_TABLES = TableLimits(table_entries=0)


@pytest.mark.parametrize("seed", seeds(60, 240))
def test_every_solver_finds_the_optimum(seed: int) -> None:
    """Also where tables are too wide, so that messages or the ILP are needed."""
    problem = random_problem(seed)
    for found in (
        solve(problem),
        solve(problem, limits=TINY),
        solve(problem, limits=NO_TABLES),
        solve(problem, "ilp"),
    ):
        check_same(problem, found)
    unlimited = replace(problem, budget_bytes=None)
    check_same(unlimited, solve_by_elimination(unlimited))


def test_too_wide_is_raised_and_then_solved_by_messages_and_the_ilp() -> None:
    for seed in range(4):
        problem = clique(7, 3, seed)
        with pytest.raises(TooWide, match="hint"):
            solve_by_elimination(problem, TINY)
        check_same(problem, solve(problem, limits=TINY))


def test_min_marginals_are_the_least_totals_with_each_choice() -> None:
    problems = [replace(random_problem(s), budget_bytes=None) for s in range(30)]
    for problem in (p.merged() for p in [*problems, clique(6, 4, seed=2)]):
        potentials = Potentials.of(problem, Weights())
        marginals = min_marginals(plan_elimination(problem), potentials)
        for v, marginal in enumerate(marginals):
            for k, least in enumerate(marginal):
                only_k = [np.where(np.arange(len(c)) == k, c, np.inf) for c in problem.cost_s]
                costs = [only_k[w] if w == v else c for w, c in enumerate(problem.cost_s)]
                found = solve_brute_force(replace(problem, cost_s=tuple(costs)))
                expected = found.totals.cost_s if isinstance(found, Solution) else math.inf
                assert least == pytest.approx(expected, rel=1e-12, abs=1e-18)


def test_elimination_in_blocks_is_elimination() -> None:
    problem = clique(4, 30, seed=3)  # one joint table of 810,000 entries
    value, choice = minimise(plan_elimination(problem), Potentials.of(problem, Weights()))
    check_same(problem, solve(problem))
    assert value == pytest.approx(problem.evaluate(choice).cost_s, rel=1e-12)


@pytest.mark.parametrize("share", [None, 0.9, 0.6])
def test_auto_agrees_with_the_whole_ilp_on_a_larger_graph(share: float | None) -> None:
    problem = chain_with_residuals(30, 10, seed=4)
    if share is not None:
        problem = replace(problem, budget_bytes=share * solved(solve(problem)).totals.bytes)
    auto, whole = solved(solve(problem)), solved(solve(problem, "ilp"))
    assert auto.totals.cost_s == pytest.approx(whole.totals.cost_s, rel=REL, abs=0)
    assert auto.gap == whole.gap == 0


def test_parallel_edges_are_summed_once_by_what_they_tell_apart() -> None:
    rng = np.random.default_rng(0)
    codes = np.array([0, 0, 1, 1, 2, 2]), np.array([0, 0, 0, 1, 1, 1])
    tables = rng.random((3, 4)), rng.random((2, 4))
    every = [
        Edge(u, u + 1, table, rows=of)
        for u in (0, 2)
        for table, of in zip(tables, codes, strict=True)
    ]
    # The last from its other end, as edges may be.
    first, second = merged([*every[:-1], every[-1].turned()])
    assert (first.u, first.v, second.u, second.v) == (0, 1, 2, 3)
    expected = tables[0][codes[0]] + tables[1][codes[1]]
    for edge in (first, second):
        np.testing.assert_array_equal(edge.dense(edge.cost_s), expected)
        assert edge.cost_s.shape == (4, 4), "six choices, of which four are told apart"
        assert edge.columns is None
    assert first.cost_s is second.cost_s


def two_variables(budget_bytes: float | None = None) -> ChoiceProblem:
    """Choice 0 and 1 of `a` cost the same; `b` has one choice; choice 2 of `a` costs more."""
    return ChoiceProblem(
        names=("a", "b"),
        cost_s=(np.array([1.0, 1.0, 1.1]), np.array([0.0])),
        bytes=(np.array([30.0, 20.0, 10.0]), np.array([5.0])),
        edges=(Edge(1, 0, np.full((1, 3), 0.5)),),
        budget_bytes=budget_bytes,
    )


@pytest.mark.parametrize("solver", ["auto", "ilp"])
@pytest.mark.parametrize(("budget_bytes", "expected"), [(None, (0, 1)), (25.0, (1,)), (24.0, (2,))])
def test_the_cheapest_that_fits(
    solver: Solver, budget_bytes: float | None, expected: Sequence[int]
) -> None:
    found = solved(solve(two_variables(budget_bytes), solver))
    assert found.choice[0] in expected


@pytest.mark.parametrize("scale", [0.0, 1e-12, 1e-3, 1e9])
def test_optima_at_every_scale_of_cost(scale: float) -> None:
    for seed in range(10):
        problem = random_problem(seed)
        scaled = replace(
            problem,
            cost_s=tuple(_scaled(c, scale) for c in problem.cost_s),
            edges=tuple(replace(e, cost_s=_scaled(e.cost_s, scale)) for e in problem.edges),
        )
        check_same(scaled, solve(scaled))
        check_same(scaled, solve(scaled, "ilp"))


def _scaled(cost: np.ndarray, scale: float) -> np.ndarray:
    return np.where(np.isfinite(cost), np.where(np.isfinite(cost), cost, 0.0) * scale, np.inf)


@pytest.mark.parametrize("solver", ["auto", "ilp"])
def test_infeasible_says_the_least_bytes(solver: str) -> None:
    too_small = solve(two_variables(14.0), solver)  # type: ignore[arg-type]
    assert too_small == Infeasible("the leanest choice needs 15 bytes, the budget is 14.0", 15.0)
    problem = two_variables()
    edge = replace(problem.edges[0], cost_s=np.full((1, 3), np.inf))
    forbidden = solve(replace(problem, edges=(edge,)), solver)  # type: ignore[arg-type]
    assert forbidden == Infeasible("forbidden choices and pairs rule out every choice", None)


def test_a_conflict_names_the_variable_without_choices_and_what_takes_them() -> None:
    """first - middle - last: of middle's choices first allows 0, last allows 1; other has none of
    it. A conflict of more than pairs (no two-colouring of a triangle) is not named."""
    zeros, names = np.zeros(2), ("first", "middle", "last", "other")
    only = {0: np.array([[0.0, np.inf]] * 2), 1: np.array([[np.inf, 0.0]] * 2)}
    edges = Edge(0, 1, only[0]), Edge(2, 1, only[1]), Edge(1, 3, np.zeros((2, 2)))
    problem = ChoiceProblem(names, (zeros,) * 4, (zeros,) * 4, edges)
    assert conflict(problem) == ("middle", "first", "last")
    assert conflict(replace(problem, edges=edges[1:])) == ()
    unlike = np.diag([np.inf, np.inf])
    triangle = tuple(Edge(a, b, unlike) for a, b in ((0, 1), (1, 2), (0, 2)))
    problem = ChoiceProblem(names[:3], (zeros,) * 3, (zeros,) * 3, triangle)
    assert conflict(problem) == () and isinstance(solve(problem), Infeasible)


def test_a_problem_without_variables_costs_nothing() -> None:
    empty = ChoiceProblem((), (), ())
    for found in map(solved, (solve(empty), solve(empty, "ilp"), solve_brute_force(empty))):
        assert found.choice == () and found.totals.cost_s == 0


# -- limits of time and work -----------------------------------------------------------------------


def stop_at_once(patch: pytest.MonkeyPatch, choice: int | None) -> None:
    """The trap: at a limit PuLP's `status` says Optimal. HiGHS knows no bound above 0 then, and an
    infinite objective if there is no choice."""
    objective = math.inf if choice is None else 0.0

    def stopped(program: pulp.LpProblem, solver: object) -> int:
        program.solverModel = SimpleNamespace(
            getInfo=lambda: SimpleNamespace(objective_function_value=objective, mip_dual_bound=0.0)
        )
        for variable in program.variables():
            if choice is not None:
                variable.varValue = float(variable.name.endswith(f"_{choice}"))
        program.assignStatus(pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible)
        return pulp.LpStatusOptimal

    patch.setattr(pulp.LpProblem, "solve", stopped)


def test_out_of_time_keeps_the_best_choice_and_its_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = chain_with_residuals(20, 6, seed=6)
    optimum = solved(solve(problem))
    stop_at_once(monkeypatch, 0)
    found = solved(solve(problem, "ilp", time_limit_s=10.0))
    assert found.choice == (0,) * 20 and found.gap == 1.0 and found.bound_s == 0.0
    assert found.totals.cost_s >= optimum.totals.cost_s
    limited = replace(problem, budget_bytes=0.85 * optimum.totals.bytes)
    from_lagrangian = solved(solve(limited, time_limit_s=10.0))
    assert from_lagrangian.totals.cost_s <= found.totals.cost_s and from_lagrangian.gap < 0.1
    assert from_lagrangian.bound_s >= optimum.totals.cost_s * (1 - REL)


def test_out_of_time_with_nothing_found_is_an_error() -> None:
    with pytest.raises(TimeLimitError, match="hint: raise time_limit_s"):
        solve(chain_with_residuals(20, 6, seed=7), "ilp", time_limit_s=0.0)


def test_out_of_work_with_nothing_found_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    stop_at_once(monkeypatch, None)
    with pytest.raises(TimeLimitError, match="found no feasible choice in 3 nodes"):
        solve_ilp(chain_with_residuals(16, 6, 0), work_limit=WorkLimit(None, 3))


@pytest.mark.parametrize("seed", range(2))
def test_what_a_work_limit_leaves_is_in_the_gap(seed: int) -> None:
    """A budget of a share of what the optimum needs."""
    problem = chain_with_residuals(16, 6, seed)
    problem = replace(problem, budget_bytes=0.8 * solved(solve(problem)).totals.bytes)
    best = solved(solve(problem, "ilp"))
    assert best.gap == 0
    for work_limit in (WorkLimit(0, 1), WorkLimit(None, 1), WorkLimit(None, 10**6)):
        found = solved(solve(problem, work_limit=work_limit))
        assert found == solve(problem, work_limit=work_limit)
        assert found.totals.cost_s >= best.totals.cost_s * (1 - REL)
        assert found.bound_s <= best.totals.cost_s * (1 + REL)
        if work_limit.n_nodes > 1:
            assert found.gap == 0
            assert found.totals.cost_s == pytest.approx(best.totals.cost_s, rel=REL)


def test_programs_with_many_columns_are_not_solved() -> None:
    problem = chain_with_residuals(16, 6, 0)
    assert most_columns(problem.sizes, [e.cost_s.shape for e in problem.edges]) > 10
    with pytest.raises(TimeLimitError):
        solve_ilp(problem, work_limit=WorkLimit(10, 10**6))


# -- what is refused -------------------------------------------------------------------------------


def test_an_unknown_solver_is_refused() -> None:
    with pytest.raises(OptionError, match="'simplex'"):
        solve(two_variables(), "simplex")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("cost_s", np.array([1.0, np.nan, 1.0]), "NaN or negative"),
        ("cost_s", np.array([1.0, -1.0, 1.0]), "NaN or negative"),
        ("bytes", np.array([0.0, np.inf, 0.0]), "finite"),
        ("bytes", np.array([0.0, -1.0, 0.0]), "finite"),
        ("bytes", np.zeros(2), "shape"),
    ],
)
def test_senseless_numbers_are_refused(field: str, value: np.ndarray, message: str) -> None:
    problem = two_variables()
    with pytest.raises(ProblemError, match=message):
        replace(problem, **{field: (value, getattr(problem, field)[1])})  # type: ignore[arg-type]


def test_edges_must_join_two_variables() -> None:
    problem = two_variables()
    with pytest.raises(ProblemError, match="must join two"):
        replace(problem, edges=(Edge(0, 0, np.zeros((3, 3))),))
