"""Intra-operator parallelism: the fastest placements of one stage that fit in memory.

analyse   notation, factors, batch and groups of the captured program (once; stages take part)
choose    candidates -> problem -> solver -> `Strategy` (per logical mesh and microbatches)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.cost.memory import optimizer_time_s, static_bytes_per_param
from autopar.cost.model import CostModel
from autopar.errors import BatchError, InfeasibleError
from autopar.factors import Operator, Types, operators_of, tensor_types
from autopar.facts import Strategy
from autopar.passes.candidates import CandidateMaker
from autopar.passes.constraints import Constraints, Limits
from autopar.passes.groups import Group, PlacedOperator, form_groups, place_operators
from autopar.passes.microbatch import Batch, find_batch
from autopar.passes.parameters import ParameterMaker
from autopar.passes.problem import IntraOpProblem, ProblemBuilder
from autopar.passes.solvers import Infeasible, Solver, solve
from autopar.program import Program
from autopar.saved import Saved, saved_for_backward, storage_owners
from autopar.units import format_bytes
from autopar.workspace import Temporaries, temporaries

# A plan proven this close to the optimum is good enough: predictions are far coarser.
GAP_GOAL = 1e-3
# A recipe's layout under a memory budget is priced abstractly; nothing hangs on its optimum.
RECIPE_GAP_GOAL = 5e-2
CLOSE_GAP_S = 10.0


@dataclass(frozen=True)
class Analysis:
    """What is known of a program before any mesh: shared by every plan of it."""

    program: Program
    operators: tuple[Operator, ...]
    types: Types
    batch: Batch
    saved: Mapping[str, Saved]
    _types: dict[int, Types] = field(default_factory=dict, repr=False, compare=False)
    # Of these operators alone, so never handed on to a part.
    _placed: dict[int, tuple[PlacedOperator, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _groups: dict[int, tuple[Group, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    whole: Analysis | None = field(default=None, repr=False, compare=False)

    @staticmethod
    def of(program: Program, batch_dims: Mapping[str, int | None] | None = None) -> Analysis:
        """Raises `MissingRuleError` for an operator without a rule."""
        operators = operators_of(program)
        types = tensor_types(program, operators, batch_dims)
        batch = find_batch(program, operators, types, batch_dims)
        saved = saved_for_backward(program) if program.training else {}
        return Analysis(program, operators, types, batch, saved)

    def part(self, program: Program) -> Analysis:
        """What is known of one stage of this program (`passes/cut.py`): the same facts."""
        names = {node.name for node in program.operators}
        return replace(
            self,
            program=program,
            operators=tuple(o for o in self.operators if o.name in names),
            whole=self,
        )

    @cached_property
    def storage_owners(self) -> Mapping[str, str]:
        """Value -> the value whose storage it has, itself unless it is a view."""
        return self.whole.storage_owners if self.whole else storage_owners(self.program)

    @cached_property
    def temporaries(self) -> Mapping[str, Temporaries]:
        """Operator -> what it needs while it runs."""
        return self.whole.temporaries if self.whole else temporaries(self.program)

    def microbatch_types(self, n_microbatches: int) -> Types:
        """Types of one microbatch; raises `BatchError` when the batch does not divide."""
        if n_microbatches not in self._types:
            self._types[n_microbatches] = self._divided(n_microbatches)
        return self._types[n_microbatches]

    def placed_operators(self, n_microbatches: int) -> tuple[PlacedOperator, ...]:
        """Every operator's strategies on one axis, at the sizes of one microbatch."""
        if n_microbatches not in self._placed:
            self._placed[n_microbatches] = self._place(n_microbatches)
        return self._placed[n_microbatches]

    def groups(self, n_microbatches: int) -> tuple[Group, ...]:
        """The planning nodes, at the sizes of one microbatch."""
        if n_microbatches not in self._groups:
            placed = self.placed_operators(n_microbatches)
            self._groups[n_microbatches] = form_groups(self.program, placed)
        return self._groups[n_microbatches]

    def _place(self, n_microbatches: int) -> tuple[PlacedOperator, ...]:
        if self.whole is None:
            tensors = self.microbatch_types(n_microbatches).tensors
            return place_operators(self.operators, tensors)
        names = {o.name for o in self.operators}
        return tuple(p for p in self.whole.placed_operators(n_microbatches) if p.name in names)

    def _divided(self, n_microbatches: int) -> Types:
        if n_microbatches == 1:
            return self.types
        self.batch.check_divides(n_microbatches)
        if self.batch.n_splits(n_microbatches) == 1:
            return self.types
        for name, (dim, factor) in self.batch.cells.items():
            size = self.types.tensors[name].dims[dim][factor]
            if size % n_microbatches:
                raise BatchError(
                    f"the model views its batch as factors of {size}, "
                    f"which {n_microbatches} microbatches do not divide",
                    where=name,
                    hint="choose fewer microbatches",
                )
        return self.types.with_divided(self.batch.cells, n_microbatches)


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
) -> IntraOpProblem:
    """The choice problem of a program, whole or of one stage, on one logical mesh."""
    program = analysis.program
    types = analysis.microbatch_types(n_microbatches)
    cost = cost.for_parameters(sum(types.tensors[n].size_bytes for n in program.parameters))
    limits = Limits.of(constraints, program, analysis.batch.cells, types.classes)
    n_splits = analysis.batch.n_splits(n_microbatches)
    maker = CandidateMaker(
        cost, types.tensors, analysis.saved, limits, n_microbatches, n_in_flight, n_splits
    )
    savers: set[str] = set()
    candidates = [maker.make(group, savers) for group in analysis.groups(n_microbatches)]
    static = static_bytes_per_param(optimizer, cost.dtype)
    itemsize = cost.dtype.itemsize
    update = optimizer_time_s(10**6, optimizer, cost.dtype, cost.mesh.device) / 1e6 / itemsize
    parameters = ParameterMaker(cost, limits, n_microbatches, static, update)
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
    strategy = Strategy(
        problem.operators(solution.choice),
        problem.storage(solution.choice),
        analysis.microbatch_types(n_microbatches).tensors,
        analysis.batch.cells,
        analysis.batch.size,
        n_microbatches,
        "sequence" in constraints.forbid,
        problem.boundaries(solution.choice, "received"),
        problem.boundaries(solution.choice, "sent"),
    )
    return Chosen(
        strategy,
        solution.objective_s,
        solution.gap,
        solution.bytes,
        sum(solution.phase_s.values()),
        problem.numbers.n_variables,
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
