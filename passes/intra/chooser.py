"""Choose the fastest placements of one program within a memory budget.

    problem -> solver -> `Chosen` -> `Strategy`         per logical mesh and number of microbatches

A program with repeated blocks is solved from the problem of its folded program (`repeated.py`). The
optimum is the same, and the time does not grow with depth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from weakref import WeakKeyDictionary

from autopar.cost.laws import CostModel
from autopar.errors import InfeasibleError
from autopar.passes.analysis import (
    Analysis,
    Folded,
    Recomputable,
    fold,
    is_searched,
    rename_strategy,
)
from autopar.passes.intra.constraints import Constraints
from autopar.passes.intra.hiding import (
    EXPOSED_GAP_GOAL,
    ExposureWeights,
    LeastExposed,
    least_exposed,
)
from autopar.passes.intra.intra_op import ProblemBatch, ProblemFamilies
from autopar.passes.intra.priced import Prices
from autopar.passes.intra.problem import IntraOpProblem
from autopar.passes.intra.repeated import (
    HidingProblem,
    Repeated,
    placed_once,
    repeated_problems,
)
from autopar.passes.solvers.choice import Solver, WorkLimit, conflict, most_columns, solve
from autopar.passes.solvers.problem import ChoiceProblem, Infeasible, Solution
from autopar.passes.solvers.repeats import (
    RepeatedChoice,
    RepeatedProblem,
    RepeatedSolver,
)
from autopar.program.graph import Program
from autopar.program.lines import Strategy
from autopar.units import format_bytes

# The solver stops this close to the optimum, because predictions are far coarser.
GAP_GOAL = 1e-3
# Recipes are solved on an abstract machine, so under a memory budget the optimum matters little.
RECIPE_GAP_GOAL = 5e-2
# The limit for closing the gap of a whole program, some ten seconds. It counts work, not time, so
# that plans do not depend on the load of the machine.
CLOSE_GAP = WorkLimit(n_columns=30_000, n_nodes=200)
# Repeated blocks leave a gap when they cannot share what is left of the budget. A gap wider than
# this is closed on the whole program, if that is small enough.
FOLDED_GAP_GOAL = 2e-2
# Modes per block are coarse, and the caller compares with the best plan without recompute.
MODES_GAP_GOAL = 5e-2
# Cached whole-program problems: enough for a recipe's stages on the submeshes of one node.
MOST_KNOWN = 8


@dataclass(frozen=True)
class Chosen:
    """A solved stage. `read` makes the strategy.

    objective_s    seconds of a step, in which compute hides communication (`hiding.py`)
    once_s         the part of them that is paid once, whatever the number of microbatches
    gap            relative gap between the objective and a lower bound on the step; `solver_gap` is
                   that of the problem in which all is hidden
    size_bytes     memory per device, as the solver counts it
    n_variables    variables of the solved problem; `n_written_out` counts every copy of a block
    settled        False if the solver stopped at `limit_s`, so that a better choice may exist
    hidden_bound_s lower bound on the objective if all that can hide were hidden
    """

    objective_s: float
    once_s: float
    gap: float
    size_bytes: float
    n_variables: int
    n_written_out: int
    read: Callable[[], Strategy] = field(repr=False, compare=False)
    settled: bool = True
    solver_gap: float = 0.0
    hidden_bound_s: float = 0.0

    @property
    def bound_s(self) -> float:
        """Lower bound on the objective."""
        return self.objective_s * (1 - self.gap)

    @cached_property
    def strategy(self) -> Strategy:
        """Every operator's placements, and every parameter's storage."""
        return self.read()

    def named(self, names: Mapping[str, str]) -> Chosen:
        """The same choice, renamed for an equal program (`passes/analysis/equal_parts.py`)."""
        return replace(self, read=lambda: rename_strategy(self.strategy, names))


@dataclass(frozen=True)
class PlacementRequest:
    """A request for the placements of one program: on which machine, with how many microbatches,
    and how many of them are in flight.

    `runs_on` is the machine that prices the chosen placements, if it is another one (recipes).
    """

    cost: CostModel
    n_microbatches: int
    constraints: Constraints
    n_in_flight: float = 1
    runs_on: CostModel | None = None

    @property
    def gap_goal(self) -> float:
        return RECIPE_GAP_GOAL if self.constraints.is_recipe else GAP_GOAL


@dataclass(frozen=True)
class _WrittenOut:
    """Solves a problem without repeats by messages, elimination and the ILP (`solve`)."""

    problem: RepeatedProblem
    solver: Solver

    def of(self, problem: RepeatedProblem) -> _WrittenOut:
        """The solver of a problem with other costs."""
        return replace(self, problem=problem)

    def solve(
        self, budget_bytes: float | None, time_limit_s: float | None, gap_goal: float,
        limit_s: float = math.inf,
    ) -> Solution[RepeatedChoice] | Infeasible:  # fmt: skip
        """As `RepeatedSolver.solve`, but without regard to `limit_s`."""
        assert not self.problem.repeats, "copies are not written out"
        numbers = replace(self.problem.numbers, budget_bytes=budget_bytes)
        found = solve(numbers, self.solver, time_limit_s, gap_goal=gap_goal, work_limit=CLOSE_GAP)
        if isinstance(found, Infeasible):
            return found
        return Solution(RepeatedChoice(found.choice, ()), found.totals, found.gap)


@dataclass(eq=False)
class Chooser:
    """Chooses placements for one program, from the problem of its folded program.

    `families` and `counts` are the cost models and numbers of microbatches that requests will have,
    as in `ProblemFamilies`; so is `most_kept`. `prices` is shared with other choosers of the same
    planning.
    """

    folded: Folded
    optimizer: str
    recomputable: Recomputable | None = None
    families: Sequence[tuple[CostModel, ...]] = ()
    counts: Sequence[int] = ()
    prices: Prices = field(default_factory=Prices)
    most_kept: float = math.inf
    _repeated: WeakKeyDictionary[ProblemBatch, Repeated | None] = field(
        default_factory=WeakKeyDictionary
    )
    _solvers: WeakKeyDictionary[Repeated, dict[tuple[int, float], RepeatedSolver]] = field(
        default_factory=WeakKeyDictionary
    )

    @cached_property
    def _problems(self) -> ProblemFamilies:
        n_like = partial(placed_once, self.folded)  # a closure over `self` would be a cycle
        return ProblemFamilies(
            self.folded.analysis, self.optimizer, self.families, self.counts, n_like,
            self.recomputable, self.most_kept, self.prices,
        )  # fmt: skip

    @cached_property
    def _written_out(self) -> Chooser:
        """The chooser that knows no repeated blocks; each of its problems is built alone."""
        return Chooser(
            fold(self.folded.whole, ()), self.optimizer, self.recomputable, prices=self.prices,
            most_kept=MOST_KNOWN,
        )  # fmt: skip

    @property
    def _whole_chooser(self) -> Chooser:
        """`_written_out`, or this one if there are no repeated blocks."""
        return self._written_out if self.folded.runs else self

    def choose(
        self,
        ask: PlacementRequest,
        budget_bytes: float | None,
        solver: Solver = "auto",
        time_limit_s: float | None = None,
        limit_s: float = math.inf,
    ) -> Chosen:
        """The fastest strategy within `budget_bytes` per device.

        "auto" eliminates, with a price of bytes if the budget binds. If a wide gap is left, or the
        tables would be large, the program written out is solved by all means (`_WrittenOut`);
        the ILP stops after the work of `CLOSE_GAP`, or when `time_limit_s` has passed. If no
        objective can be below `limit_s`, the solver stops there, with a choice that is not
        `settled`.

        Raises `InfeasibleError` that names the missing bytes.
        """
        limits = budget_bytes, time_limit_s, limit_s
        if solver != "auto":
            return self._whole_chooser._choose(ask, *limits, by=solver)
        # Pins name single parameters, so with pins blocks are not equal.
        chooser = self._whole_chooser if ask.constraints.pins else self
        whole, _ = chooser._case(ask, ask.cost)
        if whole is None:  # one block cannot stand for the others
            chooser = self._whole_chooser
            whole, _ = chooser._case(ask, ask.cost)
        assert whole is not None, "without blocks nothing stands for others"
        if whole.plan is None:
            return self._whole_chooser._choose(ask, *limits, by=solver)
        found = chooser._choose(ask, *limits)
        enough = ask.gap_goal
        if whole.problems.repeats:
            coarse = is_searched(self.recomputable)
            enough = max(enough, MODES_GAP_GOAL if coarse else FOLDED_GAP_GOAL)
        if found.solver_gap <= enough or not found.settled:
            return found
        if whole.problems.unrolled_size(most_columns) > CLOSE_GAP.most_columns:
            return found
        return min(found, self._whole_chooser._choose(ask, *limits, by=solver), key=lambda c: c.gap)

    def priced_s(self, ask: PlacementRequest, s_per_byte: float) -> float:
        """No placements take less, in seconds of a step with a price on their bytes; 0 where that
        is not quick to know."""
        whole, place = (self._whole_chooser if ask.constraints.pins else self)._case(ask, ask.cost)
        if whole is None or whole.plan is None:
            return 0.0
        solver = self._solver(whole, place, ask, None)
        assert isinstance(solver, RepeatedSolver), "there is a quick plan"
        return solver.least_at(s_per_byte) + whole.folded_problem.offset_s(place)

    def _case(self, ask: PlacementRequest, cost: CostModel) -> tuple[Repeated | None, int]:
        """The problems with all blocks, and the index of the one for `cost`; None if one block
        cannot stand for the others."""
        batch = self._problems.of(cost, ask.n_microbatches, ask.constraints)
        if batch not in self._repeated:
            self._repeated[batch] = repeated_problems(self.folded, batch.problems)
        return self._repeated[batch], batch.place(cost, ask.n_microbatches)

    def _solver(
        self, whole: Repeated, place: int, ask: PlacementRequest, by: Solver | None
    ) -> RepeatedSolver | _WrittenOut:
        """The solver of a problem. That by elimination is kept: results for one budget serve the
        others."""
        solvers, key = self._solvers.setdefault(whole, {}), (place, ask.n_in_flight)
        if by:
            return _WrittenOut(whole.problems.of(*key), by)
        if key not in solvers:
            assert whole.plan is not None, "the caller has seen that elimination is quick"
            solvers[key] = RepeatedSolver(whole.problems.of(*key), whole.plan)
        return solvers[key]

    def _choose(
        self, ask: PlacementRequest, budget_bytes: float | None, time_limit_s: float | None,
        limit_s: float, by: Solver | None = None,
    ) -> Chosen:  # fmt: skip
        """The choice by elimination, or of the problem written out `by` a solver."""
        whole, place = self._case(ask, ask.cost)
        assert whole is not None, "the caller has seen that blocks are equal"
        folded, solver = whole.folded_problem, self._solver(whole, place, ask, by)
        offset_s = folded.offset_s(place)
        limit_s -= offset_s
        solution = solver.solve(budget_bytes, time_limit_s, ask.gap_goal, limit_s)
        if isinstance(solution, Infeasible):
            program = self.folded.whole.program
            raise _infeasible(solution, folded.numbers, program, budget_bytes, ask.cost)
        problem, runs_on = solver.problem, whole  # it has evaluated choices before
        if ask.runs_on is not None:
            other, place = self._case(ask, ask.runs_on)
            assert other is not None, "machines differ in their numbers alone"
            assert other.folded_problem.structure == folded.structure
            problem, runs_on = other.problems.of(place, ask.n_in_flight), other
        hiding = HidingProblem(problem, runs_on.time_parts(place))

        def solve_weighed(weights: ExposureWeights) -> Solution[RepeatedChoice] | None:
            other = solver.of(hiding.weigh(weights))
            found = other.solve(budget_bytes, time_limit_s, ask.gap_goal, limit_s)
            return None if isinstance(found, Infeasible) else found

        best = _best(solution, hiding, solve_weighed, runs_on.folded_problem, ask, limit_s)
        floor_s = _floor_s(best, solve_weighed, folded, place, ask, limit_s)
        law, launches_s = runs_on.folded_problem.hiding, runs_on.folded_problem.launches_s
        objective_s = law.step_s(best.parts, ask.n_microbatches) + launches_s
        exposed_s = law.exposed_sync_s(best.parts, ask.n_microbatches)
        gap = _gap(objective_s, max(floor_s, best.bound_s + offset_s))
        return Chosen(
            objective_s=objective_s,
            once_s=runs_on.once_s(problem, best.choice) + exposed_s + launches_s,
            gap=gap if ask.runs_on is None else solution.gap,
            size_bytes=best.size_bytes,
            n_variables=whole.n_variables,
            n_written_out=whole.n_written_out,
            read=partial(_strategy, self.folded.whole, whole, best.choice, ask),
            settled=solution.settled and best.bound_s < limit_s,
            solver_gap=solution.gap,
            hidden_bound_s=max(floor_s, solution.bound_s + offset_s),
        )


def choose(
    analysis: Analysis,
    ask: PlacementRequest,
    optimizer: str,
    budget_bytes: float | None,
    solver: Solver = "auto",
    time_limit_s: float | None = None,
    recomputable: Recomputable | None = None,
) -> Chosen:
    """`Chooser.choose` for a program whose repeated blocks are not looked for."""
    chooser = Chooser(fold(analysis, ()), optimizer, recomputable)
    return chooser.choose(ask, budget_bytes, solver, time_limit_s)


def _best(
    first: Solution[RepeatedChoice],
    hiding: HidingProblem,
    solve: Callable[[ExposureWeights], Solution[RepeatedChoice] | None],
    problem: IntraOpProblem,
    ask: PlacementRequest,
    limit_s: float,
) -> LeastExposed:
    """The least step, from the first choice. A recipe keeps the one of its abstract machine."""
    if ask.runs_on is not None:
        return LeastExposed(first.choice, first.totals.bytes, hiding.parts(first.choice), 0.0)
    return least_exposed(first, hiding.parts, solve, problem.hiding, ask.n_microbatches, limit_s)


def _floor_s(
    best: LeastExposed,
    solve: Callable[[ExposureWeights], Solution[RepeatedChoice] | None],
    problem: IntraOpProblem,
    case: int,
    ask: PlacementRequest,
    limit_s: float,
) -> float:
    """A lower bound on the step that needs no slack; 0 if the other one is nearly as good, or is at
    least `limit_s`. Recipes have none."""
    is_near = problem.slack_s(case) <= EXPOSED_GAP_GOAL * best.bound_s
    if is_near or best.bound_s >= limit_s or ask.runs_on is not None:
        return 0.0
    found = solve(problem.bound_weights)
    return 0.0 if found is None else found.bound_s + problem.launches_s


def _gap(objective_s: float, bound_s: float) -> float:
    """The relative distance of an objective to a lower bound."""
    return 0.0 if bound_s >= objective_s * (1 - 1e-9) else 1 - bound_s / objective_s


def _strategy(
    analysis: Analysis, problem: Repeated, choice: RepeatedChoice, ask: PlacementRequest
) -> Strategy:
    """The strategy that a choice means."""
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


def _infeasible(
    found: Infeasible,
    problem: ChoiceProblem,
    program: Program,
    budget_bytes: float | None,
    cost: CostModel,
) -> InfeasibleError:
    axes = ", ".join(f"{name}={size}" for name, size in cost.mesh.axes.items())
    if budget_bytes is not None and found.min_bytes is not None:
        return too_little_memory(budget_bytes, found.min_bytes, f"mesh ({axes})")
    what = "no plan satisfies the constraints together"
    names = dict.fromkeys(name.split()[0] for name in conflict(problem.merged()))
    if names:
        between = " and ".join(_place(program, name) for name in list(names)[:3])
        what += f": no placements of {between} fit each other"
    return InfeasibleError(
        what,
        where=f"mesh ({axes})",
        hint="relax manual=, forbid= or force= there; without them a plan is searched",
    )


def _place(program: Program, name: str) -> str:
    """A parameter, or an operator and its line."""
    parameter = program.parameters.get(name)
    return program.where(name) if parameter is None else f"`{parameter.name}`"


def too_little_memory(
    budget_bytes: float, least_bytes: float, where: str, leanest: str = "its leanest placement"
) -> InfeasibleError:
    """The error that names the missing bytes and what would help.

    `leanest` needs `least_bytes`: it says what they are of.
    """
    missing = least_bytes - budget_bytes
    return InfeasibleError(
        f"no plan fits in {format_bytes(budget_bytes)} per device; {leanest} needs "
        f"{format_bytes(least_bytes)}, {format_bytes(missing)} more",
        where=where,
        hint="use more microbatches or devices, allow ZeRO and recompute, or raise memory_limit",
        least_bytes=least_bytes,
    )
