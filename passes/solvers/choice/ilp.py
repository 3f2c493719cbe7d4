"""The whole choice problem as one integer linear program: the definition of the optimum.

    x[v,k] in {0, 1}                      choice k of variable v           `_Model._add_choices`
    sum_k x[v,k] = 1
    e[r,c] >= 0                           pair of groups of an edge (u,v)  `_Model._add_edge`
    sum_c e[r,c] = sum_{k in r} x[u,k]    for each group r of rows
    sum_r e[r,c] = sum_{k in c} x[v,k]    for each group c of columns
    minimise sum cost x + sum cost e      such that sum bytes x + sum bytes e <= budget

Equal rows of an edge's matrices form one group, and so do equal columns (`_groups`). Reshard
matrices have few distinct ones, which shrinks the program about thirtyfold. The transportation form
is the tightest linearisation of one pair (its vertices are integral). e needs no integrality: a
single e is nonzero once x is integral. A forbidden pair has no e, a forbidden choice no x; no large
constant stands in for infinity.

The program is written with PuLP and solved by HiGHS. Its tolerances are absolute, so costs and
bytes are scaled to about `SCALED_OPTIMUM`. The gap is set to 0. At a time limit PuLP's `status`
says "Optimal" although nothing is proven; `sol_status` is right, and is read here. HiGHS 1.15's
presolve calls some feasible programs with a tight capacity row infeasible, or never returns (HiGHS
issues 3090 and 3296 are of this kind). So programs with a budget are solved without presolve. Of
choices whose costs differ by less than these tolerances, any may be found.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np
import pulp

from autopar.arrays import Array, Codes
from autopar.passes.solvers.choice.reductions import Reduced, drop_forbidden
from autopar.passes.solvers.problem import (
    BUDGET_REL,
    FORBIDDEN,
    Choice,
    ChoiceProblem,
    Edge,
    Infeasible,
    Shape,
    Solution,
    TimeLimitError,
    infeasible_budget,
    make_solution,
    within,
)

SCALED_OPTIMUM = 1e3
# Absolute, on costs near SCALED_OPTIMUM: 1e-12 relative. HiGHS accepts 1e-10 and up.
TOLERANCE = 1e-9
MAX_NODES = 2**31 - 1
MAX_ATTEMPTS = 20
ICM_ROUNDS = 5


@dataclass(frozen=True)
class IlpResult:
    """The result of one run of the solver: a choice or none, and a lower bound on its objective.
    `proven`: the choice is optimal, or, where there is none, the program is infeasible."""

    choice: Choice | None
    bound: float
    proven: bool


@dataclass(frozen=True)
class WorkLimit:
    """A limit on the solver's work that does not depend on the machine. Programs of more than
    `n_columns` columns (None: any number) are not solved. The others stop after `n_nodes` nodes."""

    n_columns: int | None
    n_nodes: int

    @property
    def most_columns(self) -> float:
        return math.inf if self.n_columns is None else self.n_columns


def solve_ilp(
    problem: ChoiceProblem,
    time_limit_s: float | None = None,
    work_limit: WorkLimit | None = None,
) -> Solution[Choice] | Infeasible:
    """Solve the whole problem as one integer linear program.

    Raises `TimeLimitError` when `time_limit_s` passes, or all `work_limit` is spent, before any
    feasible choice is found; a choice found by then is returned with its gap.
    """
    reduced = drop_forbidden(Reduced(problem.merged(), tuple(map(np.arange, problem.sizes))))
    if reduced is None:
        return FORBIDDEN
    result = minimise_cost(reduced.problem, time_limit_s, work_limit)
    if result.choice is None:
        if not result.proven:
            raise TimeLimitError(
                "the ILP found no feasible choice in "
                + (f"{time_limit_s} s" if work_limit is None else f"{work_limit.n_nodes} nodes"),
                hint='raise time_limit_s, or use solver="auto"',
            )
        return _explain(reduced.problem, time_limit_s)
    bound_s = None if result.proven else result.bound
    return make_solution(problem, reduced.lift(result.choice), bound_s)


def minimise_cost(
    problem: ChoiceProblem, time_limit_s: float | None, work_limit: WorkLimit | None = None
) -> IlpResult:
    """The least cost of a merged problem without forbidden choices.

    The program is scaled by the cost of a local optimum. If the optimum is a thousand times
    smaller, it is solved again, scaled by that, so that the tolerances stay relative to the
    optimum.
    """
    scale = _typical_cost(problem)
    deadline = math.inf if time_limit_s is None else time.perf_counter() + time_limit_s
    while True:
        result = _run(problem, "cost", scale, deadline, work_limit)
        if result.choice is None or not result.proven:
            return result
        cost_s = problem.evaluate(result.choice).cost_s
        if cost_s == 0 or cost_s > scale * 1e-3:
            return result
        scale = cost_s


def _explain(problem: ChoiceProblem, time_limit_s: float | None) -> Infeasible:
    """Why nothing is feasible: the least bytes, or forbidden pairs."""
    deadline = math.inf if time_limit_s is None else time.perf_counter() + time_limit_s
    scale = max(sum(float(b.max()) for b in problem.bytes), 1.0)
    result = _run(problem, "bytes", scale, deadline)
    if result.choice is not None and result.proven:
        return infeasible_budget(problem.budget_bytes, problem.evaluate(result.choice).bytes)
    if result.proven:
        return FORBIDDEN
    return Infeasible("no choice fits the budget", None)


def most_columns(sizes: Iterable[int], tables: Iterable[Shape]) -> int:
    """An upper bound on the columns of a program: the choices, and the pairs that edges
    distinguish."""
    return sum(sizes) + sum(map(math.prod, tables))


def _typical_cost(problem: ChoiceProblem) -> float:
    """The cost of a local optimum, in which each variable in turn takes its best choice; 1 if that
    cost is 0 or infinite."""
    around: list[list[tuple[int, Array]]] = [[] for _ in problem.names]
    for e in problem.edges:
        pairs_s = e.dense(e.cost_s)
        around[e.u].append((e.v, pairs_s))
        around[e.v].append((e.u, pairs_s.T))
    choice = [int(c.argmin()) for c in problem.cost_s]
    for _, v in itertools.product(range(ICM_ROUNDS), range(problem.n_variables)):
        costs = problem.cost_s[v] + sum((t[:, choice[w]] for w, t in around[v]), 0.0)
        choice[v] = int(costs.argmin())
    cost_s = problem.evaluate(choice).cost_s
    return cost_s if math.isfinite(cost_s) and cost_s > 0 else 1.0


def _run(
    problem: ChoiceProblem,
    objective: str,
    scale: float,
    deadline: float,
    work_limit: WorkLimit | None = None,
) -> IlpResult:
    """Build, solve, and check the answer in exact sums.

    A solver's tolerance may let a choice exceed the budget slightly. Such a choice is cut off, and
    the program is solved again.
    """
    work_limit = work_limit or WorkLimit(None, MAX_NODES)
    too_large = IlpResult(None, 0.0, False)
    n_columns = most_columns(problem.sizes, (e.cost_s.shape for e in problem.edges))
    if n_columns > work_limit.most_columns:
        return too_large
    model = _Model(problem, objective, scale)
    if model.n_columns > work_limit.most_columns:
        return too_large
    for _ in range(MAX_ATTEMPTS):
        result = model.solve(deadline - time.perf_counter(), work_limit.n_nodes)
        if result.choice is None:
            return result
        size_bytes = problem.evaluate(result.choice).bytes
        if objective == "bytes" or within(problem.budget_bytes, size_bytes):
            return result
        model.exclude(result.choice)
    return IlpResult(None, result.bound, False)


class _Model:
    """One PuLP program; `objective` is "cost" or "bytes"."""

    def __init__(self, problem: ChoiceProblem, objective: str, scale: float) -> None:
        self.problem = problem
        self.objective_factor = SCALED_OPTIMUM / scale
        self.program = pulp.LpProblem("choices", pulp.LpMinimize)
        self.columns: dict[str, list[tuple[Any, float]]] = {"cost": [], "bytes": []}
        self.n_columns = 0
        self.has_limit = False
        self.x = [self._add_choices(v) for v in range(problem.n_variables)]
        for i, e in enumerate(problem.edges):
            self._add_edge(i, e)
        self.program.setObjective(self._sum(objective, self.objective_factor))
        if problem.budget_bytes is not None and objective != "bytes":
            self.has_limit = True
            factor = SCALED_OPTIMUM / max(problem.budget_bytes, 1.0)
            limit = problem.budget_bytes * factor * (1 + BUDGET_REL)
            self.program += self._sum("bytes", factor) <= limit

    def _sum(self, what: str, factor: float) -> Any:
        return pulp.LpAffineExpression([(x, c * factor) for x, c in self.columns[what]])

    def _column(self, name: str, binary: bool, cost: float, size: float) -> Any:
        category = pulp.LpBinary if binary else pulp.LpContinuous
        column = self.program.add_variable(name, 0, 1 if binary else None, category)
        self.n_columns += 1
        for what, value in (("cost", cost), ("bytes", size)):
            if value != 0:
                self.columns[what].append((column, value))
        return column

    def _add_choices(self, v: int) -> list[Any]:
        problem = self.problem
        rows = zip(problem.cost_s[v], problem.bytes[v], strict=True)
        x = [self._column(f"x_{v}_{k}", True, float(c), float(b)) for k, (c, b) in enumerate(rows)]
        self.program += pulp.lpSum(x) == 1
        return x

    def _add_edge(self, i: int, edge: Edge) -> None:
        tables = [edge.cost_s, edge.bytes_or_zero()]
        rows, row_of = _groups(tables, edge.rows)
        columns, column_of = _groups([t.T for t in tables], edge.columns)
        at_row: list[list[Any]] = [[] for _ in rows]
        at_column: list[list[Any]] = [[] for _ in columns]
        for (r, j), (c, k) in itertools.product(enumerate(rows), enumerate(columns)):
            cost = float(edge.cost_s[j, k])
            if math.isinf(cost):
                continue
            size = float(edge.bytes_or_zero()[j, k])
            pair = self._column(f"e_{i}_{r}_{c}", False, cost, size)
            at_row[r].append(pair)
            at_column[c].append(pair)
        ends = ((edge.u, at_row, row_of), (edge.v, at_column, column_of))
        for variable, at, group_of in ends:
            for g, pairs in enumerate(at):
                members = [x for x, h in zip(self.x[variable], group_of, strict=True) if h == g]
                terms = [(p, 1.0) for p in pairs] + [(x, -1.0) for x in members]
                self.program += pulp.LpAffineExpression(terms) == 0

    def exclude(self, choice: Choice) -> None:
        """Cut off one choice and nothing else."""
        taken = [x[k] for x, k in zip(self.x, choice, strict=True)]
        self.program += pulp.lpSum(taken) <= len(taken) - 1

    def solve(self, time_limit_s: float, n_nodes: int = MAX_NODES) -> IlpResult:
        if time_limit_s <= 0:
            return IlpResult(None, 0.0, False)
        self.program.solve(_solver(time_limit_s, not self.has_limit, n_nodes))
        status = self.program.sol_status
        if status == pulp.LpSolutionIntegerFeasible and math.isinf(self._bounds()[0]):
            status = pulp.LpSolutionNoSolutionFound  # stopped at the node limit, without a choice
        if status in (pulp.LpSolutionInfeasible, pulp.LpSolutionUnbounded):
            return IlpResult(None, math.inf, True)
        if status == pulp.LpSolutionNoSolutionFound:
            return IlpResult(None, max(self._bounds()[1], 0.0) / self.objective_factor, False)
        choice = tuple(max(range(len(x)), key=lambda k: x[k].value() or 0.0) for x in self.x)
        proven = status == pulp.LpSolutionOptimal
        bound = self.program.objective.value() if proven else self._bounds()[1]
        return IlpResult(choice, max(bound or 0.0, 0.0) / self.objective_factor, proven)

    def _bounds(self) -> tuple[float, float]:
        """HiGHS's objective, infinite without a solution, and its proven bound."""
        info = self.program.solverModel.getInfo()
        return float(info.objective_function_value), float(info.mip_dual_bound)


def _solver(time_limit_s: float, presolve: bool, n_nodes: int) -> Any:
    return pulp.HiGHS(
        msg=False,
        gapRel=0.0,
        gapAbs=0.0,
        timeLimit=None if math.isinf(time_limit_s) else time_limit_s,
        threads=1,
        # A callback, since PuLP does not know the status of HiGHS's own node limit.
        callbackTuple=(_stop_at_node, n_nodes),
        callbacksToActivate=[highspy.cb.HighsCallbackType.kCallbackMipInterrupt],
        presolve="on" if presolve else "off",
        mip_feasibility_tolerance=TOLERANCE,
        primal_feasibility_tolerance=TOLERANCE,
        dual_feasibility_tolerance=TOLERANCE,
    )


def _stop_at_node(kind: int, message: str, found: Any, asked: Any, n_nodes: int) -> None:
    """HiGHS calls this between nodes; setting `user_interrupt` stops it."""
    del kind, message
    if found.mip_node_count >= n_nodes:
        asked.user_interrupt = True


def _groups(tables: list[Array], codes: Codes | None) -> tuple[list[int], list[int]]:
    """Groups of equal rows, among the rows that some choice has: (one row of each group, the group
    of each choice)."""
    stacked = np.ascontiguousarray(np.concatenate(tables, axis=1))
    index: dict[bytes, int] = {}
    first: list[int] = []
    group_of: dict[int, int] = {}
    row_of = range(len(stacked)) if codes is None else codes.tolist()
    for k in dict.fromkeys(row_of):
        # + 0.0 turns -0.0 into 0.0, whose bytes differ.
        group = index.setdefault((stacked[k] + 0.0).tobytes(), len(index))
        if group == len(first):
            first.append(k)
        group_of[k] = group
    return first, [group_of[k] for k in row_of]
