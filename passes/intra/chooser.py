"""The fastest placements of one program within a memory budget: what the solvers say, read back.

    problem -> solver -> `Chosen` -> `Strategy`         per logical mesh and number of microbatches

A program with repeated blocks is solved from the problem of the same with few of them
(`repeated.py`): the same optimum, in a time that does not grow with depth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol, TypeVar

from autopar.cost.laws import CostModel
from autopar.errors import InfeasibleError
from autopar.passes.analysis import Analysis, Folded, Recomputable, Side, is_searched, renamed
from autopar.passes.intra.constraints import Constraints
from autopar.passes.intra.intra_op import ProblemBatch, ProblemFamilies
from autopar.passes.intra.problem import IntraOpProblem
from autopar.passes.intra.repeated import Repeated, placed_once, repeated_problems
from autopar.passes.solvers.choice import Solver, WorkLimit, most_columns, solve
from autopar.passes.solvers.eliminate import TooWide
from autopar.passes.solvers.problem import Infeasible
from autopar.passes.solvers.repeats import RepeatedSolver
from autopar.placement import Spec
from autopar.program import OperatorStrategy, Recomputed, Storage, Strategy
from autopar.units import format_bytes

# A plan proven this close to the optimum is good enough: predictions are far coarser.
GAP_GOAL = 1e-3
# A recipe's layout under a memory budget is priced abstractly; nothing hangs on its optimum.
RECIPE_GAP_GOAL = 5e-2
# What closing a gap of a whole program is worth, some ten seconds: counted in work, not by the
# clock, so that plans do not depend on how busy a machine is.
CLOSE_GAP = WorkLimit(n_columns=30_000, n_nodes=200)
# Repeated blocks leave a gap where they cannot share what a budget leaves. One wider than this is
# closed on the whole program, where that is small enough.
FOLDED_GAP_GOAL = 2e-2
# A mode for each block is coarse; who asks compares with what is best without recompute.
MODES_GAP_GOAL = 5e-2
# Problems written out that are kept: of a recipe's stages on the submeshes of one node.
MOST_KNOWN = 8
C = TypeVar("C", contravariant=True)
# A problem: of several, its place among them, microbatches in flight.
_Case = tuple[Repeated, int, int]


@dataclass(frozen=True)
class Chosen:
    """A solved stage: what it costs in a step, what of that is paid once whatever the microbatches,
    and how sure it is. `read` makes the strategy.

    `size_bytes` is what it needs per device by the solver's account; `n_written_out` the number of
    variables with every copy of a block written out, `n_variables` without. One that is not
    `settled` is not the best yet: more was not worth finding out, or is to be asked for.
    """

    objective_s: float
    once_s: float
    gap: float
    size_bytes: float
    n_variables: int
    n_written_out: int
    received: Mapping[str, Spec]
    sent: Mapping[str, Spec]
    read: Callable[[], Strategy] = field(repr=False, compare=False)
    settled: bool = True

    @property
    def bound_s(self) -> float:
        """No objective is below it."""
        return self.objective_s * (1 - self.gap)

    @cached_property
    def strategy(self) -> Strategy:
        """Every operator's placements, and every parameter's storage."""
        return self.read()

    def named(self, names: Mapping[str, str]) -> Chosen:
        """The same of a program that is alike, which calls things otherwise (`passes/analysis/equal_parts.py`)."""
        return replace(
            self,
            received={names[n]: spec for n, spec in self.received.items()},
            sent={names[n]: spec for n, spec in self.sent.items()},
            read=lambda: renamed(self.strategy, names),
        )


@dataclass(frozen=True)
class PlacementRequest:
    """What is wanted of one program: the machine its placements are chosen for, how many
    microbatches, and of those how many keep their activations at once.

    `runs_on` is the machine they are priced on, where that is another (recipes).
    """

    cost: CostModel
    n_microbatches: int
    constraints: Constraints
    n_in_flight: int = 1
    runs_on: CostModel | None = None

    @property
    def gap_goal(self) -> float:
        return RECIPE_GAP_GOAL if self.constraints.roles else GAP_GOAL


@dataclass(eq=False)
class Chooser:
    """Chooses for one program, from the problem of the same with few of its repeated blocks.

    `families` and `counts` are cost models and numbers of microbatches that will be asked for, as
    in `ProblemFamilies`.
    """

    folded: Folded
    optimizer: str
    recomputable: Recomputable | None = None
    families: Sequence[tuple[CostModel, ...]] = ()
    counts: Sequence[int] = ()
    _repeated: dict[ProblemBatch, Repeated | None] = field(default_factory=dict)
    _solvers: dict[_Case, RepeatedSolver] = field(default_factory=dict)

    @cached_property
    def _written_out(self) -> ProblemFamilies:
        """Of the whole program, each problem by itself."""
        return ProblemFamilies(
            self.folded.whole, self.optimizer, recomputable=self.recomputable, most_kept=MOST_KNOWN
        )

    @cached_property
    def _problems(self) -> ProblemFamilies:
        def n_like(m: int) -> Mapping[str, int]:
            return placed_once(self.folded, m)

        return ProblemFamilies(
            self.folded.analysis, self.optimizer, self.families, self.counts, n_like,
            self.recomputable,
        )  # fmt: skip

    def choose(
        self,
        ask: PlacementRequest,
        budget_bytes: float | None,
        solver: Solver = "auto",
        time_limit_s: float | None = None,
        limit_s: float = math.inf,
        closes: bool = True,
    ) -> Chosen:
        """`choose` of the whole program, from its folded problem where that is exact. Pins are of
        single parameters, which other blocks do not have.

        Where no objective can be below `limit_s`, no more is found out than that; and unless it
        `closes` gaps, one is left that blocks share (`settled`).
        """
        whole = self.folded.whole, ask, self.optimizer, budget_bytes, solver, time_limit_s
        if not self.folded.runs or solver != "auto" or ask.constraints.pins:
            return choose(*whole, self.recomputable, self._written_out)
        repeated, place = self._case(ask, ask.cost)
        by_copies = None
        if repeated is not None:
            by_copies = self._by_copies(repeated, place, ask, budget_bytes, time_limit_s, limit_s)
        if repeated is None or by_copies is None:
            return choose(*whole, self.recomputable, self._written_out)
        is_coarse = is_searched(self.recomputable)
        enough = max(ask.gap_goal, MODES_GAP_GOAL if is_coarse else FOLDED_GAP_GOAL)
        if by_copies.gap <= enough:
            return by_copies
        if repeated.problems.written(most_columns) > CLOSE_GAP.most_columns:
            return by_copies
        if not (by_copies.settled and closes):
            return replace(by_copies, settled=False)
        other = choose(*whole, self.recomputable, self._written_out)
        return min(by_copies, other, key=lambda c: c.gap)

    def _case(self, ask: PlacementRequest, cost: CostModel) -> tuple[Repeated | None, int]:
        """The problems of all blocks, None where one does not stand for the others; and which of
        them is that of `cost`."""
        batch = self._problems.of(cost, ask.n_microbatches, ask.constraints)
        if batch not in self._repeated:
            self._repeated[batch] = repeated_problems(self.folded, batch.problems)
        return self._repeated[batch], batch.place(cost, ask.n_microbatches)

    def _by_copies(
        self,
        whole: Repeated,
        place: int,
        ask: PlacementRequest,
        budget_bytes: float | None,
        time_limit_s: float | None,
        limit_s: float,
    ) -> Chosen | None:
        """None: tables would be too large."""
        key = whole, place, ask.n_in_flight
        if key not in self._solvers:
            problem = whole.problems.of(place, ask.n_in_flight)
            self._solvers[key] = RepeatedSolver(problem, whole.plan)
        solver = self._solvers[key]
        try:
            solution = solver.solve(budget_bytes, time_limit_s, ask.gap_goal, limit_s)
        except TooWide:
            return None
        if isinstance(solution, Infeasible):
            raise _infeasible(solution, budget_bytes, ask.cost)
        choice, priced, runs_on = solution.choice, solver.problem, whole
        if ask.runs_on is not None:
            other, place = self._case(ask, ask.runs_on)
            assert other is not None, "machines differ in their numbers alone"
            assert other.folded_problem.structure == whole.folded_problem.structure
            priced, runs_on = other.problems.of(place, ask.n_in_flight), other
        return Chosen(
            priced.evaluate(choice).cost_s,
            replace(priced, only=runs_on.is_once).evaluate(choice).cost_s,
            solution.gap,
            solution.totals.bytes,
            whole.n_variables,
            whole.n_written_out,
            whole.boundaries(choice, "received"),
            whole.boundaries(choice, "sent"),
            lambda: _strategy(self.folded.whole, whole, choice, ask),
            solution.settled,
        )


def choose(
    analysis: Analysis,
    ask: PlacementRequest,
    optimizer: str,
    budget_bytes: float | None,
    solver: Solver = "auto",
    time_limit_s: float | None = None,
    recomputable: Recomputable | None = None,
    problems: ProblemFamilies | None = None,
) -> Chosen:
    """The fastest strategy of a program within `budget_bytes` per device; `problems` are its own,
    which are kept as stages that are alike differ in what is in flight.

    Where the budget binds, "auto" stops at `GAP_GOAL`, and closes a wider gap with the effort of
    `CLOSE_GAP`, or until `time_limit_s` has passed; what is left is in `gap`.

    Raises `InfeasibleError` naming the bytes that are missing.
    """
    m, constraints = ask.n_microbatches, ask.constraints
    families = problems or ProblemFamilies(analysis, optimizer, recomputable=recomputable)

    def built(cost: CostModel) -> IntraOpProblem:
        return families.of(cost, m, constraints).of(cost, m)

    problem = built(ask.cost).under(budget_bytes, ask.n_in_flight)
    solution = solve(problem.numbers, solver, time_limit_s, gap_goal=ask.gap_goal, effort=CLOSE_GAP)
    if isinstance(solution, Infeasible):
        raise _infeasible(solution, budget_bytes, ask.cost)
    choice, priced = solution.choice, problem
    if ask.runs_on is not None:
        priced = built(ask.runs_on)
        assert priced.structure == problem.structure, "machines differ in their numbers alone"
    return Chosen(
        priced.numbers.evaluate(choice).cost_s,
        priced.once.evaluate(choice).cost_s,
        solution.gap,
        solution.bytes,
        problem.numbers.n_variables,
        problem.numbers.n_variables,
        problem.boundaries(choice, "received"),
        problem.boundaries(choice, "sent"),
        lambda: _strategy(analysis, problem, choice, ask),
    )


class _Readable(Protocol[C]):
    """A problem whose choices can be read: of a program written out, or by its repeated blocks."""

    def operators(self, choice: C) -> Mapping[str, OperatorStrategy]: ...
    def storage(self, choice: C) -> Mapping[str, Storage]: ...
    def boundaries(self, choice: C, side: Side) -> Mapping[str, Spec]: ...
    def recomputed(self, choice: C) -> tuple[Recomputed, ...]: ...


def _strategy(
    analysis: Analysis, problem: _Readable[C], choice: C, ask: PlacementRequest
) -> Strategy:
    """What a choice of a program's problem says."""
    return Strategy(
        problem.operators(choice),
        problem.storage(choice),
        analysis.microbatch_types(ask.n_microbatches).tensors,
        analysis.batch.cells,
        analysis.batch.size,
        ask.n_microbatches,
        "sequence" in ask.constraints.forbid,
        problem.boundaries(choice, "received"),
        problem.boundaries(choice, "sent"),
        problem.recomputed(choice),
    )


def _infeasible(found: Infeasible, budget_bytes: float | None, cost: CostModel) -> InfeasibleError:
    axes = ", ".join(f"{name}={size}" for name, size in cost.mesh.axes.items())
    if budget_bytes is None or found.min_bytes is None:
        return InfeasibleError(
            "no plan satisfies the constraints together",
            where=f"mesh ({axes})",
            hint="relax forbid, force or the recipe",
        )
    return too_little_memory(budget_bytes, found.min_bytes, f"mesh ({axes})")


def too_little_memory(budget_bytes: float, least_bytes: float, where: str) -> InfeasibleError:
    """What is missing, and what would help."""
    missing = least_bytes - budget_bytes
    return InfeasibleError(
        f"no plan fits in {format_bytes(budget_bytes)} per device; the leanest needs "
        f"{format_bytes(least_bytes)}, {format_bytes(missing)} more",
        where=where,
        hint="use more microbatches or devices, allow ZeRO and recompute, or raise memory_limit",
        least_bytes=least_bytes,
    )
