"""Solving candidates: every stage's placements, and what they cost together.

A candidate's *score* is the time of a step by its stages' optima: of several stages, the schedule
played with their times and messages (`played.py`). It costs little more than solving; the most
promising are simulated then (`simulated.py`).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from autopar.cost.hardware import Hardware
from autopar.cost.laws import CostModel
from autopar.errors import InfeasibleError
from autopar.mesh import LogicalMesh
from autopar.options import Options, schedule_name
from autopar.passes.analysis import (
    Analysis,
    Numbered,
    Recomputable,
    Run,
    aligned_runs,
    compute_dtype,
    cut,
    find_runs,
    fold,
    is_searched,
)
from autopar.passes.inter import Candidate, StageBoundary, StageLayout, StageSeconds, step_s
from autopar.passes.intra import Chooser, Chosen, PlacementRequest, least_bytes, recipe_cost
from autopar.passes.search.stats import PlanningStats
from autopar.passes.solvers.problem import within
from autopar.schedule import ORDERS, in_flight


@dataclass(frozen=True)
class Scored:
    """A candidate with every stage solved; `score_s` is its step, played. `others` are the
    same with more microbatches, should it not fit; `open_s` is what it may take at least, it or
    what it was compared with, if that were settled."""

    candidate: Candidate
    choices: tuple[Chosen, ...]
    score_s: float
    others: tuple[Candidate, ...] = ()
    open_s: float = math.inf

    @property
    def size_bytes(self) -> float:
        """Of the stage that keeps most, by the solver's account."""
        return max(chosen.size_bytes for chosen in self.choices)


@dataclass(frozen=True)
class _Stage:
    """What placements are chosen for: a part of the program on a mesh, with so many microbatches,
    of which `depth` keep their activations at once. `names` are those of a part that is alike and
    asks for them: None where that is the part itself."""

    part: Analysis
    names: Mapping[str, str] | None
    layout: StageLayout
    n_microbatches: int
    depth: int

    @property
    def key(self) -> tuple[object, ...]:
        """Equal where the choice is."""
        layout = self.layout
        placed = layout.view.placement, repr(layout.constraints)
        return id(self.part), *placed, self.n_microbatches, self.depth  # parts are kept


@lru_cache(maxsize=128)
def depths(schedule: str, n_stages: int, n_microbatches: int) -> tuple[int, ...]:
    """How many microbatches' activations every stage keeps at once."""
    order = ORDERS[schedule](n_stages, n_microbatches)
    return tuple(in_flight(order, stage) for stage in range(n_stages))


@dataclass
class Evaluator:
    """Solves candidates of one program on one machine; equal stages are solved once.

    `views` are meshes that it and its stages will be asked for on, with some of `counts`
    microbatches. Solves close their gaps until the `deadline`, on the clock of `time.perf_counter`,
    for a second at least; unless it `closes` gaps, those that blocks share are left.
    """

    analysis: Analysis
    options: Options
    hardware: Hardware
    budget_bytes: float
    views: Sequence[LogicalMesh] = ()
    counts: Sequence[int] = ()
    deadline: float = math.inf
    closes: bool = True
    _chosen: dict[object, Chosen] = field(default_factory=dict)
    _choosers: dict[tuple[int, bool], Chooser] = field(default_factory=dict)
    _parts: dict[tuple[int, ...], tuple[Analysis, ...]] = field(default_factory=dict)
    # By likeness the first of the parts that are alike; and by part that one, with the part's names
    # of what it has.
    _first: dict[Hashable, tuple[Analysis, Numbered]] = field(default_factory=dict)
    _alike: dict[int, tuple[Analysis, Mapping[str, str] | None]] = field(default_factory=dict)
    _named: dict[tuple[int, int], tuple[Chosen, Chosen]] = field(default_factory=dict)
    # What runs again tells parts apart, also for who searches without recompute.
    _again: Recomputable | None = None

    def __post_init__(self) -> None:
        self.dtype = compute_dtype(self.analysis)
        self.recomputable = Recomputable.of(self.analysis, self.options)
        self._again = self._again or self.recomputable

    @cached_property
    def without_recompute(self) -> Evaluator | None:
        """None where recompute is not what is searched; what is known of solves is shared."""
        if not is_searched(self.recomputable):
            return None
        return replace(self, options=replace(self.options, recompute="none"))

    @cached_property
    def hasty(self) -> Evaluator:
        """One that leaves gaps open; what is known of solves is shared."""
        return replace(self, closes=False)

    def parts(self, ends: tuple[int, ...]) -> tuple[Analysis, ...]:
        """The analyses of the stages that end so; of one stage, the whole."""
        if len(ends) == 1:
            return (self.analysis,)
        if ends not in self._parts:
            programs = cut(self.analysis.program, ends)
            self._parts[ends] = tuple(self.analysis.part(p) for p in programs)
        return self._parts[ends]

    def scored(
        self, candidate: Candidate, budget_bytes: float | None, limit_s: float = math.inf
    ) -> Scored:
        """What costs no less than `limit_s` need not be at its best, if it is one stage.

        Raises `InfeasibleError` where a stage does not fit, `BatchError` where rows do not.
        """
        return self._scored(candidate, self._choices(candidate, budget_bytes, limit_s))

    def without_activations(self, candidate: Candidate, limit_s: float = math.inf) -> Scored:
        """What recompute makes no faster: nothing runs again, and activations need no bytes;
        `limit_s` as in `scored`.

        Raises `InfeasibleError` where a stage does not fit even so.
        """
        plain, limit_s = self.without_recompute or self, _limit_s(candidate, limit_s)
        stages = (replace(stage, depth=0) for stage in self._stages(candidate))
        choices = [plain._choose_named(s, self.budget_bytes, limit_s) for s in stages]
        return self._scored(candidate, choices)

    def _scored(self, candidate: Candidate, choices: Sequence[Chosen]) -> Scored:
        m = candidate.n_microbatches
        if len(choices) == 1:
            (chosen,) = choices
            open_s = math.inf if chosen.settled else chosen.bound_s
            return Scored(candidate, (chosen,), chosen.objective_s, open_s=open_s)
        parts, loss = self.parts(candidate.ends), self.analysis.program.loss
        worked = [StageSeconds((c.objective_s - c.once_s) / m, c.once_s) for c in choices]
        ends = [
            StageBoundary(layout.view, c.sent, c.received, part.microbatch_types(m).tensors)
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
        limit_s = _limit_s(candidate, limit_s)
        return [self._choose_named(s, budget_bytes, limit_s) for s in self._stages(candidate)]

    def _stages(self, candidate: Candidate) -> Iterator[_Stage]:
        for k, layout in enumerate(candidate.stages):
            yield self._stage(candidate.ends, k, layout, candidate.n_microbatches)

    def _stage(
        self, ends: tuple[int, ...], k: int, layout: StageLayout, n_microbatches: int
    ) -> _Stage:
        depth = depths(schedule_name(self.options), len(ends), n_microbatches)[k]
        part = self.parts(ends)[k]
        names: Mapping[str, str] | None = None
        if not (layout.constraints.pins or layout.constraints.storage):
            part, names = self.first_like(part)
        return _Stage(part, names, layout, n_microbatches, depth)

    def first_like(self, part: Analysis) -> tuple[Analysis, Mapping[str, str] | None]:
        """The first part asked for that is like this one, and its names here; None if it is it."""
        if part is self.analysis:
            return part, None
        if id(part) not in self._alike:
            numbered = Numbered.of(part, self._again.within(part) if self._again else ())
            first, known = self._first.setdefault(numbered.likeness, (part, numbered))
            self._alike[id(part)] = first, None if first is part else known.names_in(numbered)
        return self._alike[id(part)]

    def least_bytes(self, candidate: Candidate) -> float:
        """The smallest budget that a candidate has placements for.

        Raises `InfeasibleError` where the constraints leave nothing.
        """
        return max(map(self._least_bytes_of, self._stages(candidate)))

    def free_bytes(self, candidate: Candidate) -> float:
        """What a candidate's fastest placements keep, by the solver's account."""
        return max(chosen.size_bytes for chosen in self._choices(candidate, None))

    def _least_bytes_of(self, stage: _Stage) -> float:
        """Nothing is searched for it: what fits in no bytes is asked for."""
        try:
            return self._choose(stage, 0.0).size_bytes
        except InfeasibleError as error:
            if error.least_bytes is None:
                raise
            return error.least_bytes * (1 + 1e-9)

    def stage_without_parameters(self, ends: tuple[int, ...]) -> int | None:
        """The first stage that no optimizer could be made for; None if there is none."""
        operators, parameters = self.analysis.operators, self.analysis.program.parameters
        learns = {name for name, info in parameters.items() if info.requires_grad}
        for k, (first, end) in enumerate(itertools.pairwise((0, *ends))):
            read = (name for operator in operators[first:end] for name in operator.inputs)
            if len(ends) > 1 and learns.isdisjoint(read):
                return k
        return None

    def stats(self, n_configurations: int) -> PlanningStats:
        """What was solved so far; `n_configurations` as in `PlanningStats`."""
        largest = max(self._chosen.values(), key=lambda c: (c.n_written_out, c.n_variables))
        n_solved = len(self._chosen)
        return PlanningStats(largest.n_written_out, largest.n_variables, n_configurations, n_solved)

    def may_fit(self, candidate: Candidate) -> bool:
        """False where a lower bound on the bytes of some stage is above the budget."""
        return all(
            least_bytes(
                stage.part, CostModel(stage.layout.view, self.dtype), stage.n_microbatches,
                self.options.optimizer, stage.layout.constraints, stage.depth, self.recomputable,
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

    def runs(self, part: Analysis) -> tuple[Run, ...]:
        """The repeated blocks of a program or a stage; each may run again where any may."""
        found = self.recomputable
        return find_runs(part) if found is None else aligned_runs(part, found)

    def _chooser(self, part: Analysis) -> Chooser:
        recomputable = self.recomputable
        key = id(part), recomputable is not None  # parts live as long as this
        if key not in self._choosers:
            folded = fold(part, self.runs(part))
            asked = self.options.optimizer, recomputable
            if is_searched(recomputable) and part is not self.analysis:  # few are asked for
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

    def _choose_named(
        self, stage: _Stage, budget_bytes: float | None, limit_s: float = math.inf
    ) -> Chosen:
        """`_choose`, under the names of who asks."""
        chosen = self._choose(stage, budget_bytes, limit_s)
        if stage.names is None:
            return chosen
        key = id(chosen), id(stage.names)
        if key not in self._named:
            self._named[key] = chosen, chosen.named(stage.names)
        return self._named[key][1]

    def _choose(
        self, stage: _Stage, budget_bytes: float | None, limit_s: float = math.inf
    ) -> Chosen:
        """Recompute is chosen where the fastest placements without it do not fit, and where what
        fits without it is slower."""
        recomputable, plain = self.recomputable, self.without_recompute
        if plain is not None:
            if budget_bytes is None:
                return plain._choose(stage, None, limit_s)
            free = plain._choose(stage, None)
            if within(budget_bytes, free.size_bytes):
                return free
        key = stage.key, budget_bytes, recomputable is not None
        if key not in self._chosen:
            cost, constraints = CostModel(stage.layout.view, self.dtype), stage.layout.constraints
            ask = PlacementRequest(cost, stage.n_microbatches, constraints, stage.depth)
            if constraints.roles:
                ask = replace(ask, cost=recipe_cost(cost), runs_on=cost)
            chosen = self._chooser(stage.part).choose(
                ask, budget_bytes, self.options.solver, self._left_s(), limit_s, self.closes
            )
            if not chosen.settled:
                return chosen
            if plain is not None:
                with suppress(InfeasibleError):
                    other = plain._choose(stage, budget_bytes, chosen.objective_s)
                    chosen = _faster(chosen, other)
            self._chosen[key] = chosen
        return self._chosen[key]


def _limit_s(candidate: Candidate, limit_s: float) -> float:
    """Of its stages' objectives: scores of several, and of recipes, are of other numbers."""
    return limit_s if len(candidate.stages) == 1 and not candidate.is_recipe else math.inf


def _faster(chosen: Chosen, other: Chosen) -> Chosen:
    """The faster one of what was chosen among all choices and among fewer, each up to a gap: the
    bound is that of all."""
    if other.objective_s > chosen.objective_s:
        return chosen
    return replace(other, gap=max(0.0, 1 - chosen.bound_s / other.objective_s))
