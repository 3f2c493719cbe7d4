"""Simulate candidates: their stages are lowered with few of their blocks, joined and simulated.

A simulated candidate has a predicted step time and a predicted peak. The peak is above the bytes
that the solver counts: it includes gathered parameters, buckets, the workspace of operators, and a
block that is recomputed. If it exceeds the budget, placements are solved within smaller budgets
(`fit_to_budget`). The solver does not see what gathers need that follow each other, one for each
axis. So they are tried as one call, too, which needs less and may take longer.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from autopar.cost.laws import CostModel
from autopar.identity import Same
from autopar.mesh import LogicalMesh
from autopar.passes.analysis import Analysis, rename_lowered, rename_strategy
from autopar.passes.inter import Candidate
from autopar.passes.intra import Chosen, too_little_memory
from autopar.passes.lowering import Abridger, PlacedStage, fold_alike
from autopar.passes.search.evaluator import Evaluator, Proposal
from autopar.passes.solvers.problem import within
from autopar.plans import Predicted
from autopar.program.lines import Pipeline, StageProgram, Strategy
from autopar.schedule import ORDERS

# How often the solver's bytes are cut at most, when the simulated peak exceeds the budget.
MOST_CUTS = 24
# (pipeline, cost models of its stages) -> the prediction of a step: a `StepPricer`.
Pricer = Callable[[Pipeline, Sequence[CostModel]], Predicted]


@dataclass(frozen=True)
class Solved:
    """A candidate with every choice made, simulated. `objective_s` is what was minimised."""

    candidate: Candidate
    stages: tuple[PlacedStage, ...]
    predicted: Predicted
    objective_s: float
    gap: float

    @property
    def step_time_s(self) -> float:
        return self.predicted.step_time_s

    @property
    def peak_bytes(self) -> float:
        """Bytes of the device that needs most, with workspace."""
        return self.predicted.peak_bytes


@dataclass
class Simulator:
    """Simulates the solved candidates of an evaluator with `pricer`.

    `dataclasses.replace` gives a simulator for another evaluator of the same program; both share
    what was lowered and simulated.
    """

    evaluator: Evaluator
    pricer: Pricer
    _abridgers: dict[tuple[Analysis, str], Abridger] = field(default_factory=dict)
    # By the stage's program and mesh.
    _lowered: defaultdict[tuple[Analysis, LogicalMesh], list[tuple[Strategy, StageProgram]]] = (
        field(default_factory=lambda: defaultdict(list))
    )
    # Name, cut, schedule, microbatches and the choices themselves -> result
    _solved: dict[object, Solved] = field(default_factory=dict)

    def on(self, evaluator: Evaluator) -> Simulator:
        """The simulator of another evaluator of the program; both share results."""
        return self if evaluator is self.evaluator else replace(self, evaluator=evaluator)

    @property
    def _budget_bytes(self) -> float:
        return self.evaluator.budget_bytes

    def simulated(self, placed: Proposal) -> Solved:
        """Simulate a candidate; if its peak exceeds the budget, with leaner placements.

        Raises `InfeasibleError` if none fits.
        """
        found = self.fit_to_budget(placed, math.inf)
        assert isinstance(found, Solved)
        return found

    def simulate_if_fits(self, placed: Proposal) -> Solved | None:
        """Simulate a candidate with these placements; None if its peak exceeds the budget."""
        solved = self.simulate_once(placed)
        return solved if within(self._budget_bytes, solved.peak_bytes) else None

    def fit_to_budget(self, placed: Proposal, limit_s: float) -> Solved | float:
        """As `simulated`; or seconds, at least `limit_s`, below which nothing is found here.

        They are what the placements within a smaller budget take at least. Others may fit, too:
        their peaks may be nearer to the solver's bytes.

        If the peak exceeds the budget, the solver's bytes are cut by as much, until a peak fits.
        If larger ones may be faster by more than the tolerance, the largest that fit are searched
        by halves. Recipes have no lower bound, because their placements are not the fastest.

        Raises `InfeasibleError` if none fits.
        """
        solved = self.simulate_once(placed)
        if within(self._budget_bytes, solved.peak_bytes):
            return solved
        whole = self._gathered_in_one_call(solved, placed)
        if whole is not None and within(self._budget_bytes, whole.peak_bytes):
            return whole
        # Smaller budgets restrict the problem, so its lower bound holds for them.
        bound_s, least_bytes = solved.objective_s * (1 - solved.gap), solved.peak_bytes
        if placed.candidate.is_recipe:
            limit_s = math.inf
        # Steps are rarely below their bounds; if they are, then about as much for all placements.
        share = min(1.0, solved.step_time_s / placed.least_s)
        if placed.least_s * share >= limit_s:
            return placed.least_s * share
        found: Solved | float | None = None
        fewest_bytes = self.evaluator.least_bytes(placed.candidate)
        least_cut_bytes = (placed.size_bytes - fewest_bytes) / MOST_CUTS
        cut_bytes = solved.peak_bytes - self._budget_bytes
        while placed.size_bytes > fewest_bytes:
            smaller_bytes = max(placed.size_bytes - cut_bytes, fewest_bytes)
            leaner = self.evaluator.placed(placed.candidate, smaller_bytes)
            if leaner.least_s * share >= limit_s:  # smaller budgets are no faster
                fewest_bytes = smaller_bytes
                if not isinstance(found, Solved):
                    found = leaner.least_s * share
            elif within(self._budget_bytes, (solved := self.simulate_once(leaner)).peak_bytes):
                found, fewest_bytes = solved, smaller_bytes
                limit_s = min(limit_s, solved.step_time_s * (1 - self.evaluator.options.tolerance))
            else:
                least_bytes, placed = min(least_bytes, solved.peak_bytes), leaner
                cut_bytes = max(least_cut_bytes, solved.peak_bytes - self._budget_bytes)
                continue
            cut_bytes = (placed.size_bytes - fewest_bytes) / 2
            if cut_bytes < least_cut_bytes or placed.least_s * share >= limit_s:
                break
        if found is None:
            found = self._gathered_in_one_call(solved, placed)
        if found is None or (
            isinstance(found, Solved) and not within(self._budget_bytes, found.peak_bytes)
        ):
            raise too_little_memory(self._budget_bytes, least_bytes, placed.candidate.name)
        if isinstance(found, Solved):
            gap = max(found.gap, 1 - bound_s / found.objective_s)
            return replace(found, gap=0.0 if found.candidate.is_recipe else gap)
        return found

    def simulate_leanest(self, candidate: Candidate) -> Solved:
        """Simulate a candidate with its leanest placements.

        Raises `InfeasibleError` if no placement satisfies the constraints.
        """
        return self.simulate_once(
            self.evaluator.placed(candidate, self.evaluator.least_bytes(candidate))
        )

    @property
    def every_solved(self) -> Collection[Solved]:
        """All that was simulated, whatever its peak."""
        return self._solved.values()

    def simulate_once(self, placed: Proposal) -> Solved:
        """Simulate a candidate once, whatever its peak."""
        candidate, choices = placed.candidate, placed.choices
        key = (
            candidate.name, candidate.ends, candidate.schedule, candidate.n_microbatches,
            tuple(map(Same, choices)),
        )  # fmt: skip
        if key not in self._solved:
            self._solved[key] = self._simulate(candidate, choices)
        return self._solved[key]

    def _gathered_in_one_call(self, solved: Solved, placed: Proposal) -> Solved | None:
        """The same where parameters that are used whole are gathered over all axes at once; None
        if they are already, or the user says how they are stored."""
        limits = [layout.constraints for layout in solved.candidate.stages]
        strategies = [_gather_in_one_call(of.analysis, of.strategy) for of in solved.stages]
        is_given = any(of.pins or of.storage for of in limits)
        if is_given or all(
            s == of.strategy for s, of in zip(strategies, solved.stages, strict=True)
        ):
            return None
        choices = tuple(
            replace(chosen, read=partial(_itself, strategy))
            for chosen, strategy in zip(placed.choices, strategies, strict=True)
        )
        found = self.simulate_once(replace(placed, choices=choices))
        bound_s = solved.objective_s * (1 - solved.gap)
        objective_s = max(found.objective_s, found.step_time_s)
        gap = 0.0 if solved.candidate.is_recipe else 1 - bound_s / objective_s
        return replace(found, objective_s=objective_s, gap=gap)

    def _simulate(self, candidate: Candidate, choices: Sequence[Chosen]) -> Solved:
        stages = tuple(
            PlacedStage(part, chosen.strategy, self.evaluator.cost_of(layout.view))
            for part, layout, chosen in zip(
                self.evaluator.parts(candidate.ends), candidate.stages, choices, strict=True
            )
        )
        pipeline = self.pipeline(stages, candidate.schedule)
        predicted = self.pricer(pipeline, [s.cost for s in stages])
        # A recipe is solved on an abstract machine, and only the simulator joins stages. So the
        # objective of both is the simulated time.
        abstract = candidate.is_recipe
        is_simulated = abstract or len(stages) > 1
        slowest = stages[0].cost.runs.slowest_of(pipeline.n_ranks)
        objective_s = predicted.step_time_s if is_simulated else slowest * choices[0].objective_s
        gap = 0.0 if abstract else max(chosen.gap for chosen in choices)
        return Solved(candidate, stages, predicted, objective_s, gap)

    def pipeline(self, stages: Sequence[PlacedStage], schedule: str) -> Pipeline:
        """The stages lowered, with few of their blocks, and joined."""
        programs = [self._program(stage) for stage in stages]
        meshes = [stage.cost.mesh for stage in stages]
        return Pipeline.of(fold_alike(programs, meshes) or programs, meshes, ORDERS[schedule])

    def _program(self, stage: PlacedStage) -> StageProgram:
        """The lowered stage; equal stages of all candidates are lowered once."""
        first, names = self.evaluator.representative(stage.analysis)
        if names is not None:
            renaming = {there: name for name, there in names.items()}
            equal = PlacedStage(first, rename_strategy(stage.strategy, renaming), stage.cost)
            return rename_lowered(
                self._program(equal), first.program, stage.analysis.program, names
            )
        known = self._lowered[stage.analysis, stage.cost.mesh.canonical]
        for strategy, program in known:
            if strategy == stage.strategy:
                return program
        program = self._abridger(stage.analysis).lower(stage.strategy, stage.cost)
        known.append((stage.strategy, program))
        return program

    def _abridger(self, part: Analysis) -> Abridger:
        key = part, self.evaluator.recompute_key
        if key not in self._abridgers:
            self._abridgers[key] = Abridger(part, self.evaluator.runs(part))
        return self._abridgers[key]


def _itself(strategy: Strategy) -> Strategy:
    return strategy


def _gather_in_one_call(analysis: Analysis, strategy: Strategy) -> Strategy:
    """Parameters that no operator uses in shards are stored in the order of the mesh's axes."""
    in_shards = {
        name
        for operator in analysis.operators
        for name, spec in zip(
            operator.inputs, strategy.operators[operator.name].inputs, strict=True
        )
        if any(p.is_shard for p in spec.placements)
    }
    storage = {
        name: of if name in in_shards else replace(of, spec=replace(of.spec, order=()))
        for name, of in strategy.storage.items()
    }
    return replace(strategy, storage=storage)
