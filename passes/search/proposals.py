"""Candidates of one stage: on every logical view of the mesh, once for views that differ only in
axis names; or the user's recipe. `Proposals` has a method for each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.cost.hardware import Hardware
from autopar.mesh import LogicalMesh, Mesh, factored_view
from autopar.options import Manual, Options
from autopar.passes.analysis import Analysis, microbatch_counts, recipe_counts
from autopar.passes.inter import (
    Candidate,
    StageLayout,
    axes_text,
    check_ranks,
    distinct_views,
    n_operators,
    pins_on,
    recipe_limits,
    views_of,
    with_pinned_axes,
)
from autopar.passes.intra import Constraints


@dataclass(frozen=True)
class Proposals:
    """The proposals for one program on one machine."""

    analysis: Analysis
    mesh: Mesh
    hardware: Hardware
    options: Options

    def one_stage(self) -> Iterator[Candidate]:
        """Every view with every number of microbatches worth trying."""
        views = distinct_views(self.mesh, self.hardware, self.options, [self.mesh.n_ranks])
        counts = microbatch_counts(self.analysis, self.options, self.mesh.n_ranks)
        for view in with_pinned_axes(self.options, views):
            for m in counts:
                yield self._of_one(f"search on {axes_text(view)}", self._layout(view), m)

    def _of_one(self, name: str, layout: StageLayout, n_microbatches: int) -> Candidate:
        return Candidate(name, (n_operators(self.analysis.program),), (layout,), n_microbatches)

    def _layout(self, view: LogicalMesh) -> StageLayout:
        pins = pins_on(self.analysis, self.options, view)
        return StageLayout(view, Constraints(self.options.forbid, pins=pins))

    def views(self, first_rank: int, n_ranks: int) -> list[LogicalMesh]:
        return views_of(self.mesh, self.hardware, self.options, first_rank, n_ranks)

    def manual(self, manual: Manual) -> list[Candidate]:
        """The user's recipe of one stage, with every number of microbatches, the fewest first.

        Raises `MeshError` if it does not use every rank.
        """
        check_ranks(manual, self.mesh)
        counts = recipe_counts(self.analysis, self.options, manual, self.mesh.n_ranks)
        links, device = self.hardware.links, self.hardware.device
        view = factored_view(self.mesh, links, device, {"dp": manual.dp, "tp": manual.tp})
        layout = StageLayout(view, recipe_limits(self.options, manual))
        return [self._of_one("manual recipe", layout, m) for m in counts]
