"""Solve candidates: the placements of every stage, and what a step of them takes at least.

With one stage, that is the solver's objective. With several, it is the span of the stages, without
messages between them (`step_bound_s`). Candidates that may be the fastest are then lowered and
simulated (`simulator.py`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np

from autopar.cost.hardware import Hardware
from autopar.cost.laws import CostModel
from autopar.errors import InfeasibleError
from autopar.identity import Same
from autopar.mesh import LogicalMesh
from autopar.options import Options
from autopar.passes.analysis import (
    Analysis,
    Folded,
    Numbered,
    Recomputable,
    Run,
    aligned_runs,
    cut,
    find_runs,
    fold,
    is_searched,
)
from autopar.passes.inter import Candidate, StageLayout, plain_order, step_bound_s
from autopar.passes.intra import (
    Chooser,
    Chosen,
    LeastRerun,
    PlacementRequest,
    Prices,
    least_bytes,
    least_static_bytes,
    recipe_cost,
    too_little_memory,
)
from autopar.passes.search.stats import PlanningStats
from autopar.passes.search.time_limit import TimeLimit
from autopar.passes.solvers.problem import within
from autopar.schedule import ORDERS, even_in_flight


@dataclass(frozen=True)
class Proposal:
    """A candidate whose stages have placements."""

    candidate: Candidate
    choices: tuple[Chosen, ...]

    @cached_property
    def least_s(self) -> float:
        """A step of these placements takes no less, in seconds."""
        return self._step_s([chosen.objective_s for chosen in self.choices])

    @cached_property
    def bound_s(self) -> float:
        """The same of stages that attain the solver's bounds: no placements that do as much once a
        step take less."""
        return self._step_s([chosen.bound_s for chosen in self.choices])

    def _step_s(self, each_s: Sequence[float]) -> float:
        if len(each_s) == 1:
            return each_s[0]
        whole_s, once_s = np.array(each_s), [chosen.once_s for chosen in self.choices]
        schedule = self.candidate.schedule
        if schedule not in ("1f1b", "gpipe"):  # others have no proven bubble
            return float(np.bincount(self.candidate.devices, whole_s).max())
        work_s, m = np.maximum(whole_s - once_s, 0.0), self.n_microbatches
        return step_bound_s(whole_s, work_s, m, schedule == "1f1b", once_s[0])

    @property
    def n_microbatches(self) -> int:
        return self.candidate.n_microbatches

    @property
    def size_bytes(self) -> float:
        """Bytes of the device that holds most, as the solver counts them."""
        return _most_bytes(self.candidate, (chosen.size_bytes for chosen in self.choices))


@dataclass(frozen=True)
class _Stage:
    """A part of the program to place on a mesh, with `depth` microbatches in flight.

    `part` may be the representative of equal parts. Then `names` maps its names to the stage's own;
    None if `part` is the stage's own.
    """

    part: Analysis
    names: Mapping[str, str] | None
    layout: StageLayout
    n_microbatches: int
    depth: float

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for stages that have the same choice."""
        layout = self.layout
        placed = layout.view.canonical, repr(layout.constraints)
        return self.part, *placed, self.n_microbatches, self.depth


@lru_cache(maxsize=128)
def depths(schedule: str, devices: tuple[int, ...], n_microbatches: int) -> tuple[float, ...]:
    """The microbatches in flight on every stage when its device holds most of them."""
    return even_in_flight(ORDERS[schedule](devices, n_microbatches))


@dataclass
class Evaluator:
    """Solves candidates of one program on one machine; equal stages are solved once.

    views, counts   the meshes and numbers of microbatches to expect: their problems are built
                    together
    limit           solves close their gaps within it, and none begins after it
    hides           if False, placements are chosen as if compute hid no communication
    prices          what problems share, for as long as this planning lasts
    """

    analysis: Analysis
    options: Options
    hardware: Hardware
    budget_bytes: float
    views: Sequence[LogicalMesh] = ()
    counts: Sequence[int] = ()
    limit: TimeLimit = field(default_factory=TimeLimit)
    hides: bool = True
    prices: Prices = field(default_factory=Prices)
    _chosen: dict[object, Chosen] = field(default_factory=dict)
    _choosers: dict[tuple[Analysis, str], Chooser] = field(default_factory=dict)
    _folded: dict[tuple[Analysis, tuple[Run, ...]], Folded] = field(default_factory=dict)
    _parts: dict[tuple[int, ...], tuple[Analysis, ...]] = field(default_factory=dict)
    # Likeness -> the representative, which is the first part with it. A part -> its representative,
    # and names there -> names here (None: it is its own).
    _representatives: dict[Hashable, tuple[Analysis, Numbered]] = field(default_factory=dict)
    _representative_of: dict[Analysis, tuple[Analysis, Mapping[str, str] | None]] = field(
        default_factory=dict
    )
    _least_rerun: dict[tuple[Analysis, int], LeastRerun] = field(default_factory=dict)
    _renamed: dict[tuple[Same, Same], Chosen] = field(default_factory=dict)
    # Equal parts have equal recompute ranges. The evaluator without recompute compares them too,
    # because both share the representatives.
    _shared_recomputable: Recomputable | None = None

    def __post_init__(self) -> None:
        known = self.analysis.set_schedule(plain_order(self.options))
        assert known is self.analysis, "analysed for another schedule"
        self.recomputable = Recomputable.of(self.analysis, self.options)
        self._shared_recomputable = self._shared_recomputable or self.recomputable

    def cost_of(self, view: LogicalMesh) -> CostModel:
        return CostModel.of(view, self.hardware)

    @cached_property
    def plain_evaluator(self) -> Evaluator | None:
        """The same without recompute; None if recompute is not searched. Both share solves."""
        if not is_searched(self.recomputable):
            return None
        return replace(self, options=replace(self.options, recompute="none"))

    def recompute_evaluator(self, mode: str) -> Evaluator:
        """The same where every block is recomputed in this mode. Both share solves.

        Raises `NotSupportedError` if the mode has nothing to recompute.
        """
        return replace(self, options=replace(self.options, recompute=mode))

    @cached_property
    def recompute_key(self) -> str:
        """What is recomputed: nothing, what the search chooses, or what the options say."""
        if self.recomputable is None:
            return "none"
        return "searched" if is_searched(self.recomputable) else str(self.recomputable.modes)

    @cached_property
    def exposed_evaluator(self) -> Evaluator:
        """The same with `hides=False`. Both share solves."""
        return replace(self, hides=False)

    def parts(self, ends: tuple[int, ...]) -> tuple[Analysis, ...]:
        """The analyses of the stages that end before these operators."""
        if len(ends) == 1:
            return (self.analysis,)
        if ends not in self._parts:
            programs = cut(self.analysis.program, ends)
            self._parts[ends] = tuple(self.analysis.part(p) for p in programs)
        return self._parts[ends]

    def placed(
        self, candidate: Candidate, budget_bytes: float | None, limit_s: float = math.inf
    ) -> Proposal:
        """Solve a candidate within a budget, or without one.

        If a single searched stage cannot be below `limit_s`, its solver stops early.

        Raises `InfeasibleError` if a stage does not fit, `BatchError` if rows do not divide.
        """
        return self._check_finite(candidate, self._choices(candidate, budget_bytes, limit_s))

    def solved_stage(self, candidate: Candidate, k: int, limit_s: float) -> Chosen:
        """The placements of one stage within the budget.

        If it alone cannot be below `limit_s`, the solver stops early. Raises `InfeasibleError` if
        nothing fits.
        """
        return self._choose(self._stage(candidate, k), self.budget_bytes, limit_s)

    def priced_stage_s(
        self, candidate: Candidate, k: int, n_in_flight: float, s_per_byte: float
    ) -> float:
        """One stage takes no less, in seconds of a step with a price on its bytes, whatever it
        recomputes."""
        stage = self._stage(candidate, k)
        limits, cost = stage.layout.constraints, self.cost_of(stage.layout.view)
        request = PlacementRequest(cost, stage.n_microbatches, limits, n_in_flight)
        key = stage.part, "priced"  # of many views, where placements are of few
        if key not in self._choosers:
            real = tuple(map(self.cost_of, self.views))
            folded, arguments = self._fold(stage.part), (self.options.optimizer, self.recomputable)
            self._choosers[key] = Chooser(folded, *arguments, (real,), self.counts, self.prices)
        return self._choosers[key].priced_s(request, s_per_byte)

    def _check_finite(self, candidate: Candidate, choices: Sequence[Chosen]) -> Proposal:
        if not all(math.isfinite(chosen.objective_s) for chosen in choices):
            raise InfeasibleError(  # chosen on the abstract machine
                "this machine forbids what the recipe does", hint="choose other degrees"
            )
        return Proposal(candidate, tuple(choices))

    def _choices(
        self, candidate: Candidate, budget_bytes: float | None, limit_s: float = math.inf
    ) -> list[Chosen]:
        """The placements of every stage."""
        limit_s, stages = _solver_limit_s(candidate, limit_s), list(self._stages(candidate))
        budgets: Sequence[float | None] = [budget_bytes] * len(stages)
        if budget_bytes is not None and candidate.has_chunks:
            budgets = self._budgets(candidate, stages, budget_bytes)
        return [
            self._choose_named(stage, own_bytes, limit_s)
            for stage, own_bytes in zip(stages, budgets, strict=True)
        ]

    def _budgets(
        self, candidate: Candidate, stages: Sequence[_Stage], budget_bytes: float
    ) -> list[float | None]:
        """The budgets of the stages of one device: together its own, where that binds.

        Each stage has its fewest bytes. What is left is divided in proportion to the bytes that it
        would take besides. Raises `InfeasibleError` if not even the fewest fit together.
        """
        devices = [*candidate.devices]
        free_bytes = np.array([self._choose(stage, None).size_bytes for stage in stages])
        if within(budget_bytes, float(np.bincount(devices, free_bytes).max())):
            return [None] * len(stages)
        fewest_bytes = np.array([self._least_bytes_of(stage) for stage in stages])
        most_bytes = _most_bytes(candidate, fewest_bytes)
        if not within(budget_bytes, most_bytes):
            raise too_little_memory(budget_bytes, most_bytes, candidate.name)
        more_bytes = np.maximum(free_bytes - fewest_bytes, 0.0)
        left_bytes = budget_bytes - np.bincount(devices, fewest_bytes)[devices]
        wanted_bytes = np.bincount(devices, more_bytes)[devices]
        share = np.minimum(left_bytes / np.maximum(wanted_bytes, 1.0), 1.0)
        return [*(fewest_bytes + share * more_bytes).tolist()]

    def _stages(self, candidate: Candidate) -> Iterator[_Stage]:
        return (self._stage(candidate, k) for k in range(len(candidate.stages)))

    def _stage(self, candidate: Candidate, k: int) -> _Stage:
        layout, n_microbatches = candidate.stages[k], candidate.n_microbatches
        depth = depths(candidate.schedule, candidate.devices, n_microbatches)[k]
        part = self.parts(candidate.ends)[k]
        names: Mapping[str, str] | None = None
        if not (layout.constraints.pins or layout.constraints.storage):
            part, names = self.representative(part)
        return _Stage(part, names, layout, n_microbatches, depth)

    def representative(self, part: Analysis) -> tuple[Analysis, Mapping[str, str] | None]:
        """The first part equal to this one, and names there -> names here; None: it is this one."""
        if part is self.analysis:
            return part, None
        if part not in self._representative_of:
            ranges = self._shared_recomputable.within(part) if self._shared_recomputable else ()
            numbered = Numbered.of(part, ranges, self.hardware.kernels)
            first, its = self._representatives.setdefault(numbered.likeness, (part, numbered))
            names = None if first is part else its.names_in(numbered)
            self._representative_of[part] = first, names
        return self._representative_of[part]

    def least_bytes(self, candidate: Candidate) -> float:
        """The smallest budget that a candidate has placements for.

        Raises `InfeasibleError` if no placement satisfies the constraints.
        """
        return _most_bytes(candidate, map(self._least_bytes_of, self._stages(candidate)))

    def _least_bytes_of(self, stage: _Stage) -> float:
        """A budget of 0 bytes fails without a search, and the error names the fewest bytes."""
        try:
            return self._choose(stage, 0.0).size_bytes
        except InfeasibleError as error:
            if error.least_bytes is None:
                raise
            return error.least_bytes * (1 + 1e-9)

    def stats(self, n_configurations: int) -> PlanningStats:
        """What was solved so far; `n_configurations` as in `PlanningStats`."""
        largest = max(self._chosen.values(), key=lambda c: (c.n_written_out, c.n_variables))
        n_solved = len(self._chosen)
        return PlanningStats(largest.n_written_out, largest.n_variables, n_configurations, n_solved)

    def size_bound_bytes(self, candidate: Candidate) -> float:
        """Lower bound on the bytes of the device that holds most; nothing is solved."""
        each = (
            least_bytes(
                stage.part, self.cost_of(stage.layout.view), stage.n_microbatches,
                self.options.optimizer, stage.layout.constraints, stage.depth, self.recomputable,
            )
            for stage in self._stages(candidate)
        )  # fmt: skip
        return _most_bytes(candidate, each)

    def least_rerun_s(self, candidate: Candidate) -> float:
        """Lower bound on the seconds of a step in which a candidate of one stage runs again."""
        (stage,) = self._stages(candidate)
        if self.recomputable is None:
            return 0.0
        part, view, limits = stage.part, stage.layout.view, stage.layout.constraints
        cost = self.cost_of(view)
        key = part, view.n_ranks
        if key not in self._least_rerun:
            self._least_rerun[key] = LeastRerun(part, self.recomputable, cost)
        m, optimizer = stage.n_microbatches, self.options.optimizer
        left_bytes = self.budget_bytes - least_static_bytes(part, cost, optimizer, limits, m)
        return self._least_rerun[key](m, stage.depth, left_bytes)

    def runs(self, part: Analysis) -> tuple[Run, ...]:
        """The repeated blocks of a program or stage, aligned with what may be recomputed."""
        found = self.recomputable
        return find_runs(part) if found is None else aligned_runs(part, found)

    def _chooser(self, part: Analysis) -> Chooser:
        recomputable = self.recomputable
        key = part, self.recompute_key
        if key not in self._choosers:
            folded = self._fold(part)
            arguments = self.options.optimizer, recomputable
            if is_searched(recomputable) and part is not self.analysis:  # few requests
                self._choosers[key] = Chooser(folded, *arguments, prices=self.prices)
            else:
                real = tuple(map(self.cost_of, self.views))
                plain = tuple(replace(cost, hides=False) for cost in real)
                families = (real, tuple(map(recipe_cost, real)), plain)
                self._choosers[key] = Chooser(
                    folded, *arguments, families, self.counts, self.prices
                )
        return self._choosers[key]

    def _fold(self, part: Analysis) -> Folded:
        """The program with few blocks of its runs; with the same runs, whatever is recomputed, it
        is the same, and so is what is known of it."""
        key = part, self.runs(part)
        if key not in self._folded:
            self._folded[key] = fold(*key)
        return self._folded[key]

    def _choose_named(
        self, stage: _Stage, budget_bytes: float | None, limit_s: float = math.inf
    ) -> Chosen:
        """`_choose`, under the stage's own names."""
        chosen = self._choose(stage, budget_bytes, limit_s)
        if stage.names is None:
            return chosen
        key = Same(chosen), Same(stage.names)
        if key not in self._renamed:
            self._renamed[key] = chosen.named(stage.names)
        return self._renamed[key]

    def _choose(
        self, stage: _Stage, budget_bytes: float | None, limit_s: float = math.inf
    ) -> Chosen:
        """The placements of a stage.

        Recompute is searched only if the fastest placements without it do not fit. Then it competes
        with placements that fit without it.
        """
        no_recompute = self.plain_evaluator
        if no_recompute is not None:
            if budget_bytes is None:
                return no_recompute._choose(stage, None, limit_s)
            unlimited = no_recompute._choose(stage, None)
            if within(budget_bytes, unlimited.size_bytes):
                return unlimited
        key = stage.key, budget_bytes, self.recompute_key, self.hides
        if key not in self._chosen:
            self.limit.check()
            cost, constraints = self.cost_of(stage.layout.view), stage.layout.constraints
            request = PlacementRequest(cost, stage.n_microbatches, constraints, stage.depth)
            if constraints.prefers_sharding:
                request = replace(request, cost=recipe_cost(cost), runs_on=cost)
            elif not self.hides:
                request = replace(request, cost=replace(cost, hides=False), runs_on=cost)
            chosen = self._chooser(stage.part).choose(
                request, budget_bytes, self.options.solver, self.limit.left_s, limit_s
            )
            if not chosen.settled:
                return chosen
            if no_recompute is not None:
                with suppress(InfeasibleError):
                    other = no_recompute._choose(stage, budget_bytes, chosen.objective_s)
                    chosen = _faster(chosen, other)
            self._chosen[key] = chosen
        return self._chosen[key]


def _most_bytes(candidate: Candidate, of_stages: Iterable[float]) -> float:
    """Bytes of the device whose stages have most together."""
    return float(np.bincount(candidate.devices, [*of_stages]).max())


def _solver_limit_s(candidate: Candidate, limit_s: float) -> float:
    """`limit_s` for a single searched stage; others have no single objective."""
    return limit_s if len(candidate.stages) == 1 and not candidate.is_recipe else math.inf


def _faster(chosen: Chosen, other: Chosen) -> Chosen:
    """The faster of a choice among all placements and another among some of them.

    The lower bound of all placements holds for both.
    """
    if other.objective_s > chosen.objective_s:
        return chosen
    return replace(other, gap=max(0.0, 1 - chosen.bound_s / other.objective_s))
