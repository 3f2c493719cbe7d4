"""Solving candidates: every stage's placements, what they cost together, the simulated step.

scored      every stage's optimum, and from them the time of a step: of several stages, the
            schedule played with their times and messages (`played.py`); costs little more than
            solving
simulated   the stages lowered with few of their blocks, joined, and the schedule played (`predict`)
"""

from __future__ import annotations

import itertools
import math
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import torch

from autopar.cost.hardware import Hardware
from autopar.cost.model import CostModel
from autopar.errors import InfeasibleError
from autopar.mesh import Device, Link, LogicalMesh
from autopar.options import Options
from autopar.passes.abridge import Abridger
from autopar.passes.analysis import Analysis
from autopar.passes.choose import Ask, Chooser, Chosen, too_little_memory
from autopar.passes.cut import cut
from autopar.passes.effort import Effort
from autopar.passes.folding import Run, find_runs, fold
from autopar.passes.intra_op import least_bytes
from autopar.passes.join import LaidStage
from autopar.passes.layout import Candidate, StageLayout
from autopar.passes.played import Boundary, Worked, step_s
from autopar.passes.recompute import Recomputable, aligned_runs
from autopar.passes.solvers.problem import within
from autopar.pipeline import Pipeline
from autopar.predicted import Predicted
from autopar.schedule import ORDERS, in_flight

# How far (relative) scores are from what is simulated on large models: they leave out that buckets
# fill, that biases are added by products, and launches of the optimizer.
SCORE_REL = 0.02
# How far they may be for a kind of candidate of which none was simulated yet: those of small
# pipelines leave out gradients of tied parameters, and how a stage's time divides into forward and
# backward.
UNSEEN_REL = 0.05
# Budgets of which some are tried, where what runs needs more than the solver's account of it:
# gathered parameters, buckets, what operators need while they run, and a block that runs again.
N_BUDGETS = 32
# (pipeline, the stages' costs) -> what a step takes
Predict = Callable[[Pipeline, Sequence[CostModel]], Predicted]


@dataclass(frozen=True)
class Scored:
    """A candidate with every stage solved; `score_s` is its step, played. `others` are the
    same with more microbatches, should it not fit."""

    candidate: Candidate
    choices: tuple[Chosen, ...]
    score_s: float
    others: tuple[Candidate, ...] = ()

    @property
    def size_bytes(self) -> float:
        """Of the stage that keeps most, by the solver's account."""
        return max(chosen.size_bytes for chosen in self.choices)


@dataclass(frozen=True)
class Solved:
    """A candidate with every choice made. `objective_s` is what was minimised."""

    candidate: Candidate
    stages: tuple[LaidStage, ...]
    step_time_s: float
    objective_s: float
    gap: float


@dataclass(frozen=True)
class _Stage:
    """What placements are chosen for: a range of the program's operators on a mesh, with so many
    microbatches, of which `depth` keep their activations at once."""

    part: Analysis
    operators: tuple[int, int]
    layout: StageLayout
    n_microbatches: int
    depth: int

    @property
    def key(self) -> tuple[object, ...]:
        """Equal where the choice is."""
        layout = self.layout
        placed = layout.view.placement, repr(layout.constraints)
        return self.operators, *placed, self.n_microbatches, self.depth


def compute_dtype(analysis: Analysis) -> torch.dtype:
    """The dtype most parameters have; matmuls are priced in it."""
    counts: dict[torch.dtype, int] = {}
    for info in analysis.program.parameters.values():
        if info.dtype.is_floating_point:
            counts[info.dtype] = counts.get(info.dtype, 0) + torch.Size(info.shape).numel()
    return max(counts, key=counts.__getitem__) if counts else torch.float32


def schedule_name(options: Options) -> str:
    """1f1b unless the user wants another: it is as fast as gpipe and keeps less."""
    return "1f1b" if options.schedule == "auto" else options.schedule


@lru_cache(maxsize=1024)
def n_in_flight(schedule: str, stage: int, n_stages: int, n_microbatches: int) -> int:
    """How many microbatches' activations a stage keeps at once."""
    return in_flight(ORDERS[schedule](n_stages, n_microbatches), stage)


@dataclass
class Evaluator:
    """Solves candidates of one program on one machine; equal stages are solved once.

    `views` are meshes that it and its stages will be asked for on, with some of `counts`
    microbatches. Solves close their gaps until the `deadline`, on the clock of `time.perf_counter`,
    for a second at least.
    """

    analysis: Analysis
    options: Options
    hardware: Hardware
    budget_bytes: float
    predict: Predict
    views: Sequence[LogicalMesh] = ()
    counts: Sequence[int] = ()
    deadline: float = math.inf
    _chosen: dict[object, Chosen] = field(default_factory=dict)
    _choosers: dict[tuple[int, bool], Chooser] = field(default_factory=dict)
    _abridgers: dict[int, Abridger] = field(default_factory=dict)
    _parts: dict[tuple[int, ...], tuple[Analysis, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dtype = compute_dtype(self.analysis)
        self.recomputable = Recomputable.of(self.analysis, self.options)

    @cached_property
    def without_recompute(self) -> Evaluator | None:
        """None where recompute is not what is searched; what is known of solves is shared."""
        if self.recomputable is None or not self.recomputable.is_choice:
            return None
        return replace(self, options=replace(self.options, recompute="none"))

    def parts(self, ends: tuple[int, ...]) -> tuple[Analysis, ...]:
        """The analyses of the stages that end so; of one stage, the whole."""
        if len(ends) == 1:
            return (self.analysis,)
        if ends not in self._parts:
            programs = cut(self.analysis.program, ends)
            self._parts[ends] = tuple(self.analysis.part(p) for p in programs)
        return self._parts[ends]

    def solve(self, candidate: Candidate) -> Solved:
        """Within the budget, and simulated.

        Raises `InfeasibleError` where a stage does not fit, `BatchError` where rows do not.
        """
        return self.simulated(self.scored(candidate, self.budget_bytes))

    def scored(
        self, candidate: Candidate, budget_bytes: float | None, limit_s: float = math.inf
    ) -> Scored:
        """What costs no less than `limit_s` need not be at its best, if it is one stage.

        Raises `InfeasibleError` where a stage does not fit, `BatchError` where rows do not.
        """
        return self._scored(candidate, self._choices(candidate, budget_bytes, limit_s))

    def without_activations(self, candidate: Candidate) -> Scored:
        """What recompute makes no faster: nothing runs again, and activations need no bytes.

        Raises `InfeasibleError` where a stage does not fit even so.
        """
        plain = self.without_recompute or self
        stages = (replace(stage, depth=0) for stage in self._stages(candidate))
        return self._scored(candidate, [plain._choose(s, self.budget_bytes) for s in stages])

    def _scored(self, candidate: Candidate, choices: Sequence[Chosen]) -> Scored:
        m = candidate.n_microbatches
        if len(choices) == 1:
            return Scored(candidate, tuple(choices), choices[0].objective_s)
        parts, loss = self.parts(candidate.ends), self.analysis.program.loss
        worked = [Worked((c.objective_s - c.once_s) / m, c.once_s) for c in choices]
        ends = [
            Boundary(layout.view, c.sent, c.received, part.microbatch_types(m).tensors)
            for part, layout, c in zip(parts, candidate.stages, choices, strict=True)
        ]
        loss_bytes = self.analysis.types.tensors[loss].itemsize if loss is not None else 0
        schedule, links = schedule_name(self.options), self.hardware.links
        score_s = step_s(schedule, m, worked, ends, links, loss_bytes)
        return Scored(candidate, tuple(choices), score_s)

    def bound_over_budget_s(self, candidate: Candidate) -> float | None:
        """A lower bound on the objective where the optimum without a budget exceeds it; None
        where it fits.

        Of a recipe, whose layout is not what is fastest, the bound is 0.
        """
        choices = self._choices(candidate, None)
        if all(chosen.size_bytes <= self.budget_bytes for chosen in choices):
            return None
        return 0.0 if candidate.is_recipe else max(chosen.objective_s for chosen in choices)

    def _choices(
        self, candidate: Candidate, budget_bytes: float | None, limit_s: float = math.inf
    ) -> list[Chosen]:
        """Every stage's placements."""
        if len(candidate.stages) > 1 or candidate.is_recipe:  # scores are of other numbers
            limit_s = math.inf
        return [self._choose(stage, budget_bytes, limit_s) for stage in self._stages(candidate)]

    def _stages(self, candidate: Candidate) -> Iterator[_Stage]:
        for k, layout in enumerate(candidate.stages):
            yield self._stage(candidate.ends, k, layout, candidate.n_microbatches)

    def _stage(
        self, ends: tuple[int, ...], k: int, layout: StageLayout, n_microbatches: int
    ) -> _Stage:
        depth = n_in_flight(schedule_name(self.options), k, len(ends), n_microbatches)
        operators = (ends[k - 1] if k else 0, ends[k])
        return _Stage(self.parts(ends)[k], operators, layout, n_microbatches, depth)

    def simulated(self, scored: Scored) -> Solved:
        """The stages lowered, joined and simulated; where that needs more than the budget, those of
        a smaller one at which its peak is within it.

        Raises `InfeasibleError` where none fits.
        """
        solved, peak_bytes = self._simulated(scored)
        if within(self.budget_bytes, peak_bytes):
            return solved
        # Smaller budgets solve another problem; what is proven of this one holds.
        bound_s, least_bytes = solved.objective_s * (1 - solved.gap), peak_bytes
        size_bytes, known = scored.size_bytes, {scored.size_bytes: (solved, peak_bytes)}
        budgets, fitting = self._smaller_budgets(scored.candidate), None
        low, high = 0, len(budgets)
        while low < high:
            if fitting is None:  # as much more is needed as was needed here
                wanted_bytes = self.budget_bytes - (peak_bytes - size_bytes)
                at = bisect_left(budgets, -wanted_bytes, low, high - 1, key=lambda b: -b)
            else:
                at = (low + high) // 2
            leaner = self.scored(scored.candidate, budgets[at])
            size_bytes = leaner.size_bytes
            if size_bytes not in known:
                known[size_bytes] = self._simulated(leaner)
            solved, peak_bytes = known[size_bytes]
            if within(self.budget_bytes, peak_bytes):
                fitting, high = solved, at
            else:
                least_bytes, low = min(least_bytes, peak_bytes), at + 1
        if fitting is None:
            raise too_little_memory(self.budget_bytes, least_bytes, scored.candidate.name)
        gap = max(fitting.gap, 1 - bound_s / fitting.objective_s)
        return replace(fitting, gap=0.0 if fitting.candidate.is_recipe else gap)

    def _smaller_budgets(self, candidate: Candidate) -> list[float]:
        """Those below the budget, falling, from what the fastest placements keep to what the
        leanest do, in steps that do not depend on the budget: so that with less memory no plan is
        faster."""
        free = max(chosen.size_bytes for chosen in self._choices(candidate, None))
        least_bytes = self._least_bytes(candidate)
        steps = (free + (least_bytes - free) * k / N_BUDGETS for k in range(1, N_BUDGETS + 1))
        return [budget_bytes for budget_bytes in steps if budget_bytes <= self.budget_bytes]

    def _least_bytes(self, candidate: Candidate) -> float:
        """The smallest budget that a candidate has placements for.

        Raises `InfeasibleError` where the constraints leave nothing.
        """
        return max(map(self._least_bytes_of, self._stages(candidate)))

    def _least_bytes_of(self, stage: _Stage) -> float:
        """Nothing is searched for it: what fits in no bytes is asked for."""
        try:
            return self._choose(stage, 0.0).size_bytes
        except InfeasibleError as error:
            if error.least_bytes is None:
                raise
            return error.least_bytes * (1 + 1e-9)

    def leanest(self, candidate: Candidate) -> tuple[Solved, float]:
        """A candidate with the placements that keep least, simulated; and its most bytes of a
        device, which count what operators need while they run.

        Raises `InfeasibleError` where the constraints leave nothing.
        """
        return self._simulated(self.scored(candidate, self._least_bytes(candidate)))

    def _simulated(self, scored: Scored) -> tuple[Solved, float]:
        """And the most bytes of a device."""
        candidate, choices = scored.candidate, scored.choices
        stages = tuple(
            LaidStage(part, chosen.strategy, CostModel(layout.view, self.dtype))
            for part, layout, chosen in zip(
                self.parts(candidate.ends), candidate.stages, choices, strict=True
            )
        )
        programs = [self._abridger(s.analysis).lower(s.strategy, s.cost) for s in stages]
        order = ORDERS[schedule_name(self.options)]
        pipeline = Pipeline.of(programs, [s.cost.mesh for s in stages], order)
        predicted = self.predict(pipeline, [s.cost for s in stages])
        time_s = predicted.step_time_s
        # A recipe is laid out on an abstract machine, and stages are joined by the simulator:
        # their cost is this one's.
        abstract = candidate.is_recipe
        objective_s = time_s if abstract or len(stages) > 1 else choices[0].objective_s
        gap = 0.0 if abstract else max(chosen.gap for chosen in choices)
        solved = Solved(candidate, stages, time_s, objective_s, gap)
        return solved, predicted.peak_bytes

    def simulated_fastest(
        self, scored: Sequence[Scored]
    ) -> tuple[list[Solved], dict[str, InfeasibleError]]:
        """The candidates simulated, those of least score first, until what the rest score is out of
        reach of the fastest: by `SCORE_REL` and more than scores of their kind were off so far, or
        `UNSEEN_REL`. What does not fit after all is tried with more microbatches; and by name those
        that still do not."""
        found: list[Solved] = []
        failed: dict[str, InfeasibleError] = {}
        off_rel: dict[object, float] = {}
        waiting = sorted(scored, key=lambda s: s.score_s)
        while waiting:
            one = waiting.pop(0)
            kind = len(one.candidate.stages) > 1, one.candidate.is_recipe
            least_s = min((s.step_time_s for s in found), default=math.inf)
            reach_rel = SCORE_REL + off_rel.get(kind, UNSEEN_REL)
            if least_s * (1 + reach_rel) <= one.score_s:
                continue
            try:
                found.append(self.simulated(one))
            except InfeasibleError as error:
                leaner = self._with_more_microbatches(one)
                if leaner is None:
                    failed[one.candidate.name] = error
                else:
                    insort(waiting, leaner, key=lambda s: s.score_s)
                continue
            off = abs(one.score_s / found[-1].step_time_s - 1)
            off_rel[kind] = max(off_rel.get(kind, 0.0), off)
        return found, failed

    def _with_more_microbatches(self, scored: Scored) -> Scored | None:
        """The next of the others that has placements within the budget; None if there is none."""
        for i, candidate in enumerate(scored.others):
            try:
                found = self.scored(candidate, self.budget_bytes)
            except InfeasibleError:
                continue
            return replace(found, others=scored.others[i + 1 :])
        return None

    def stage_without_parameters(self, ends: tuple[int, ...]) -> int | None:
        """The first stage that no optimizer could be made for; None if there is none."""
        operators, parameters = self.analysis.operators, self.analysis.program.parameters
        learns = {name for name, info in parameters.items() if info.requires_grad}
        for k, (first, end) in enumerate(itertools.pairwise((0, *ends))):
            read = (name for operator in operators[first:end] for name in operator.inputs)
            if len(ends) > 1 and learns.isdisjoint(read):
                return k
        return None

    def effort(self, n_configurations: int) -> Effort:
        """What was solved so far; `n_configurations` as in `Effort`."""
        largest = max(self._chosen.values(), key=lambda c: (c.n_written_out, c.n_variables))
        n_solved = len(self._chosen)
        return Effort(largest.n_written_out, largest.n_variables, n_configurations, n_solved)

    def may_fit(self, candidate: Candidate) -> bool:
        """False where a lower bound on the bytes of some stage is above the budget."""
        return all(
            least_bytes(
                stage.part, CostModel(stage.layout.view, self.dtype), stage.n_microbatches,
                self.options.optimizer, stage.depth, self.recomputable,
            )
            <= self.budget_bytes
            for stage in self._stages(candidate)
        )  # fmt: skip

    def fastest(
        self,
        ends: tuple[int, ...],
        choices: Sequence[Sequence[StageLayout]],
        n_microbatches: int,
    ) -> tuple[StageLayout, ...]:
        """Of each stage's layouts the one that is fastest for it.

        Raises `InfeasibleError` where none fits.
        """
        picked = []
        for k, layouts in enumerate(choices):
            found: list[tuple[float, int]] = []
            failure: InfeasibleError | None = None
            for i, layout in enumerate(layouts):
                try:
                    stage = self._stage(ends, k, layout, n_microbatches)
                    chosen = self._choose(stage, self.budget_bytes)
                    found.append((chosen.objective_s, i))
                except InfeasibleError as error:
                    failure = error
            if failure is not None and not found:
                raise failure
            picked.append(layouts[min(found)[1]])
        return tuple(picked)

    def _abridger(self, part: Analysis) -> Abridger:
        if id(part) not in self._abridgers:
            self._abridgers[id(part)] = Abridger(part, self._runs(part, self.recomputable))
        return self._abridgers[id(part)]

    @staticmethod
    def _runs(part: Analysis, recomputable: Recomputable | None) -> tuple[Run, ...]:
        return find_runs(part) if recomputable is None else aligned_runs(part, recomputable)

    def _chooser(self, part: Analysis, recomputable: Recomputable | None) -> Chooser:
        key = id(part), recomputable is not None  # parts live as long as this
        if key not in self._choosers:
            folded = fold(part, self._runs(part, recomputable))
            asked = self.options.optimizer, recomputable
            if recomputable is not None and recomputable.is_choice:  # few are asked for
                self._choosers[key] = Chooser(folded, *asked)
            else:
                real = tuple(CostModel(view, self.dtype) for view in self.views)
                families = (real, tuple(map(recipe_cost, real)))
                self._choosers[key] = Chooser(folded, *asked, families, self.counts)
        return self._choosers[key]

    def _left_s(self) -> float | None:
        """Until the deadline; None where there is none."""
        if math.isinf(self.deadline):
            return None
        return max(1.0, self.deadline - time.perf_counter())

    def _choose(
        self, stage: _Stage, budget_bytes: float | None, limit_s: float = math.inf
    ) -> Chosen:
        """Recompute is chosen where the fastest placements without it do not fit, and where what
        fits without it is slower."""
        recomputable, plain = self.recomputable, self.without_recompute
        if plain is not None:
            free = plain._choose(stage, None)
            if within(budget_bytes, free.size_bytes):
                return free
        key = stage.key, budget_bytes, recomputable is not None
        if key not in self._chosen:
            cost, constraints = CostModel(stage.layout.view, self.dtype), stage.layout.constraints
            ask = Ask(cost, stage.n_microbatches, constraints, stage.depth)
            if constraints.roles:
                ask = replace(ask, cost=recipe_cost(cost), runs_on=cost)
            chosen = self._chooser(stage.part, recomputable).choose(
                ask, budget_bytes, self.options.solver, self._left_s(), limit_s
            )
            if chosen.bound_s >= limit_s:
                return chosen
            if plain is not None:
                with suppress(InfeasibleError):
                    chosen = _faster(chosen, plain._choose(stage, budget_bytes))
            self._chosen[key] = chosen
        return self._chosen[key]


def _faster(chosen: Chosen, other: Chosen) -> Chosen:
    """The faster one of what was chosen among all choices and among fewer, each up to a gap: the
    bound is that of all."""
    if other.objective_s > chosen.objective_s:
        return chosen
    return replace(other, gap=max(0.0, 1 - chosen.bound_s / other.objective_s))


def recipe_cost(cost: CostModel) -> CostModel:
    """The abstract machine a recipe is laid out on: flops dearest, then bytes moved between
    ranks, then bytes touched.

    The Megatron layout is the optimum of that order: split every product that can be, with
    the least communication. Real rates would let small models replicate.
    """
    mesh = cost.mesh
    machine = Device(flops_per_s=1.0, bytes_per_s=1e3, memory_bytes=mesh.device.memory_bytes)
    links = (Link(1.0, 1.0),) * mesh.n_axes
    view = LogicalMesh(mesh.sizes, mesh.names, links, machine, mesh.first_rank)
    return CostModel(view, cost.dtype)
