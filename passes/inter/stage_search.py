"""The stage search for one number of microbatches: the best plans, ranked by score.

A configuration is a placement of the whole program on a view, with the cost of every range of
layers as a stage (`tables.py`). It is offered at every place that it may have in its node, because
a stage waits for what its neighbours send: a stage smaller than a node receives over the link
inside the node, unless it is the first or the last of its node (`submeshes.py`).

The search is exact for the closed form over these numbers (`passes/solvers/stages/search.py`). The
plans found are ranked by their scores (`score.py`).
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
from autopar.passes.inter.score import MessageSeconds, score_s
from autopar.passes.inter.submeshes import SubmeshPlace, places_of
from autopar.passes.inter.tables import StageTable
from autopar.passes.solvers.problem import Infeasible
from autopar.passes.solvers.stages import StagePlan, StageProblem, solve_stages

# How many plans one search returns, and how far (relative) they may be from the best. Both are
# small, because proving the order of many nearly equal plans takes long.
_PLANS_PER_COUNT = 6
_WITHIN = 0.02
# Small problems are fast to search, so they return more plans. Scores are up to 10% below the
# closed form, because with few microbatches unequal stages wait less for each other.
_FEW_STAGES = 500
_PLANS_OF_FEW, _WITHIN_OF_FEW = 12, 0.1
# The numbers are estimates, so plans closer than this (relative) need not be told apart.
_GAP_GOAL = 1e-3


@dataclass(frozen=True)
class SearchedPlan:
    """A plan of the stage search: the last layer, view and configuration of every stage.

    `objective_s` is its step time by the closed form, `estimate_s` its score with the same numbers.
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
    """The search for plans with `n_microbatches` whose stages are among `configs`.

    `learns[first layer, last layer]` says whether a stage has a parameter to optimise.
    """

    mesh: Mesh
    hardware: Hardware
    schedule: str
    layers: Layers
    learns: NDArray[np.bool_]
    estimates: Estimates
    n_microbatches: int
    configs: Sequence[StageTable]

    def problem(self, n_stages: int | None, budget_bytes: float) -> StageProblem | None:
        """The stage problem, with every configuration at every possible place.

        None if there is no configuration.
        """
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
        tables = [self.estimates.tables(m, config) for config in configs]
        time = [tables[c][0] + configs[c].messages(p.before, p.after) for c, p in placed]
        return StageProblem(
            np.where(self.learns[:, :, None], np.stack(time, axis=-1), np.inf),
            np.stack([tables[c][1] for c in at], axis=-1),
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
        """The best plans with at least two stages, or with exactly `n_stages`."""
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
    def _placed(self) -> list[tuple[int, SubmeshPlace]]:
        """Every configuration, by index, at every place."""
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
            self._score_s(plan),
        )

    def _score_s(self, plan: StagePlan) -> float:
        """The score of a plan; of two neighbours, the one with the slower messages counts."""
        every, m = self.configs, self.n_microbatches
        at = [(*self._placed[stage.config], stage.last) for stage in plan.stages]
        seconds = [
            self.estimates.of(m, every[c], stage.first, stage.last)
            for (c, _, _), stage in zip(at, plan.stages, strict=True)
        ]
        messages = []
        for k, ((c, place, last), (other, _, _)) in enumerate(itertools.pairwise(at)):
            traffic = [every[i].traffic for i in (c, other)]
            forward_s = max(float(t.forward_s(place.after)[last]) for t in traffic)
            backward_s = max(float(t.backward_s(place.after)[last]) for t in traffic)
            messages.append(MessageSeconds(k, k + 1, forward_s, backward_s))
        return score_s(self.schedule, m, seconds, messages)
