"""The space of pipelines of one program on one machine: what is searched, and what bounds it.

    layers      operators, clustered so that little crosses between layers (`layers.py`)
    submeshes   shares of a node that divide it, and whole nodes. A stage holds consecutive ranks
                and never straddles nodes (`submeshes.py`)
    views       every dp x tp of a submesh, or its own axes; with cp where that is asked for
    counts      of microbatches: divisors of the batch, each about twice the one before

A pipeline is a cut of the layers into stages, a view of a submesh for each, and a count. The
placements of a stage are those that are the fastest for it alone within the budget.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.arrays import Array
from autopar.cost.hardware import Hardware
from autopar.cost.laws import CostModel
from autopar.mesh import LogicalMesh, Mesh, factored_view
from autopar.options import Options
from autopar.passes.analysis import (
    Analysis,
    Folded,
    Recomputable,
    aligned_runs,
    find_runs,
    fold,
    is_searched,
)
from autopar.passes.inter.bounds import StageBounds
from autopar.passes.inter.candidate import Candidate, StageLayout
from autopar.passes.inter.counts import microbatch_counts
from autopar.passes.inter.given_stages import given_ends
from autopar.passes.inter.layer_bounds import LayerBounds
from autopar.passes.inter.layers import MOST_LAYERS, Layers, find_layers
from autopar.passes.inter.orders import plain_order
from autopar.passes.inter.submeshes import (
    distinct_views,
    pins_on,
    submesh_sizes,
    view_at,
    views_text,
)
from autopar.passes.intra import Constraints, Prices, ProblemFamilies, least_phases_s
from autopar.passes.solvers.stages import StageChoice


@dataclass(frozen=True, eq=False)
class PipelineSpace:
    """All pipelines with at least two stages, or with exactly `n_stages`.

    `limits` are the constraints of a recipe, if its pipelines are meant. `searched` is the space
    of all, with which one of equal submeshes shares what is known of the program.
    """

    analysis: Analysis
    mesh: Mesh
    hardware: Hardware
    options: Options
    budget_bytes: float
    layers: Layers
    n_stages: int | None = None
    limits: Constraints | None = None
    prices: Prices = field(default_factory=Prices)
    searched: PipelineSpace | None = None

    @staticmethod
    def of(
        analysis: Analysis,
        mesh: Mesh,
        hardware: Hardware,
        options: Options,
        budget_bytes: float,
        n_stages: int | None = None,
        prices: Prices | None = None,
    ) -> PipelineSpace:
        """The space over the layers and repeated blocks of a program.

        There are at least `n_stages` layers if the program has enough operators, and at most
        `MOST_LAYERS`, or `n_stages` if that is more. Stages that the user gives are the layers.

        Raises the errors of `given_ends`.
        """
        if isinstance(options.stages, tuple):
            layers = Layers.of(analysis, given_ends(analysis, mesh, options.stages))
        else:
            layers = find_layers(analysis, find_runs(analysis), n_stages or 2)
        on = analysis, mesh, hardware, options
        return PipelineSpace(*on, budget_bytes, layers, n_stages, prices=prices or Prices())

    def equal_space(self, limits: Constraints | None, n_least: int, n_most: int) -> PipelineSpace:
        """Pipelines of equal submeshes, of a recipe or searched, over at least `n_least` and at
        most `n_most` layers."""
        layers = self.layers
        if n_most != MOST_LAYERS or n_least > layers.n_layers:
            layers = find_layers(self.analysis, find_runs(self.analysis), n_least, n_most)
        return replace(self, layers=layers, limits=limits, searched=self)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Numbers of microbatches, ascending.

        Raises `BatchError` if the number asked for does not divide the batch.
        """
        return tuple(microbatch_counts(self.analysis, self.options, self.mesh.n_ranks))

    @cached_property
    def sizes(self) -> list[int]:
        """Possible numbers of devices of a stage; none if no view has the degrees asked for."""
        return sorted({view.n_ranks for view in self.views})

    @cached_property
    def views(self) -> tuple[LogicalMesh, ...]:
        """The views of all submeshes, each as if it began at the first rank."""
        sizes = sorted(set(self.given)) or submesh_sizes(self.mesh)
        return distinct_views(self.mesh, self.hardware, self.options, sizes)

    @property
    def given(self) -> tuple[int, ...]:
        """The devices of each stage, if the user gave them."""
        stages = self.options.stages
        return tuple(stage.n_ranks for stage in stages) if isinstance(stages, tuple) else ()

    def depth(self, m: int, n_left: int) -> int:
        """Microbatches in flight on a stage; `n_left` counts it and the stages after it."""
        return min(m, n_left) if self.is_1f1b else m

    @property
    def is_1f1b(self) -> bool:
        """Else the order of microbatches is that of gpipe. These are stages with own ranks."""
        return plain_order(self.options) == "1f1b"

    def constraints(self, view: LogicalMesh) -> Constraints:
        if self.limits is not None:
            return self.limits.on_view(view)
        return Constraints(self.options.forbid, pins=pins_on(self.analysis, self.options, view))

    @property
    def kinds(self) -> list[Hashable]:
        """Per layer; stages of equal kinds have equal problems. Pins name single parameters."""
        if self.options.force:
            return list(range(self.layers.n_layers))
        stands_for = self.layer_bounds.folded.stands_for
        return [tuple(stands_for[first:end]) for first, end in self.layers.ranges]

    @cached_property
    def bounds(self) -> StageBounds:
        return StageBounds.of(
            self.analysis, self._phases_s, self.layers, self.hardware.links, self.options.optimizer,
            self.budget_bytes, self.is_1f1b, self.given,
        )  # fmt: skip

    @cached_property
    def layer_bounds(self) -> LayerBounds:
        (folded, recomputable), plain = self._folded, self._plain
        searches = is_searched(recomputable) and self.limits is None
        recomputing = self._problems(folded, recomputable) if searches else plain
        # Without pins, because one block stands for others.
        constraints = self.limits or Constraints(self.options.forbid)
        on = folded, self.layers, self.hardware, plain, recomputing
        return LayerBounds(*on, constraints, self._phases_s.sum(axis=0))

    def least_step_s(self, m: int) -> float:
        """Lower bound on every pipeline with `m` microbatches; it builds no placement problem.

        Infinite if there is none.
        """
        if not self.sizes:
            return math.inf
        return self.bounds.step_s(self.mesh, self.sizes, m, self.n_stages)

    def candidate(self, m: int, stages: Sequence[StageChoice]) -> Candidate:
        """A pipeline whose configurations are indices of `views`, every stage on its own ranks."""
        views, first_rank = [], 0
        for stage in stages:
            views.append(view_at(self.mesh, self.hardware, self.views[stage.config], first_rank))
            first_rank += views[-1].n_ranks
        return Candidate(
            f"{views_text(views)}, m={m}",
            self.layers.ends_of([stage.last for stage in stages]),
            tuple(StageLayout(view, self.constraints(view)) for view in views),
            m,
            schedule=plain_order(self.options),
        )

    @cached_property
    def _any_cost(self) -> CostModel:
        """For what does not depend on the view."""
        links, device = self.hardware.links, self.hardware.device
        view = factored_view(self.mesh, links, device, {"dp": self.mesh.n_ranks, "tp": 1})
        return CostModel.of(view, self.hardware)

    @cached_property
    def _phases_s(self) -> Array:
        return least_phases_s(self.analysis, self._any_cost)

    @cached_property
    def _folded(self) -> tuple[Folded, Recomputable | None]:
        """What parameters cost at least, and what may run again; None if its ranges do not align
        with the folded blocks. Then bounds of the budget say only what holds anyway."""
        if self.searched is not None:
            return self.searched._folded
        runs, recomputable = find_runs(self.analysis), Recomputable.of(self.analysis, self.options)
        if recomputable is not None and aligned_runs(self.analysis, recomputable) != runs:
            recomputable = None
        return fold(self.analysis.set_gathers("least"), runs), recomputable

    @cached_property
    def _plain(self) -> ProblemFamilies:
        """The problems without a choice of recompute."""
        if self.searched is not None:
            return self.searched._plain
        folded, recomputable = self._folded
        return self._problems(folded, None if is_searched(recomputable) else recomputable)

    def _problems(self, folded: Folded, recomputable: Recomputable | None) -> ProblemFamilies:
        family = tuple(CostModel.of(view, self.hardware) for view in self.views)
        return ProblemFamilies(
            folded.analysis, self.options.optimizer, (family,), self.counts,
            recomputable=recomputable, prices=self.prices,
        )  # fmt: skip
