"""Intra-operator parallelism: the fastest placements of one stage that fit in memory.

    candidates -> problem -> solver -> `Strategy`      per logical mesh and number of microbatches

`choose_folded` solves the problem of a program with repeated blocks from that of the same with few
of them: the same optimum, in a time that does not grow with depth.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from autopar.cost.memory import optimizer_time_s, static_bytes_per_param
from autopar.cost.model import CostModel
from autopar.errors import InfeasibleError
from autopar.facts import OperatorStrategy, Storage, Strategy
from autopar.passes.analysis import Analysis
from autopar.passes.boundaries import Side
from autopar.passes.candidates import CandidateMaker
from autopar.passes.constraints import Constraints, Limits
from autopar.passes.folding import Folded
from autopar.passes.parameters import ParameterMaker
from autopar.passes.problem import IntraOpProblem, IntraOpProblems, ProblemBuilder
from autopar.passes.repeated import placed_once, repeated_problem
from autopar.passes.solvers import Infeasible, Solver, TooWide, solve
from autopar.passes.solvers.repeats_select import solve_repeated
from autopar.spec import Spec
from autopar.units import format_bytes

# A plan proven this close to the optimum is good enough: predictions are far coarser.
GAP_GOAL = 1e-3
# A recipe's layout under a memory budget is priced abstractly; nothing hangs on its optimum.
RECIPE_GAP_GOAL = 5e-2
CLOSE_GAP_S = 10.0
C = TypeVar("C", contravariant=True)


def least_bytes(
    analysis: Analysis, cost: CostModel, n_microbatches: int, optimizer: str, n_in_flight: int = 1
) -> float:
    """What a device needs at least, had every tensor a share on every rank.

    Costs nothing beside solving, and rules out most numbers of microbatches that do not fit.
    """
    types, n_ranks = analysis.microbatch_types(n_microbatches).tensors, cost.mesh.n_ranks
    kept: set[str] = set()
    other_bytes = 0.0
    for operator in analysis.operators:
        saved = analysis.saved.get(operator.name)
        if saved is None:
            continue
        kept |= {operator.inputs[i] for i in saved.inputs}
        kept |= {operator.outputs[i] for i in saved.outputs}
        other_bytes += saved.other_bytes / analysis.batch.n_splits(n_microbatches)
    activations = sum(types[n].size_bytes for n in kept - set(analysis.program.parameters))
    static = static_bytes_per_param(optimizer, cost.dtype).total_bytes
    parameters = sum(
        types[n].size_bytes
        / types[n].itemsize
        * (static if types[n].has_grad else types[n].itemsize)
        for n in analysis.program.parameters
    )
    return (parameters + n_in_flight * (activations + other_bytes)) / n_ranks


class _Readable(Protocol[C]):
    """A problem whose choices can be read: of a program written out, or by its repeated blocks."""

    def operators(self, choice: C) -> Mapping[str, OperatorStrategy]: ...
    def storage(self, choice: C) -> Mapping[str, Storage]: ...
    def boundaries(self, choice: C, side: Side) -> Mapping[str, Spec]: ...


@dataclass(frozen=True)
class Chosen:
    """A solved stage: the strategy, what the solver minimised and how sure it is.

    `size_bytes` is what it needs per device by the solver's account.
    """

    strategy: Strategy
    objective_s: float
    gap: float
    size_bytes: float
    solve_s: float
    n_variables: int


def intra_op_problem(
    analysis: Analysis,
    cost: CostModel,
    n_microbatches: int,
    constraints: Constraints,
    optimizer: str,
    budget_bytes: float | None,
    n_in_flight: int = 1,
    n_like: Mapping[str, int] | None = None,
) -> IntraOpProblem:
    """The choice problem of a program, whole or of one stage, on one logical mesh.

    `n_like` counts operators that some stand for within their group (`placed_once`).
    """
    return intra_op_problems(
        analysis, (cost,), n_microbatches, constraints, optimizer, budget_bytes, n_in_flight, n_like
    ).of(0)


def intra_op_problems(
    analysis: Analysis,
    costs: Sequence[CostModel],
    n_microbatches: int,
    constraints: Constraints,
    optimizer: str,
    budget_bytes: float | None,
    n_in_flight: int = 1,
    n_like: Mapping[str, int] | None = None,
) -> IntraOpProblems:
    """`intra_op_problem` on logical meshes that use the same axes of the same devices."""
    program = analysis.program
    types = analysis.microbatch_types(n_microbatches)
    costs = tuple(cost.for_parameters(analysis.parameter_bytes) for cost in costs)
    limits = Limits.of(constraints, program, analysis.batch.cells, types.classes)
    n_splits = analysis.batch.n_splits(n_microbatches)
    maker = CandidateMaker(
        costs, types.tensors, analysis.saved, limits, n_microbatches, n_in_flight, n_splits,
        n_like or {},
    )  # fmt: skip
    savers: set[str] = set()
    candidates = [maker.make(group, savers) for group in analysis.groups(n_microbatches)]
    device, dtype = costs[0].mesh.device, costs[0].dtype
    static = static_bytes_per_param(optimizer, dtype)
    update = optimizer_time_s(10**6, optimizer, dtype, device) / 1e6 / dtype.itemsize
    parameters = ParameterMaker(costs, limits, n_microbatches, static, update)
    return ProblemBuilder(program, types.tensors, parameters, budget_bytes).build(candidates)


def choose(
    analysis: Analysis,
    cost: CostModel,
    n_microbatches: int,
    constraints: Constraints,
    optimizer: str,
    budget_bytes: float | None,
    solver: Solver = "auto",
    time_limit_s: float | None = None,
    n_in_flight: int = 1,
) -> Chosen:
    """The fastest strategy within `budget_bytes` per device, with `n_in_flight` microbatches.

    Where the budget binds, "auto" stops at `GAP_GOAL`, and closes a wider gap for
    `CLOSE_GAP_S` unless `time_limit_s` says otherwise; what is left is in `gap`.

    Raises `InfeasibleError` naming the bytes that are missing.
    """
    problem = intra_op_problem(
        analysis, cost, n_microbatches, constraints, optimizer, budget_bytes, n_in_flight
    )
    limit_s = CLOSE_GAP_S if time_limit_s is None and solver == "auto" else time_limit_s
    goal = RECIPE_GAP_GOAL if constraints.roles else GAP_GOAL
    solution = solve(problem.numbers, solver, limit_s, gap_goal=goal)
    if isinstance(solution, Infeasible):
        raise _infeasible(solution, budget_bytes, cost)
    return Chosen(
        _strategy(analysis, problem, solution.choice, n_microbatches, constraints),
        solution.objective_s,
        solution.gap,
        solution.bytes,
        sum(solution.phase_s.values()),
        problem.numbers.n_variables,
    )


def choose_folded(
    folded: Folded,
    cost: CostModel,
    n_microbatches: int,
    constraints: Constraints,
    optimizer: str,
    budget_bytes: float | None,
    solver: Solver = "auto",
    time_limit_s: float | None = None,
    n_in_flight: int = 1,
) -> Chosen:
    """`choose` of the whole program, by its folded one where that is exact and closes the gap.

    Pins are of single parameters, which other blocks do not have.
    """
    start_s = time.perf_counter()
    if folded.runs and solver == "auto" and not constraints.pins:
        problem = intra_op_problem(
            folded.analysis, cost, n_microbatches, constraints, optimizer, budget_bytes,
            n_in_flight, placed_once(folded, n_microbatches),
        )  # fmt: skip
        chosen = _by_copies(folded, problem, n_microbatches, constraints, time_limit_s)
        if isinstance(chosen, Infeasible):
            raise _infeasible(chosen, budget_bytes, cost)
        if chosen is not None:
            return replace(chosen, solve_s=time.perf_counter() - start_s)
    return choose(
        folded.whole, cost, n_microbatches, constraints, optimizer, budget_bytes, solver,
        time_limit_s, n_in_flight,
    )  # fmt: skip


def _by_copies(
    folded: Folded,
    problem: IntraOpProblem,
    n_microbatches: int,
    constraints: Constraints,
    time_limit_s: float | None,
) -> Chosen | Infeasible | None:
    """None: the blocks are not alike enough, or a gap is left."""
    repeated = repeated_problem(folded, problem)
    if repeated is None:
        return None
    try:
        solution = solve_repeated(repeated.problem, time_limit_s)
    except TooWide:
        return None
    if isinstance(solution, Infeasible):
        return solution
    if solution.gap > (RECIPE_GAP_GOAL if constraints.roles else GAP_GOAL):
        return None
    strategy = _strategy(folded.whole, repeated, solution.choice, n_microbatches, constraints)
    n_variables, totals = problem.numbers.n_variables, solution.totals
    return Chosen(strategy, totals.cost_s, solution.gap, totals.bytes, 0.0, n_variables)


def _strategy(
    analysis: Analysis,
    problem: _Readable[C],
    choice: C,
    n_microbatches: int,
    constraints: Constraints,
) -> Strategy:
    """What a choice of a program's problem says."""
    return Strategy(
        problem.operators(choice),
        problem.storage(choice),
        analysis.microbatch_types(n_microbatches).tensors,
        analysis.batch.cells,
        analysis.batch.size,
        n_microbatches,
        "sequence" in constraints.forbid,
        problem.boundaries(choice, "received"),
        problem.boundaries(choice, "sent"),
    )


def _infeasible(found: Infeasible, budget_bytes: float | None, cost: CostModel) -> InfeasibleError:
    axes = ", ".join(f"{name}={size}" for name, size in cost.mesh.axes.items())
    if budget_bytes is None or found.min_bytes is None:
        return InfeasibleError(
            "no plan satisfies the constraints together",
            where=f"mesh ({axes})",
            hint="relax forbid, force or the recipe",
        )
    missing = found.min_bytes - budget_bytes
    return InfeasibleError(
        f"no plan fits in {format_bytes(budget_bytes)} per device; the leanest needs "
        f"{format_bytes(found.min_bytes)}, {format_bytes(missing)} more",
        where=f"mesh ({axes})",
        hint="use more microbatches or devices, allow ZeRO, or raise memory_limit",
    )
