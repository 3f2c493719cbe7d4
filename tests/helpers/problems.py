"""Problems for the solvers: random ones, and graphs like those of models; no torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autopar.arrays import Array
from autopar.passes.solvers.eliminate import TableLimits, minimise, plan_elimination, plan_order
from autopar.passes.solvers.problem import (
    BUDGET_REL,
    FORBIDDEN,
    Choice,
    ChoiceProblem,
    ChoiceTotals,
    Edge,
    Infeasible,
    Potentials,
    Solution,
    Weights,
    axes_of,
    infeasible_budget,
    make_solution,
    within,
)
from autopar.passes.solvers.repeats import (
    Repeat,
    RepeatedProblem,
    RepeatedSolver,
    quick_plan,
)
from tests.helpers.nightly import nightly

REL = 1e-9
WEIGHTS = (Weights(), Weights(1.0, 2e-4), Weights(0.0, 1.0))


def seeds(n_by_day: int, n: int) -> list[Any]:
    """Parameters of a test: the first seeds in ordinary runs, the rest of `n` at night."""
    return [*range(n_by_day), *(pytest.param(s, marks=nightly) for s in range(n_by_day, n))]


def weighed(totals: ChoiceTotals, weights: Weights) -> float:
    return weights.cost * totals.cost_s + weights.size * totals.bytes


def least(problem: ChoiceProblem, weights: Weights) -> float:
    """The optimum, by plain elimination of all variables."""
    merged = problem.merged()
    plan = plan_order(merged.sizes, axes_of(merged.edges))
    return minimise(plan, Potentials.of(merged, weights))[0]


def solve_brute_force(problem: ChoiceProblem) -> Solution[Choice] | Infeasible:
    """The optimum over all combinations: the definition that solvers are tested against. Of equal
    ones that of the smallest indices."""
    assert math.prod(problem.sizes) <= 2**22, "too many to enumerate"
    cost, size = np.zeros(problem.sizes), np.zeros(problem.sizes)

    def add(costs: Array, sizes: Array, *variables: int) -> None:
        """Arrays whose axes are these variables."""
        shape = [k if v in variables else 1 for v, k in enumerate(problem.sizes)]
        for total, array in ((cost, costs), (size, sizes)):
            total += (array if [*variables] == sorted(variables) else array.T).reshape(shape)

    for v in range(problem.n_variables):
        add(problem.cost_s[v], problem.bytes[v], v)
    for e in problem.edges:
        add(e.dense(e.cost_s), e.dense(e.bytes_or_zero()), e.u, e.v)
    possible = np.isfinite(cost)
    if not possible.any():
        return FORBIDDEN
    if problem.budget_bytes is not None:
        min_bytes = float(size[possible].min())
        if not within(problem.budget_bytes, min_bytes):
            return infeasible_budget(problem.budget_bytes, min_bytes)
        cost[size > problem.budget_bytes * (1 + BUDGET_REL)] = math.inf
    choice = [int(k) for k in np.unravel_index(int(cost.argmin()), problem.sizes)]
    return make_solution(problem, choice, None)


def solve_by_elimination(
    problem: ChoiceProblem, limits: TableLimits | None = None
) -> Solution[Choice] | Infeasible:
    """Elimination alone, whatever the budget."""
    merged = problem.merged()
    value, choice = minimise(plan_elimination(merged, limits), Potentials.of(merged, Weights()))
    return FORBIDDEN if math.isinf(value) else make_solution(problem, choice, None)


def repeated_solver(problem: RepeatedProblem) -> RepeatedSolver:
    plan = quick_plan(problem.every)
    assert plan is not None
    return RepeatedSolver(problem, plan)


def unroll(problem: RepeatedProblem) -> tuple[ChoiceProblem, list[list[int]]]:
    """(the problem with every copy written out, which defines the optimum of `problem`; per
    variable the indices of its copies there)."""
    numbers, owner = problem.numbers, problem.every.owner
    n_copies = [
        problem.repeats[owner[v]].count if v in owner else 1 for v in range(numbers.n_variables)
    ]
    ends = np.cumsum([0, *n_copies])
    where = [list(range(a, b)) for a, b in itertools.pairwise(ends)]
    origin = [v for v, copies in enumerate(where) for _ in copies]

    def at_copy(v: int, k: int, repeat: Repeat) -> int:
        """The written-out variable that stands for v where copy k is joined to it."""
        if v in repeat.block:
            return where[v][k]
        if v in repeat.counterpart and k > 0:
            return where[repeat.counterpart[v]][k - 1]
        return where[v][0]

    def written_pairs(edge: Edge) -> Iterator[tuple[int, int]]:
        """The pairs of written-out variables that an edge joins."""
        r = owner.get(edge.u, owner.get(edge.v))
        if r is None:
            yield where[edge.u][0], where[edge.v][0]
            return
        repeat = problem.repeats[r]
        for k in range(repeat.count):
            if not edge.is_of(repeat.after) or k + 1 == repeat.count:
                yield at_copy(edge.u, k, repeat), at_copy(edge.v, k, repeat)

    written = ChoiceProblem(
        tuple(f"{numbers.names[v]} {i}" for i, v in enumerate(origin)),
        tuple(numbers.cost_s[v] for v in origin),
        tuple(numbers.bytes[v] for v in origin),
        tuple(replace(edge, u=u, v=v) for edge in numbers.edges for u, v in written_pairs(edge)),
    )
    return written, where


def random_problem(seed: int, n_max: int = 6, k_max: int = 4) -> ChoiceProblem:
    """Whole, random and zero costs, each 0-30% forbidden; parallel edges, bytes on edges."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, n_max + 1))
    sizes = rng.integers(1, k_max + 1, n)

    def cost(*shape: int) -> np.ndarray:
        whole = rng.integers(0, 6, shape).astype(float)
        out = (whole, rng.random(shape), np.zeros(shape))[rng.integers(0, 3)] * 1e-3
        out[rng.random(shape) < rng.choice([0.0, 0.1, 0.3])] = np.inf
        return out

    def few(*shape: int) -> np.ndarray:
        return rng.integers(0, 4, shape).astype(float)

    edges = []
    for _ in range(int(rng.integers(0, 2 * n)) if n > 1 else 0):
        u, v = (int(w) for w in rng.choice(n, 2, replace=False))
        shape = (int(sizes[u]), int(sizes[v]))
        size = few(*shape) if rng.random() < 0.5 else None
        edges.append(Edge(u, v, cost(*shape), size))
    return ChoiceProblem(
        names=tuple(f"v{i}" for i in range(n)),
        cost_s=tuple(cost(k) for k in sizes),
        bytes=tuple(few(k) for k in sizes),
        edges=tuple(edges),
        budget_bytes=None if rng.random() < 0.4 else float(rng.integers(0, 3 * n + 2)),
    )


def chain_with_residuals(n: int, k: int, seed: int) -> ChoiceProblem:
    """A graph like a transformer's: reshards between few specs, and residual edges over four."""
    rng = np.random.default_rng(seed)
    n_specs = 6
    reshard = rng.integers(1, 9, (n_specs, n_specs)) * 1e-4
    np.fill_diagonal(reshard, 0.0)
    out_spec = rng.integers(0, n_specs, (n, k))
    edges = []
    for v in range(1, n):
        for u in (v - 1, v - 4) if v % 4 == 0 else (v - 1,):
            table = reshard[np.ix_(out_spec[u], rng.integers(0, n_specs, k))]
            edges.append(Edge(u, v, table))
    return ChoiceProblem(
        names=tuple(f"v{i}" for i in range(n)),
        cost_s=tuple(rng.integers(1, 9, k).astype(float) * 1e-3 for _ in range(n)),
        bytes=tuple(rng.integers(1, 20, k).astype(float) * 1e8 for _ in range(n)),
        edges=tuple(edges),
    )


def clique(n: int, k: int, seed: int) -> ChoiceProblem:
    """Every pair has an edge: as wide as a graph gets."""
    rng = np.random.default_rng(seed)
    pairs = itertools.combinations(range(n), 2)
    return ChoiceProblem(
        names=tuple(f"v{i}" for i in range(n)),
        cost_s=tuple(rng.random(k) for _ in range(n)),
        bytes=tuple(np.zeros(k) for _ in range(n)),
        edges=tuple(Edge(u, v, rng.random((k, k))) for u, v in pairs),
    )


def check_same(problem: ChoiceProblem, found: Solution[Choice] | Infeasible) -> None:
    """`found` is as cheap as the brute-force optimum."""
    expected = solve_brute_force(problem)
    if isinstance(expected, Infeasible):
        assert isinstance(found, Infeasible)
        assert found.min_bytes == expected.min_bytes
        return
    assert isinstance(found, Solution), found
    assert found.totals.cost_s == pytest.approx(expected.totals.cost_s, rel=REL, abs=0)
    assert found.gap == 0 and found.bound_s == found.totals.cost_s
    totals = problem.evaluate(found.choice)
    assert (totals.cost_s, totals.bytes) == (found.totals.cost_s, found.totals.bytes)
    assert within(problem.budget_bytes, found.totals.bytes)


def random_repeated(seed: int) -> RepeatedProblem:
    """One or two repeated blocks, with variables before, after and outside them.

    Whole and zero costs make ties; up to a fifth of all entries are forbidden.
    """
    rng = np.random.default_rng(seed)
    forbidden = rng.choice([0.0, 0.1, 0.2])
    sizes: list[int] = []
    edges: list[Edge] = []
    repeats: list[Repeat] = []

    def cost(*shape: int) -> np.ndarray:
        whole = rng.integers(0, 6, shape).astype(float)
        out = (whole, rng.random(shape), np.zeros(shape))[rng.integers(0, 3)] * 1e-3
        out[rng.random(shape) < forbidden] = np.inf
        return out

    def variables(n: int, like: list[int] | None = None) -> list[int]:
        """`n` new ones; the first are as large as `like`."""
        wanted = [sizes[u] for u in like or []]
        sizes.extend([*wanted, *(int(k) for k in rng.integers(1, 4, n - len(wanted)))])
        return list(range(len(sizes) - n, len(sizes)))

    def join(u: int, v: int) -> None:
        shape = (sizes[u], sizes[v])
        size = rng.integers(0, 4, shape).astype(float) if rng.random() < 0.5 else None
        edges.append(Edge(u, v, cost(*shape), size))

    def some(of: list[int], least: int = 0) -> list[int]:
        n = int(rng.integers(least, len(of) + 1))
        return [int(v) for v in rng.choice(of, n, replace=False)]

    outer = variables(int(rng.integers(0, 3)))
    before = variables(int(rng.integers(1, 3)))
    for _ in range(int(rng.integers(1, 3))):
        ins = some(before, 1)
        block = variables(len(ins) + int(rng.integers(0, 3)), ins)
        like = dict(zip(ins, block, strict=False))
        after = variables(int(rng.integers(1, 3)))
        for u in ins:
            join(u, int(rng.choice(block)))
            join(like[u], int(rng.choice(after)))
        for u, v in itertools.pairwise(block):
            join(u, v)
        for u in some(outer):
            join(u, int(rng.choice(block)))
            join(u, int(rng.choice(after)))
        repeats.append(Repeat(tuple(block), like, frozenset(after), int(rng.integers(1, 6))))
        before = after
    numbers = ChoiceProblem(
        tuple(f"v{i}" for i in range(len(sizes))),
        tuple(cost(k) for k in sizes),
        tuple(rng.integers(0, 4, k).astype(float) for k in sizes),
        tuple(edges),
    )
    return RepeatedProblem.of_one(numbers, tuple(repeats))


def solved(outcome: Solution[Choice] | Infeasible) -> Solution[Choice]:
    assert isinstance(outcome, Solution), outcome
    return outcome
