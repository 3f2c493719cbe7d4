"""Simulating candidates: lowered with few of their blocks, joined, and the schedule played.

What is simulated has the predicted time of a step and the predicted peak, which is above what the
solver accounts for: gathered parameters, buckets, what operators need while they run, and a block
that runs again. Where that exceeds the budget, placements are chosen within smaller ones.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.cost.laws import CostModel
from autopar.errors import InfeasibleError
from autopar.mesh import LogicalMesh
from autopar.options import schedule_name
from autopar.passes.analysis import Analysis, lowered_as, renamed
from autopar.passes.inter import Candidate
from autopar.passes.intra import Chosen, too_little_memory
from autopar.passes.lowering import Abridger, PlacedStage
from autopar.passes.search.evaluator import Evaluator, Scored
from autopar.passes.solvers.problem import within
from autopar.plans import Predicted
from autopar.program import Pipeline, StageProgram, Strategy
from autopar.schedule import ORDERS

# How far (relative) scores are from what is simulated on large models: they leave out that buckets
# fill, that biases are added by products, and launches of the optimizer.
SCORE_REL = 0.02
# How much more they may be above it where stages were not simulated yet: scores of small pipelines
# leave out how a stage's time divides into forward and backward (up to 4% too much was seen).
UNSEEN_REL = 0.05
# Budgets of which some are tried, where what runs needs more than the solver's account of it:
# gathered parameters, buckets, what operators need while they run, and a block that runs again.
N_BUDGETS = 32
# (pipeline, the stages' costs) -> what a step takes: a `StepPricer`
Pricer = Callable[[Pipeline, Sequence[CostModel]], Predicted]


@dataclass(frozen=True)
class Solved:
    """A candidate with every choice made. `objective_s` is what was minimised."""

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
        """Of the device that needs most, with what operators need while they run."""
        return self.predicted.peak_bytes


@dataclass(frozen=True)
class Simulated:
    """Of many candidates those that were simulated; by name those that do not fit, and those whose
    placements that may fit take longer than the fastest, with what they take at least."""

    found: Sequence[Solved]
    failed: Mapping[str, InfeasibleError]
    slower_s: Mapping[str, float]


@dataclass
class Simulator:
    """Simulates what an evaluator scored, by `pricer`. One of another evaluator of the same
    program shares what was lowered and simulated (`dataclasses.replace`)."""

    evaluator: Evaluator
    pricer: Pricer
    _abridgers: dict[tuple[int, bool], Abridger] = field(default_factory=dict)
    # By the stage's program and mesh.
    _lowered: defaultdict[tuple[int, LogicalMesh], list[tuple[Strategy, StageProgram]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    # By what tells candidates apart once every choice is made; the choices live as long as this.
    _known: dict[object, tuple[Scored, Solved]] = field(default_factory=dict)

    @property
    def _budget_bytes(self) -> float:
        return self.evaluator.budget_bytes

    def solve(self, candidate: Candidate) -> Solved:
        """Within the budget, and simulated.

        Raises `InfeasibleError` where a stage does not fit, `BatchError` where rows do not.
        """
        return self.simulated(self.evaluator.scored(candidate, self._budget_bytes))

    def simulated(self, scored: Scored) -> Solved:
        """The stages lowered, joined and simulated; where that needs more than the budget, those of
        a smaller one at which its peak is within it.

        Raises `InfeasibleError` where none fits.
        """
        found = self.fitting(scored, math.inf)
        assert isinstance(found, Solved)
        return found

    def as_it_is(self, scored: Scored) -> Solved | None:
        """The stages lowered, joined and simulated; None where that needs more than the budget."""
        solved = self._simulated(scored)
        return solved if within(self._budget_bytes, solved.peak_bytes) else None

    def fitting(self, scored: Scored, limit_s: float) -> Solved | float:
        """As `simulated`; or, where that is no less than `limit_s`, what a step takes at least: no
        bound is known of recipes, whose placements are not what is fastest."""
        solved = self._simulated(scored)
        if within(self._budget_bytes, solved.peak_bytes):
            return solved
        # Smaller budgets solve another problem; what is proven of this one holds.
        bound_s, least_bytes = solved.objective_s * (1 - solved.gap), solved.peak_bytes
        if scored.candidate.is_recipe:
            limit_s = math.inf
        least_s = solved.step_time_s * (1 - solved.gap)
        if least_s >= limit_s:
            return least_s
        off = solved.step_time_s / scored.score_s  # about the same of all its placements
        size_bytes, known = scored.size_bytes, {scored.size_bytes: solved}
        budgets, fitting, slow_s = self._smaller_budgets(scored.candidate), None, None
        low, high = 0, len(budgets)
        while low < high:
            if fitting is None:  # as much more is needed as was needed here
                wanted_bytes = self._budget_bytes - (solved.peak_bytes - size_bytes)
                at = bisect_left(budgets, -wanted_bytes, low, high - 1, key=lambda b: -b)
            else:
                at = (low + high) // 2
            leaner = self.evaluator.scored(scored.candidate, budgets[at])
            gap = max(chosen.gap for chosen in leaner.choices)
            least_s = leaner.score_s * (1 - gap) * off
            if least_s >= limit_s:  # and those that keep less
                slow_s, high = least_s, at
                continue
            size_bytes = leaner.size_bytes
            if size_bytes not in known:
                known[size_bytes] = self._simulated(leaner)
            solved = known[size_bytes]
            if within(self._budget_bytes, solved.peak_bytes):
                fitting, high = solved, at
            else:
                least_bytes, low = min(least_bytes, solved.peak_bytes), at + 1
        if fitting is None and slow_s is not None:
            return slow_s
        if fitting is None:
            raise too_little_memory(self._budget_bytes, least_bytes, scored.candidate.name)
        gap = max(fitting.gap, 1 - bound_s / fitting.objective_s)
        return replace(fitting, gap=0.0 if fitting.candidate.is_recipe else gap)

    def _smaller_budgets(self, candidate: Candidate) -> list[float]:
        """Those below the budget, falling, from what the fastest placements keep to what the
        leanest do, in steps that do not depend on the budget: so that with less memory no plan is
        faster."""
        free, least = self.evaluator.free_bytes(candidate), self.evaluator.least_bytes(candidate)
        steps = (free + (least - free) * k / N_BUDGETS for k in range(1, N_BUDGETS + 1))
        return [budget_bytes for budget_bytes in steps if budget_bytes <= self._budget_bytes]

    def leanest(self, candidate: Candidate) -> Solved:
        """A candidate with the placements that keep least, simulated.

        Raises `InfeasibleError` where the constraints leave nothing.
        """
        return self._simulated(
            self.evaluator.scored(candidate, self.evaluator.least_bytes(candidate))
        )

    def _simulated(self, scored: Scored) -> Solved:
        """Whatever its peak."""
        candidate, choices = scored.candidate, scored.choices
        key = candidate.name, candidate.ends, candidate.n_microbatches, tuple(map(id, choices))
        if key not in self._known:
            self._known[key] = scored, self._simulated_anew(candidate, choices)
        return self._known[key][1]

    def _simulated_anew(self, candidate: Candidate, choices: Sequence[Chosen]) -> Solved:
        stages = tuple(
            PlacedStage(part, chosen.strategy, CostModel(layout.view, self.evaluator.dtype))
            for part, layout, chosen in zip(
                self.evaluator.parts(candidate.ends), candidate.stages, choices, strict=True
            )
        )
        programs = [self._program(stage) for stage in stages]
        order = ORDERS[schedule_name(self.evaluator.options)]
        pipeline = Pipeline.of(programs, [s.cost.mesh for s in stages], order)
        predicted = self.pricer(pipeline, [s.cost for s in stages])
        # A recipe is laid out on an abstract machine, and stages are joined by the simulator:
        # their cost is this one's.
        abstract = candidate.is_recipe
        is_simulated = abstract or len(stages) > 1
        objective_s = predicted.step_time_s if is_simulated else choices[0].objective_s
        gap = 0.0 if abstract else max(chosen.gap for chosen in choices)
        return Solved(candidate, stages, predicted, objective_s, gap)

    def _program(self, stage: PlacedStage) -> StageProgram:
        """Lowered; the one that is known already where another candidate has this stage, or one
        that is alike."""
        first, names = self.evaluator.first_like(stage.analysis)
        if names is not None:
            own = {there: name for name, there in names.items()}
            like = PlacedStage(first, renamed(stage.strategy, own), stage.cost)
            return lowered_as(self._program(like), first.program, stage.analysis.program, names)
        known = self._lowered[id(stage.analysis), stage.cost.mesh.placement]
        for strategy, program in known:
            if strategy == stage.strategy:
                return program
        program = self._abridger(stage.analysis).lower(stage.strategy, stage.cost)
        known.append((stage.strategy, program))
        return program

    def fastest(self, scored: Sequence[Scored]) -> Simulated:
        """The candidates simulated, those of least score first, until what the rest score is out of
        reach of the fastest: by `SCORE_REL` and more than scores of their kind were too much so
        far, or `UNSEEN_REL`. What does not fit after all is tried with more microbatches."""
        found: list[Solved] = []
        failed: dict[str, InfeasibleError] = {}
        slower_s: dict[str, float] = {}
        over_rel: dict[object, float] = {}
        waiting = sorted(scored, key=lambda s: s.score_s)
        while waiting:
            one = waiting.pop(0)
            is_pipeline = len(one.candidate.stages) > 1
            kind = is_pipeline, one.candidate.is_recipe
            least_s = min((s.step_time_s for s in found), default=math.inf)
            kind_rel = over_rel.get(kind, UNSEEN_REL if is_pipeline else 0.0)
            if least_s * (1 + SCORE_REL + kind_rel) <= one.score_s:
                continue
            try:
                solved = self.fitting(one, least_s * (1 + kind_rel))
            except InfeasibleError as error:
                leaner = self._with_more_microbatches(one)
                if leaner is None:
                    failed[one.candidate.name] = error
                else:
                    insort(waiting, leaner, key=lambda s: s.score_s)
                continue
            if isinstance(solved, float):
                slower_s[one.candidate.name] = solved
                continue
            found.append(solved)
            over = one.score_s / solved.step_time_s - 1
            over_rel[kind] = max(over_rel.get(kind, 0.0), over)
        return Simulated(found, failed, slower_s)

    def _with_more_microbatches(self, scored: Scored) -> Scored | None:
        """The next of the others that has placements within the budget; None if there is none."""
        for i, candidate in enumerate(scored.others):
            try:
                found = self.evaluator.scored(candidate, self._budget_bytes)
            except InfeasibleError:
                continue
            return replace(found, others=scored.others[i + 1 :])
        return None

    def _abridger(self, part: Analysis) -> Abridger:
        key = id(part), self.evaluator.recomputable is not None
        if key not in self._abridgers:
            self._abridgers[key] = Abridger(part, self.evaluator.runs(part))
        return self._abridgers[key]
