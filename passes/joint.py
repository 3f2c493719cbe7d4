"""The joint search: where stages begin, what devices each has and how it sees them, and how
many microbatches there are.

    layers      operators clustered where little crosses (`layers.py`)
    submeshes   shares of a node that divide it, and whole nodes; stages hold consecutive ranks,
                and none straddles nodes
    views       every dp x tp of a submesh, or its own axes
    costs       of every range of layers on every view, by one intra-operator problem of the
                folded program per view and number of microbatches (`stage_costs.py`)
    search      exact for its closed form over these numbers (`solvers/stages.py`)

The costs are estimates (what is and is not exact: `stage_costs.py`), so the best plans that
differ in views or microbatches come out as candidates; the planner solves and simulates them.
The numbers of microbatches tried are divisors of the batch about twice apart, from a few per
stage on, up or down for as long as that helps (`climb`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from autopar.cost.hardware import Hardware
from autopar.errors import OptionError
from autopar.mesh import Link, LogicalMesh, Mesh, factored_view, logical_views
from autopar.options import Options
from autopar.passes.analysis import Analysis
from autopar.passes.attribution import PARTS
from autopar.passes.constraints import Constraints, Pin
from autopar.passes.counts import microbatch_counts
from autopar.passes.evaluate import compute_dtype, schedule_name
from autopar.passes.folding import Folded, find_runs, fold
from autopar.passes.layers import Layers, find_layers
from autopar.passes.layout import Candidate, StageLayout
from autopar.passes.solvers import Infeasible
from autopar.passes.solvers.stages import StagePlan, StageProblem, solve_stages
from autopar.passes.stage_costs import CostMaker, StageCosts, Wanted, undominated

Progress = Callable[[str], None]
# Plans of one search: proving the order of many that are nearly alike takes long.
_PLANS_PER_COUNT = 6
_WITHIN = 0.02
# What is searched are estimates: plans closer than this need not be told apart.
_GAP_GOAL = 1e-3
# Memory decides nothing where a plan of equal stages needs less than this share of the budget.
_ROOMY = 0.5
# Where the climb over microbatches begins: a bubble of an eighth.
FIRST_COUNT_PER_STAGE = 8
# Plans closer than this (relative) are one.
_ALIKE_REL = 2e-3


def joint_candidates(
    analysis: Analysis,
    mesh: Mesh,
    hardware: Hardware,
    options: Options,
    budget_bytes: float,
    n_stages: int | None,
    n_best: int,
    report: Progress = lambda text: None,
) -> list[Candidate]:
    """The `n_best` most promising plans of at least two stages, or of exactly `n_stages`.

    None where pipelines are forbidden or nothing fits. Raises `BatchError` when the number of
    microbatches that was asked for does not divide the batch.
    """
    if "pipeline" in options.forbid or mesh.n_ranks < 2 or (n_stages or 2) < 2:
        return []
    least = n_stages or 2
    search = JointSearch.of(analysis, mesh, hardware, options, budget_bytes, least, report)
    plans = search.plans(n_stages)
    return [search.candidate(plan) for plan in _different(plans, n_best)]


@dataclass(frozen=True)
class Planned:
    """A plan of the stage search: its microbatches, and each stage's last layer and view."""

    n_microbatches: int
    last_layers: tuple[int, ...]
    views: tuple[LogicalMesh, ...]
    objective_s: float


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
    _costs: dict[int, list[StageCosts]] = field(default_factory=dict)

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
        runs = find_runs(analysis)
        layers = find_layers(analysis, runs, least_stages)
        folded = fold(analysis, runs)
        return JointSearch(analysis, mesh, hardware, options, budget_bytes, folded, layers, report)

    @cached_property
    def maker(self) -> CostMaker:
        dtype = compute_dtype(self.analysis)
        sizes = [*submesh_sizes(self.mesh), self.mesh.n_ranks]  # as for one stage, to share prices
        every = all_views(self.mesh, self.hardware, self.options, sizes)
        counts = tuple(self.counts())
        return CostMaker(self.folded, self.layers, dtype, self.options.optimizer, every, counts)

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
            every = itertools.chain.from_iterable(self.maker.searched(wanted, m))
            self._costs[m] = undominated(tuple(every), self.layers)
        return self._costs[m]

    def _wanted(self, view: LogicalMesh, m: int) -> Wanted:
        share = view.n_ranks / self.mesh.n_ranks
        deepest = self.depth(m, max(1, round(1 / share)))
        depths = tuple(sorted({1, math.ceil(deepest / 2), deepest}))
        enough_bytes = _ROOMY * self.budget_bytes / share
        return Wanted(view, self.hop(view), self.constraints(view), depths, enough_bytes)

    @property
    def _is_gpipe(self) -> bool:
        return schedule_name(self.options) == "gpipe"

    def depth(self, m: int, n_left: int) -> int:
        """Microbatches in flight on a stage when it and those after it are `n_left`."""
        return m if self._is_gpipe else min(m, n_left)

    def hop(self, view: LogicalMesh) -> Link:
        """The link to other stages: they are on other nodes when this one fills nodes."""
        inside = view.n_ranks < self.mesh.devices_per_node
        return self.hardware.links[-1 if inside else 0]

    def constraints(self, view: LogicalMesh) -> Constraints:
        pins = pins_on(self.analysis, self.options, view)
        return Constraints(self.options.forbid, pins=pins)

    def problem(self, m: int, n_stages: int | None) -> StageProblem | None:
        """The stage problem with `m` microbatches; None where no view can be."""
        configs = self.costs(m)
        if not configs:
            return None
        tables = {
            part: np.stack([c.ranges(self.layers, part) for c in configs], axis=-1)
            for part in PARTS
        }
        if self._is_gpipe:  # all microbatches are in flight at once, on every stage
            tables["static"] += m * tables["activation"]
            tables["activation"] = np.zeros_like(tables["activation"])
        return StageProblem(
            tables["time"],
            tables["once"],
            tables["static"],
            tables["activation"],
            tuple(c.view.n_ranks for c in configs),
            self.mesh.n_ranks,
            m,
            self.budget_bytes,
            n_stages,
            self.mesh.devices_per_node,
        )

    def plans(self, n_stages: int | None) -> list[Planned]:
        """The best plans of all numbers of microbatches tried, best first."""
        counts = self.counts()
        found: dict[int, list[Planned]] = {}

        def least_s(m: int) -> float:
            if m not in found:
                self.report(f"searching stages with {m} microbatches")
                found[m] = self._solve(m, n_stages)
            return found[m][0].objective_s if found[m] else math.inf

        wanted = FIRST_COUNT_PER_STAGE * (n_stages or 2)
        start = next((i for i, m in enumerate(counts) if m >= wanted), len(counts) - 1)
        upward, downward = counts[start:], counts[start::-1]
        if climb(upward, least_s) == upward[0] and len(downward) > 1:
            climb(downward, least_s)
        every = [plan for plans in found.values() for plan in plans]
        return sorted(every, key=lambda plan: plan.objective_s)

    def _solve(self, m: int, n_stages: int | None) -> list[Planned]:
        problem = self.problem(m, n_stages)
        if problem is None:
            return []
        found = solve_stages(problem, _PLANS_PER_COUNT, _GAP_GOAL, _WITHIN)
        if isinstance(found, Infeasible):
            return []
        return list(dict.fromkeys(self._planned(plan, m) for plan in found))

    def _planned(self, plan: StagePlan, m: int) -> Planned:
        configs = self.costs(m)
        return Planned(
            m,
            tuple(stage.last for stage in plan.stages),
            tuple(configs[stage.config].view for stage in plan.stages),
            plan.objective_s,
        )

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
            plan.objective_s,
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


def _different(plans: Sequence[Planned], n_best: int) -> list[Planned]:
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
    return same and abs(a.objective_s - b.objective_s) <= _ALIKE_REL * b.objective_s


# -- what a stage may be -------------------------------------------------------------------------


def submesh_sizes(mesh: Mesh) -> list[int]:
    """Numbers of devices of a stage among several: divisors of a node, powers of two nodes, and
    divisors of all nodes."""
    each, nodes = mesh.devices_per_node, mesh.nodes
    parts = [n for n in range(1, each + 1) if each % n == 0]
    groups = [k * each for k in range(2, nodes) if nodes % k == 0 or k & (k - 1) == 0]
    return [n for n in (*parts, *groups) if n < mesh.n_ranks]


def views_of(
    mesh: Mesh, hardware: Hardware, options: Options, first_rank: int, n_ranks: int
) -> list[LogicalMesh]:
    """How a stage may see its ranks."""
    shape = options.mesh_shape
    return logical_views(mesh, hardware.links, hardware.device, shape, first_rank, n_ranks)


def distinct_views(
    mesh: Mesh, hardware: Hardware, options: Options, sizes: Sequence[int]
) -> tuple[LogicalMesh, ...]:
    """How the first ranks may be seen, of each of some numbers of ranks.

    Without `force`, views that differ only in the names of axes are one.
    """
    found: dict[object, LogicalMesh] = {}
    for size in sizes:
        for view in views_of(mesh, hardware, options, 0, size):
            axes = tuple((view.sizes[a], view.links[a]) for a in view.active_axes)
            key = (view.sizes, view.names) if options.force else (size, axes)
            found.setdefault(key, view)
    return tuple(found.values())


def all_views(
    mesh: Mesh, hardware: Hardware, options: Options, sizes: Sequence[int]
) -> tuple[LogicalMesh, ...]:
    """How the first ranks may be seen, of each of some numbers of ranks: a recipe gives the axes of
    views roles, so that those that only differ in which axis is in use are several."""
    return tuple(v for size in sizes for v in views_of(mesh, hardware, options, 0, size))


def view_at(mesh: Mesh, hardware: Hardware, view: LogicalMesh, first_rank: int) -> LogicalMesh:
    """The same axes over the ranks from `first_rank` on."""
    return factored_view(mesh, hardware.links, hardware.device, view.axes, first_rank)


def pins_on(
    analysis: Analysis, options: Options, view: LogicalMesh
) -> Mapping[str, tuple[Pin, ...]]:
    """The pins of `force` on one view, by parameter placeholder.

    Raises `OptionError` for a name that is no parameter, or an axis that the view does not have.
    """
    placeholders = {
        name: placeholder
        for placeholder, info in analysis.program.parameters.items()
        for name in (info.name, *info.aliases)
    }
    pins: dict[str, tuple[Pin, ...]] = {}
    for pin in options.force:
        if pin.parameter not in placeholders:
            raise OptionError(
                f"force names {pin.parameter!r}, which is no parameter of the model",
                hint=f"parameters are such as {', '.join(list(placeholders)[:3])}",
            )
        axis = pin.axis_index(view.names)
        if options.mesh_shape == "as-given" or view.sizes[axis] > 1:
            key = placeholders[pin.parameter]
            pins[key] = (*pins.get(key, ()), Pin(pin.storage, pin.use, axis))
    return pins


def views_text(views: Sequence[LogicalMesh]) -> str:
    """`2 stages: 8 + 8 devices (dp=2 x tp=4 | dp=4 x tp=2)`; views that are all alike once."""
    sizes = " + ".join(str(view.n_ranks) for view in views)
    texts = [" x ".join(f"{name}={size}" for name, size in v.axes.items()) for v in views]
    within = texts[0] if len(set(texts)) == 1 else " | ".join(texts)
    return f"{len(views)} stages: {sizes} devices ({within})"
