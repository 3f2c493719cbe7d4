"""The joint search: where stages begin, what devices each has and how it sees them, and how
many microbatches there are.

    layers      operators clustered where little crosses (`layers.py`)
    submeshes   shares of a node that divide it, and whole nodes; stages hold consecutive ranks,
                and none straddles nodes
    views       every dp x tp of a submesh, or its own axes
    costs       of every range of layers on every view, by one intra-operator problem of the
                folded program per view and number of microbatches (`stage_costs.py`)
    messages    a stage waits for what it receives from the stages before and after it: a share of
                a node over the link inside it, unless it is the first or last of its node
    search      exact for its closed form over these numbers (`solvers/stages.py`); the plans found
                are ranked by playing their schedules (`played.py`)

The costs are estimates (what is and is not exact: `stage_costs.py`), so the best plans that
differ in views or microbatches come out; `refined.py` has them solved, and searches again.
The numbers of microbatches tried are divisors of the batch about twice apart, from a few per
stage on, up or down for as long as that helps (`climb`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.cost.hardware import Hardware
from autopar.mesh import LogicalMesh, Mesh
from autopar.options import Options
from autopar.passes.analysis import Analysis
from autopar.passes.constraints import Constraints
from autopar.passes.counts import microbatch_counts
from autopar.passes.estimates import Estimates
from autopar.passes.evaluate import compute_dtype, schedule_name
from autopar.passes.folding import Folded, find_runs, fold
from autopar.passes.layers import Layers, find_layers
from autopar.passes.layout import Candidate, StageLayout
from autopar.passes.played import Hop, Worked, played_s
from autopar.passes.recompute import Recomputable, aligned_runs
from autopar.passes.solvers import Infeasible
from autopar.passes.solvers.stages import StagePlan, StageProblem, solve_stages
from autopar.passes.stage_costs import CostMaker, StageCosts, Wanted, undominated
from autopar.passes.submeshes import (
    Place,
    all_views,
    distinct_views,
    pins_on,
    places_of,
    submesh_sizes,
    view_at,
    views_text,
)

Progress = Callable[[str], None]
# Plans of one search: proving the order of many that are nearly alike takes long.
_PLANS_PER_COUNT = 6
_WITHIN = 0.02
# Tables of so few stages are searched soon, and for more: played, plans are up to a tenth faster
# than their closed form, as stages that differ wait less for each other with few microbatches.
_FEW_STAGES = 500
_PLANS_OF_FEW, _WITHIN_OF_FEW = 12, 0.1
# What is searched are estimates: plans closer than this need not be told apart.
_GAP_GOAL = 1e-3
# Memory decides nothing where a plan of equal stages needs less than this share of the budget.
_ROOMY = 0.5
# Where the climb over microbatches begins: a bubble of an eighth.
FIRST_COUNT_PER_STAGE = 8
# Plans closer than this (relative) are one.
_ALIKE_REL = 2e-3


def joint_search(
    analysis: Analysis,
    mesh: Mesh,
    hardware: Hardware,
    options: Options,
    budget_bytes: float,
    n_stages: int | None,
    report: Progress = lambda text: None,
) -> JointSearch | None:
    """The search for plans of at least two stages, or of exactly `n_stages`; None where there is
    nothing to search: pipelines are forbidden, or there is one rank or stage."""
    if "pipeline" in options.forbid or mesh.n_ranks < 2 or (n_stages or 2) < 2:
        return None
    return JointSearch.of(analysis, mesh, hardware, options, budget_bytes, n_stages or 2, report)


@dataclass(frozen=True)
class Planned:
    """A plan of the stage search: its microbatches, each stage's last layer and view, and which
    configuration of `JointSearch.costs` it is.

    `objective_s` is its closed form, `estimate_s` its step played with the same numbers.
    """

    n_microbatches: int
    last_layers: tuple[int, ...]
    views: tuple[LogicalMesh, ...]
    configs: tuple[int, ...] = field(compare=False)
    objective_s: float = field(compare=False)
    estimate_s: float = field(compare=False)

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """First and last layer of each stage."""
        firsts = (0, *(last + 1 for last in self.last_layers))
        return tuple(zip(firsts, self.last_layers, strict=False))


@dataclass
class JointSearch:
    """The search over one program and machine; costs are made once per number of microbatches."""

    analysis: Analysis
    mesh: Mesh
    hardware: Hardware
    options: Options
    budget_bytes: float
    folded: Folded
    layers: Layers
    report: Progress
    recomputable: Recomputable | None = None
    _costs: dict[int, list[StageCosts]] = field(default_factory=dict)
    _found: dict[int, list[Planned]] = field(default_factory=dict)
    n_configurations: int = 0

    @cached_property
    def estimates(self) -> Estimates:
        return Estimates(self.layers)

    @staticmethod
    def of(
        analysis: Analysis,
        mesh: Mesh,
        hardware: Hardware,
        options: Options,
        budget_bytes: float,
        least_stages: int = 2,
        report: Progress = lambda text: None,
    ) -> JointSearch:
        """Finds the blocks and layers of the program."""
        runs, recomputable = find_runs(analysis), Recomputable.of(analysis, options)
        if recomputable is not None and aligned_runs(analysis, recomputable) != runs:
            recomputable = None  # one block does not stand for others: estimates are without it
        layers = find_layers(analysis, runs, least_stages)
        folded = fold(analysis, runs)
        return JointSearch(
            analysis, mesh, hardware, options, budget_bytes, folded, layers, report, recomputable
        )

    @cached_property
    def maker(self) -> CostMaker:
        dtype = compute_dtype(self.analysis)
        sizes = [*submesh_sizes(self.mesh), self.mesh.n_ranks]  # as for one stage, to share prices
        every = all_views(self.mesh, self.hardware, self.options, sizes)
        counts = tuple(self.counts())
        return CostMaker(
            self.folded, self.layers, dtype, self.options.optimizer, every, counts,
            recomputable=self.recomputable,
        )  # fmt: skip

    # -- what is searched --------------------------------------------------------------------

    def counts(self) -> list[int]:
        """Numbers of microbatches worth trying: divisors of the batch, about twice apart."""
        return microbatch_counts(self.analysis, self.options, self.mesh.n_ranks)

    @cached_property
    def views(self) -> tuple[LogicalMesh, ...]:
        """How a stage may see its submesh, as if it began at the first rank."""
        sizes = submesh_sizes(self.mesh)
        return distinct_views(self.mesh, self.hardware, self.options, sizes)

    # -- costs and plans ---------------------------------------------------------------------

    def costs(self, m: int) -> list[StageCosts]:
        """Every configuration of a stage that may be of use, with `m` microbatches."""
        if m not in self._costs:
            wanted = [self._wanted(view, m) for view in self.views]
            every = tuple(itertools.chain.from_iterable(self.maker.searched(wanted, m)))
            self._costs[m] = undominated(every, self.layers)
            n_layers = self.layers.n_layers
            self.n_configurations += len(every) * n_layers * (n_layers + 1) // 2
        return self._costs[m]

    def _wanted(self, view: LogicalMesh, m: int) -> Wanted:
        share = view.n_ranks / self.mesh.n_ranks
        deepest = self.depth(m, max(1, round(1 / share)))
        depths = tuple(sorted({1, math.ceil(deepest / 2), deepest}))
        enough_bytes = _ROOMY * self.budget_bytes / share
        return Wanted(view, self.constraints(view), depths, enough_bytes)

    @property
    def _is_gpipe(self) -> bool:
        return schedule_name(self.options) == "gpipe"

    def depth(self, m: int, n_left: int) -> int:
        """Microbatches in flight on a stage when it and those after it are `n_left`."""
        return m if self._is_gpipe else min(m, n_left)

    def places(self, view: LogicalMesh) -> tuple[Place, ...]:
        return places_of(self.mesh, self.hardware, view.n_ranks)

    def constraints(self, view: LogicalMesh) -> Constraints:
        pins = pins_on(self.analysis, self.options, view)
        return Constraints(self.options.forbid, pins=pins)

    def problem(self, m: int, n_stages: int | None) -> StageProblem | None:
        """The stage problem with `m` microbatches; None where no view can be.

        Configurations are those of `costs`, at each place that they may have (`_placed`).
        """
        configs, placed = self.costs(m), self._placed(m)
        if not configs:
            return None
        at = [c for c, _ in placed]
        static, activation = (
            np.stack([configs[c].ranges(self.layers, part) for c in at], axis=-1)
            for part in ("static", "activation")
        )
        if self._is_gpipe:  # all microbatches are in flight at once, on every stage
            static, activation = static + m * activation, np.zeros_like(activation)
        worked = [self.estimates.tables(m, config) for config in configs]
        time = [worked[c][0] + configs[c].messages(p.before, p.after) for c, p in placed]
        return StageProblem(
            np.where(self._learns[:, :, None], np.stack(time, axis=-1), np.inf),
            np.stack([worked[c][1] for c in at], axis=-1),
            static,
            activation,
            tuple(configs[c].view.n_ranks for c in at),
            self.mesh.n_ranks,
            m,
            self.budget_bytes,
            n_stages,
            self.mesh.devices_per_node,
            tuple(place.offsets for _, place in placed),
        )

    def _placed(self, m: int) -> list[tuple[int, Place]]:
        """Every configuration of `costs` at every place."""
        return [(c, p) for c, config in enumerate(self.costs(m)) for p in self.places(config.view)]

    @cached_property
    def _learns(self) -> NDArray[np.bool_]:
        """[first, last layer]: is there a parameter to optimise?"""
        learning = {n for n, p in self.analysis.program.parameters.items() if p.requires_grad}
        flags = [bool(learning.intersection(o.inputs)) for o in self.analysis.operators]
        counts = np.concatenate(([0], np.cumsum(flags)))[[0, *self.layers.ends]]
        return np.asarray(counts[None, 1:] > counts[:-1, None])

    def plans(self, n_stages: int | None) -> list[Planned]:
        """The best plans of all numbers of microbatches tried, by what they should take."""
        counts = self.counts()

        def least_s(m: int) -> float:
            if m not in self._found:
                self.report(f"searching stages with {m} microbatches")
                self._found[m] = self._solve(m, n_stages)
            return min((plan.estimate_s for plan in self._found[m]), default=math.inf)

        wanted = FIRST_COUNT_PER_STAGE * (n_stages or 2)
        start = next((i for i, m in enumerate(counts) if m >= wanted), len(counts) - 1)
        upward, downward = counts[start:], counts[start::-1]
        if climb(upward, least_s) == upward[0] and len(downward) > 1:
            climb(downward, least_s)
        every = [plan for plans in self._found.values() for plan in plans]
        return sorted(every, key=lambda plan: plan.estimate_s)

    def learn(self, plan: Planned, solved: Sequence[Worked]) -> None:
        """What the stages of a plan take, each solved alone."""
        for (first, last), c, worked in zip(plan.ranges, plan.configs, solved, strict=True):
            configs = self.costs(plan.n_microbatches)
            self.estimates.learn(plan.n_microbatches, configs, c, (first, last), worked)
        self._found.clear()

    def _solve(self, m: int, n_stages: int | None) -> list[Planned]:
        problem = self.problem(m, n_stages)
        if problem is None:
            return []
        n_best, within = _PLANS_PER_COUNT, _WITHIN
        if problem.time_s.size <= _FEW_STAGES:
            n_best, within = max(n_best, _PLANS_OF_FEW), max(within, _WITHIN_OF_FEW)
        found = solve_stages(problem, n_best, _GAP_GOAL, within)
        if isinstance(found, Infeasible):
            return []
        return list(dict.fromkeys(self._planned(plan, m) for plan in found))

    def _planned(self, plan: StagePlan, m: int) -> Planned:
        every, placed = self.costs(m), self._placed(m)
        configs = tuple(placed[stage.config][0] for stage in plan.stages)
        return Planned(
            m,
            tuple(stage.last for stage in plan.stages),
            tuple(every[c].view for c in configs),
            configs,
            plan.objective_s,
            self._played_s(plan, m),
        )

    def _played_s(self, plan: StagePlan, m: int) -> float:
        """A plan's step, with messages between neighbours of the larger slices of both."""
        every, placed = self.costs(m), self._placed(m)
        at = [(*placed[stage.config], stage.last) for stage in plan.stages]
        worked = [
            self.estimates.of(m, every[c], stage.first, stage.last)
            for (c, _, _), stage in zip(at, plan.stages, strict=True)
        ]
        hops = []
        for k, ((c, place, last), (other, _, _)) in enumerate(itertools.pairwise(at)):
            traffic = [every[i].traffic for i in (c, other)]
            forward_s = max(float(t.forward_s(place.after)[last]) for t in traffic)
            backward_s = max(float(t.backward_s(place.after)[last]) for t in traffic)
            hops.append(Hop(k, k + 1, forward_s, backward_s))
        return played_s(schedule_name(self.options), m, worked, hops)

    def candidate(self, plan: Planned) -> Candidate:
        """The plan with every stage on its own ranks."""
        views, first_rank = [], 0
        for view in plan.views:
            views.append(view_at(self.mesh, self.hardware, view, first_rank))
            first_rank += view.n_ranks
        return Candidate(
            f"{views_text(views)}, m={plan.n_microbatches}",
            self.layers.ends_of(plan.last_layers),
            tuple(StageLayout(view, self.constraints(view)) for view in views),
            plan.n_microbatches,
            plan.estimate_s,
        )


def climb(counts: Sequence[int], cost_s: Callable[[int], float]) -> int:
    """The first of `counts` that the next one does not improve on; what is infinite is passed
    over, and if all are, it is the first."""
    best, best_s = counts[0], cost_s(counts[0])
    for m in counts[1:]:
        next_s = cost_s(m)
        if next_s < best_s:
            best, best_s = m, next_s
        elif math.isfinite(best_s):
            break
    return best


def different(plans: Sequence[Planned], n_best: int) -> list[Planned]:
    """The best plans, one of those that are nearly alike; then what else there is.

    Plans of the same submeshes and microbatches that cost the same are mostly one plan, seen
    through views that make no difference to it.
    """
    chosen: list[Planned] = []
    for plan in plans:
        if not any(_nearly_alike(plan, other) for other in chosen):
            chosen.append(plan)
    rest = [plan for plan in plans if plan not in chosen]
    return [*chosen, *rest][:n_best]


def _nearly_alike(a: Planned, b: Planned) -> bool:
    sizes = [tuple(view.n_ranks for view in plan.views) for plan in (a, b)]
    same = a.n_microbatches == b.n_microbatches and sizes[0] == sizes[1]
    return same and abs(a.estimate_s - b.estimate_s) <= _ALIKE_REL * b.estimate_s
