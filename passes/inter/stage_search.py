"""The joint search with one number of microbatches: a stage problem of what stages may be, solved,
and its best plans played.

    configurations  placements of the program on views, and what every range of layers costs as a
                    stage with them (`stage_costs.py`)
    places          a stage waits for what it receives from the stages before and after it: a share
                    of a node over the link inside it, unless it is the first or last of its node
    search          exact for its closed form over these numbers (`solvers/stages.py`); the plans
                    found are ranked by playing their schedules (`played.py`)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.cost.hardware import Hardware
from autopar.mesh import LogicalMesh, Mesh
from autopar.passes.inter.estimates import Estimates
from autopar.passes.inter.layers import Layers
from autopar.passes.inter.score import MessageSeconds, played_s
from autopar.passes.inter.submeshes import Place, places_of
from autopar.passes.inter.tables import StageTable
from autopar.passes.solvers.problem import Infeasible
from autopar.passes.solvers.stages import StagePlan, StageProblem, solve_stages

# Plans of one search: proving the order of many that are nearly alike takes long.
_PLANS_PER_COUNT = 6
_WITHIN = 0.02
# Tables of so few stages are searched soon, and for more: played, plans are up to a tenth faster
# than their closed form, as stages that differ wait less for each other with few microbatches.
_FEW_STAGES = 500
_PLANS_OF_FEW, _WITHIN_OF_FEW = 12, 0.1
# What is searched are estimates: plans closer than this need not be told apart.
_GAP_GOAL = 1e-3


@dataclass(frozen=True)
class SearchedPlan:
    """A plan of the stage search: its microbatches, each stage's last layer and view, and which
    of the configurations it is.

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


@dataclass(frozen=True, eq=False)
class StageSearch:
    """Plans with `n_microbatches`, of stages that are `configs`; `learns` says of [first, last
    layer] whether there is a parameter to optimise."""

    mesh: Mesh
    hardware: Hardware
    schedule: str
    layers: Layers
    learns: NDArray[np.bool_]
    estimates: Estimates
    n_microbatches: int
    configs: Sequence[StageTable]

    def problem(self, n_stages: int | None, budget_bytes: float) -> StageProblem | None:
        """The stage problem: every configuration at every place that it may have; None where there
        is no configuration."""
        configs, placed, m = self.configs, self._placed, self.n_microbatches
        if not configs:
            return None
        at = [c for c, _ in placed]
        static, activation = (
            np.stack([configs[c].ranges(part) for c in at], axis=-1)
            for part in ("static", "activation")
        )
        if self.schedule == "gpipe":  # all microbatches are in flight at once, on every stage
            static, activation = static + m * activation, np.zeros_like(activation)
        worked = [self.estimates.tables(m, config) for config in configs]
        time = [worked[c][0] + configs[c].messages(p.before, p.after) for c, p in placed]
        return StageProblem(
            np.where(self.learns[:, :, None], np.stack(time, axis=-1), np.inf),
            np.stack([worked[c][1] for c in at], axis=-1),
            static,
            activation,
            tuple(configs[c].view.n_ranks for c in at),
            self.mesh.n_ranks,
            m,
            budget_bytes,
            n_stages,
            self.mesh.devices_per_node,
            tuple(place.offsets for _, place in placed),
        )

    def plans(self, n_stages: int | None, budget_bytes: float) -> list[SearchedPlan]:
        """The best plans of at least two stages, or of exactly `n_stages`."""
        problem = self.problem(n_stages, budget_bytes)
        if problem is None:
            return []
        n_best, within = _PLANS_PER_COUNT, _WITHIN
        if problem.time_s.size <= _FEW_STAGES:
            n_best, within = max(n_best, _PLANS_OF_FEW), max(within, _WITHIN_OF_FEW)
        found = solve_stages(problem, n_best, _GAP_GOAL, within)
        if isinstance(found, Infeasible):
            return []
        return list(dict.fromkeys(map(self._planned, found)))

    @cached_property
    def _placed(self) -> list[tuple[int, Place]]:
        """Every configuration at every place."""
        return [
            (c, place)
            for c, config in enumerate(self.configs)
            for place in places_of(self.mesh, self.hardware, config.view.n_ranks)
        ]

    def _planned(self, plan: StagePlan) -> SearchedPlan:
        configs = tuple(self._placed[stage.config][0] for stage in plan.stages)
        return SearchedPlan(
            self.n_microbatches,
            tuple(stage.last for stage in plan.stages),
            tuple(self.configs[c].view for c in configs),
            configs,
            plan.objective_s,
            self._played_s(plan),
        )

    def _played_s(self, plan: StagePlan) -> float:
        """A plan's step, with messages between neighbours of the larger slices of both."""
        every, m = self.configs, self.n_microbatches
        at = [(*self._placed[stage.config], stage.last) for stage in plan.stages]
        worked = [
            self.estimates.of(m, every[c], stage.first, stage.last)
            for (c, _, _), stage in zip(at, plan.stages, strict=True)
        ]
        hops = []
        for k, ((c, place, last), (other, _, _)) in enumerate(itertools.pairwise(at)):
            traffic = [every[i].traffic for i in (c, other)]
            forward_s = max(float(t.forward_s(place.after)[last]) for t in traffic)
            backward_s = max(float(t.backward_s(place.after)[last]) for t in traffic)
            hops.append(MessageSeconds(k, k + 1, forward_s, backward_s))
        return played_s(self.schedule, m, worked, hops)
