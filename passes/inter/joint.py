"""The joint search: stage cuts, the devices and view of each stage, and the microbatch count.

    layers      operators, clustered so that little crosses between layers (`layers.py`)
    submeshes   shares of a node that divide it, and whole nodes. A stage holds consecutive ranks
                and never straddles nodes (`submeshes.py`)
    views       every dp x tp of a submesh, or its own axes
    costs       of every range of layers on every view: one intra-operator problem of the folded
                program per view and number of microbatches (`tables.py`)
    search      for one number of microbatches, over these numbers (`stage_search.py`)

The costs are estimates; `tables.py` says which parts are exact. So the search returns several
plans, the best that are not nearly equal (`different`). `passes/search/refined.py` has them solved
and searches again.

The numbers of microbatches tried are divisors of the batch, each about twice the one before. The
search starts at the number that is fastest without a memory limit, and goes up or down as long as
that helps (`climb`). Costs without a memory limit are fast to make, because they need no leaner
placements, and they are lower bounds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from autopar.cost.hardware import Hardware
from autopar.cost.laws import CostModel
from autopar.mesh import LogicalMesh, Mesh
from autopar.options import Options, schedule_name
from autopar.passes.analysis import (
    FIRST_COUNT_PER_STAGE,
    Analysis,
    Recomputable,
    aligned_runs,
    compute_dtype,
    find_runs,
    fold,
    is_searched,
    microbatch_counts,
)
from autopar.passes.inter.bounds import StageBounds
from autopar.passes.inter.candidate import Candidate, StageLayout
from autopar.passes.inter.estimates import Estimates
from autopar.passes.inter.layer_bounds import LayerBounds
from autopar.passes.inter.layers import MOST_LAYERS, Layers, find_layers, sums_of_ranges
from autopar.passes.inter.rerun_bounds import RerunBounds
from autopar.passes.inter.score import StageSeconds
from autopar.passes.inter.stage_search import SearchedPlan, StageSearch
from autopar.passes.inter.submeshes import (
    all_views,
    distinct_views,
    pins_on,
    submesh_sizes,
    view_at,
    views_text,
)
from autopar.passes.inter.tables import StageTable, TableMaker, TableRequest, undominated
from autopar.passes.intra import Constraints, LeastRerun, Prices, ProblemFamilies, least_times_s
from autopar.passes.solvers.stages import StageProblem

Progress = Callable[[str], None]
# Leaner placements are useless if a plan of equal stages needs less than this share of the budget.
ENOUGH_MEMORY_SHARE = 0.5
# Plans of equal submeshes whose estimates differ by less than this (relative) count as one.
_ALIKE_REL = 2e-3


def joint_search(
    analysis: Analysis,
    mesh: Mesh,
    hardware: Hardware,
    options: Options,
    budget_bytes: float,
    n_stages: int | None,
    report: Progress = lambda text: None,
    prices: Prices | None = None,
) -> JointSearch | None:
    """The search for plans with at least two stages, or with exactly `n_stages`.

    None if there is nothing to search: pipelines are forbidden, or there is one rank or stage.
    """
    if "pipeline" in options.forbid or mesh.n_ranks < 2 or (n_stages or 2) < 2:
        return None
    on = analysis, mesh, hardware, options
    return JointSearch.of(*on, budget_bytes, n_stages or 2, report, prices)


@dataclass
class JointSearch:
    """The search over one program and machine; costs are made once per number of microbatches.

    With `recomputes`, leaner placements may recompute what `maker` allows. `unlimited` maps
    numbers of microbatches to the fastest plan without a memory limit; None: there is no plan.
    """

    analysis: Analysis
    mesh: Mesh
    hardware: Hardware
    options: Options
    budget_bytes: float
    layers: Layers
    report: Progress
    maker: TableMaker
    recomputes: bool = False
    unlimited: dict[int, SearchedPlan | None] = field(default_factory=dict)
    n_configurations: int = field(default=0, init=False)
    _tables: dict[int, list[StageTable]] = field(default_factory=dict, init=False)
    _found: dict[int, list[SearchedPlan]] = field(default_factory=dict, init=False)
    _least_s: dict[int, float] = field(default_factory=dict, init=False)

    @cached_property
    def estimates(self) -> Estimates:
        return Estimates()

    @staticmethod
    def of(
        analysis: Analysis,
        mesh: Mesh,
        hardware: Hardware,
        options: Options,
        budget_bytes: float,
        n_least: int = 2,
        report: Progress = lambda text: None,
        prices: Prices | None = None,
    ) -> JointSearch:
        """The search over the layers and repeated blocks of a program.

        There are at least `n_least` layers if the program has enough operators, and at most
        `MOST_LAYERS`, or `n_least` if that is more.

        Raises `BatchError` if the number of microbatches asked for does not divide the batch.
        """
        runs, recomputable = find_runs(analysis), Recomputable.of(analysis, options)
        if recomputable is not None and aligned_runs(analysis, recomputable) != runs:
            # The ranges do not align with the folded blocks, so estimates leave recompute out.
            recomputable = None
        layers = find_layers(analysis, runs, n_least)
        sizes = [*submesh_sizes(mesh), mesh.n_ranks]  # one stage has all ranks; it shares prices
        maker = TableMaker(
            fold(analysis.gathering_as("stages"), runs), layers, compute_dtype(analysis),
            options.optimizer, all_views(mesh, hardware, options, sizes),
            tuple(microbatch_counts(analysis, options, mesh.n_ranks)), recomputable=recomputable,
            prices=prices or Prices(),
        )  # fmt: skip
        recomputes = is_searched(recomputable)
        return JointSearch(
            analysis, mesh, hardware, options, budget_bytes, layers, report, maker, recomputes
        )

    def with_layers(self, n_least: int, n_most: int) -> JointSearch:
        """The same search over at least `n_least` and at most `n_most` layers, as in `of`."""
        layers = self.layers
        if n_most != MOST_LAYERS or n_least > layers.n_layers:
            layers = find_layers(self.analysis, self.maker.folded.runs, n_least, n_most)
        return replace(self, layers=layers, maker=replace(self.maker, layers=layers), unlimited={})

    @property
    def without_recompute(self) -> JointSearch:
        """The same search without a choice of recompute; both share what they compute."""
        return replace(self, recomputes=False)

    def counts(self) -> list[int]:
        """Numbers of microbatches to try, ascending: divisors of the batch, about twice apart."""
        return list(self.maker.counts)

    @cached_property
    def views(self) -> tuple[LogicalMesh, ...]:
        """The views of all submeshes, each as if it began at the first rank."""
        sizes = submesh_sizes(self.mesh)
        return distinct_views(self.mesh, self.hardware, self.options, sizes)

    @cached_property
    def bounds(self) -> StageBounds:
        cost = CostModel(self.maker.views[0], self.maker.dtype)
        return StageBounds.of(self.analysis, cost, self.layers)

    @cached_property
    def layer_bounds(self) -> LayerBounds:
        maker, cost = self.maker, CostModel(self.maker.views[0], self.maker.dtype)
        folded = fold(self.analysis.gathering_as("least"), maker.folded.runs)
        family = tuple(CostModel(view, maker.dtype) for view in self.views)
        problems = ProblemFamilies(
            folded.analysis, maker.optimizer, (family,), maker.counts, prices=maker.prices
        )
        shared_s = least_times_s(self.analysis, cost)
        return LayerBounds(
            folded, self.layers, maker.dtype, problems, self.constraints, self.views, shared_s
        )

    @cached_property
    def rerun_bounds(self) -> RerunBounds:
        cost = CostModel(self.maker.views[0], self.maker.dtype)
        found = Recomputable.of(self.analysis, self.options)
        rerun = None if found is None else LeastRerun(self.analysis, found, cost)
        on = self.analysis, self.layers, self.maker.optimizer
        return RerunBounds(*on, self.budget_bytes, rerun)

    def tables(self, m: int) -> list[StageTable]:
        """Every useful configuration of a stage, with `m` microbatches."""
        if m not in self._tables:
            requests = [self._request(view, m) for view in self.views]
            every = tuple(itertools.chain.from_iterable(self.maker.tables_for(requests, m)))
            self._tables[m] = undominated(every)
            self._count(len(every))
        return self._tables[m]

    def _count(self, n_placements: int) -> None:
        n_layers = self.layers.n_layers
        self.n_configurations += n_placements * n_layers * (n_layers + 1) // 2

    def _request(self, view: LogicalMesh, m: int) -> TableRequest:
        share = view.n_ranks / self.mesh.n_ranks
        deepest = self.depth(m, max(1, round(1 / share)))
        depths = tuple(sorted({1, math.ceil(deepest / 2), deepest}))
        enough_bytes = ENOUGH_MEMORY_SHARE * self.budget_bytes / share
        return TableRequest(view, self.constraints(view), depths, enough_bytes, self.recomputes)

    @property
    def _is_gpipe(self) -> bool:
        return schedule_name(self.options) == "gpipe"

    def depth(self, m: int, n_left: int) -> int:
        """Microbatches in flight on a stage; `n_left` counts it and the stages after it."""
        return m if self._is_gpipe else min(m, n_left)

    def constraints(self, view: LogicalMesh) -> Constraints:
        pins = pins_on(self.analysis, self.options, view)
        return Constraints(self.options.forbid, pins=pins)

    def _search(self, m: int, configs: Sequence[StageTable], estimates: Estimates) -> StageSearch:
        return StageSearch(
            self.mesh, self.hardware, schedule_name(self.options), self.layers, self._learns,
            estimates, m, configs,
        )  # fmt: skip

    def problem(self, m: int, n_stages: int | None) -> StageProblem | None:
        """The stage problem with `m` microbatches; None if no view is possible."""
        return self._search(m, self.tables(m), self.estimates).problem(n_stages, self.budget_bytes)

    def bound_s(self, m: int, n_stages: int | None) -> float:
        """Estimated lower bound on plans with `m` microbatches.

        It is the larger of two estimates: without a memory limit, and of the first search if they
        were searched. It is scaled by the largest gain that solving brought any stage so far.
        """
        unlimited = self._unlimited(m, n_stages)
        unlimited_s = math.inf if unlimited is None else unlimited.estimate_s
        return max(unlimited_s, self._least_s.get(m, 0.0)) * self.estimates.least_time_ratio

    def least_step_s(self, n_stages: int | None, limit_s: float = -math.inf) -> float:
        """Lower bound on every plan, whatever its placements; it builds no placement problem.

        It stops early once the bound is at most `limit_s`.
        """
        first, sizes = FIRST_COUNT_PER_STAGE * (n_stages or 2), submesh_sizes(self.mesh)
        least_s = math.inf
        for m in sorted(self.counts(), key=lambda m: m < first):  # the fastest is mostly there
            self._count(len(sizes))
            least_s = min(least_s, self.bounds.step_s(self.mesh, sizes, m, n_stages))
            if least_s <= limit_s:
                break
        return least_s

    def layered_step_s(self, n_stages: int | None, limit_s: float) -> float:
        """`least_step_s` with what layers take at least, and what runs again at least to fit.

        Plans that take `limit_s` by equal shares are bounded by these.
        """
        sizes, least_s = submesh_sizes(self.mesh), math.inf
        for m in self.counts():
            step_s = self.bounds.step_s(self.mesh, sizes, m, n_stages)
            if step_s < min(limit_s, least_s):
                own_s = partial(self.own_s, m)
                step_s = self.bounds.step_s(self.mesh, sizes, m, n_stages, own_s)
            least_s = min(least_s, step_s)
        return least_s

    def own_s(self, m: int, n_ranks: int, n_after: NDArray[np.float64]) -> NDArray[np.float64]:
        """[first layer, last layer, `n_after`]: what stages take at least in a step."""
        depths = np.full_like(n_after, m) if self._is_gpipe else np.minimum(n_after + 1, m)
        layers_s = sums_of_ranges(self.layer_bounds.steps_s(n_ranks, m))[:, :, None]
        return layers_s + self.rerun_bounds.seconds(n_ranks, m, depths)

    def _unlimited(self, m: int, n_stages: int | None) -> SearchedPlan | None:
        if m not in self.unlimited:
            requests = [TableRequest(view, self.constraints(view)) for view in self.views]
            fastest = [tables[0] for tables in self.maker.tables_for(requests, m) if tables]
            self._count(len(fastest))
            plans = self._search(m, fastest, Estimates()).plans(n_stages, math.inf)
            self.unlimited[m] = min(plans, key=lambda plan: plan.estimate_s, default=None)
        return self.unlimited[m]

    @property
    def unlimited_s(self) -> float:
        """The least estimated step time without a memory limit; 0 if nothing was searched.

        Recipes are not expected to be faster.
        """
        return min((p.estimate_s for p in self.unlimited.values() if p is not None), default=0.0)

    @cached_property
    def _learns(self) -> NDArray[np.bool_]:
        """[first layer, last layer]: is there a parameter to optimise?"""
        learning = {n for n, p in self.analysis.program.parameters.items() if p.requires_grad}
        flags = [bool(learning.intersection(o.inputs)) for o in self.analysis.operators]
        counts = np.concatenate(([0], np.cumsum(flags)))[[0, *self.layers.ends]]
        return np.asarray(counts[None, 1:] > counts[:-1, None])

    def plans(self, n_stages: int | None, limit_s: float = math.inf) -> list[SearchedPlan]:
        """The best plans of all numbers of microbatches tried, fastest estimate first.

        The search begins with the number whose bound is least. It skips numbers whose bound exceeds
        the best plan so far or `limit_s`. If all are skipped, the result is the fastest plan
        without a memory limit.
        """
        counts = self.counts()

        def least_s(m: int) -> float:
            if m not in self._found:
                found_s = (plan.estimate_s for plans in self._found.values() for plan in plans)
                bound_s = self.bound_s(m, n_stages)
                if bound_s >= min(found_s, default=math.inf) or bound_s > limit_s:
                    return bound_s
                self.report(f"searching stages with {m} microbatches")
                search = self._search(m, self.tables(m), self.estimates)
                self._found[m] = search.plans(n_stages, self.budget_bytes)
            least_s = min((plan.estimate_s for plan in self._found[m]), default=math.inf)
            self._least_s.setdefault(m, least_s)
            return least_s

        fastest = self._fastest_count(n_stages)
        climb_from(counts, fastest, least_s)
        every = [plan for plans in self._found.values() for plan in plans]
        if not self._least_s and (unlimited := self._unlimited(fastest, n_stages)) is not None:
            every = [unlimited]
        return sorted(every, key=lambda plan: plan.estimate_s)

    def estimate_s(self, n_stages: int | None) -> float:
        """The least estimated step without a memory limit."""
        return self.bound_s(self._fastest_count(n_stages), n_stages)

    def _fastest_count(self, n_stages: int | None) -> int:
        first = FIRST_COUNT_PER_STAGE * (n_stages or 2)
        return climb_from(self.counts(), first, lambda m: self.bound_s(m, n_stages))

    def learn(self, plan: SearchedPlan, solved: Sequence[StageSeconds]) -> None:
        """Record what the stages of a plan take, each solved alone."""
        for (first, last), c, seconds in zip(plan.ranges, plan.configs, solved, strict=True):
            configs = self.tables(plan.n_microbatches)
            self.estimates.learn(plan.n_microbatches, configs, c, (first, last), seconds)
        self._found.clear()

    def candidate(self, plan: SearchedPlan) -> Candidate:
        """The plan as a candidate, every stage on its own ranks."""
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
    """The first local minimum of `cost_s` along `counts`.

    Infinite costs are passed over; if all are infinite, it is the first count.
    """
    best, best_s = counts[0], cost_s(counts[0])
    for m in counts[1:]:
        next_s = cost_s(m)
        if next_s < best_s:
            best, best_s = m, next_s
        elif math.isfinite(best_s):
            break
    return best


def climb_from(counts: Sequence[int], first: int, cost_s: Callable[[int], float]) -> int:
    """A local minimum of `cost_s` along ascending `counts`.

    The climb begins at the first count that is at least `first`. It goes up, or down if the next
    count is no better.
    """
    start = next((i for i, m in enumerate(counts) if m >= first), len(counts) - 1)
    best = climb(counts[start:], cost_s)
    return best if best != counts[start] else climb(counts[start::-1], cost_s)


def different(plans: Sequence[SearchedPlan], n_best: int) -> list[SearchedPlan]:
    """The `n_best` best plans, one of each set of nearly equal ones; then the others, if too few.

    Plans with the same submeshes, microbatches and cost are mostly one plan: their views differ
    without effect.
    """
    chosen: list[SearchedPlan] = []
    for plan in plans:
        if not any(_nearly_alike(plan, other) for other in chosen):
            chosen.append(plan)
    rest = [plan for plan in plans if plan not in chosen]
    return [*chosen, *rest][:n_best]


def _nearly_alike(a: SearchedPlan, b: SearchedPlan) -> bool:
    sizes = [tuple(view.n_ranks for view in plan.views) for plan in (a, b)]
    same = a.n_microbatches == b.n_microbatches and sizes[0] == sizes[1]
    return same and abs(a.estimate_s - b.estimate_s) <= _ALIKE_REL * b.estimate_s
