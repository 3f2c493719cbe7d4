"""Candidates that need no stage search: one stage, the user's stages, or the user's recipe.

    one stage     on every logical view of the mesh, once for views that differ only in axis names
    given         the user's stages, each on the view that is fastest for it
    manual        the user's recipe

`Proposals` has a method for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.cost.hardware import Hardware
from autopar.errors import InfeasibleError, MeshError, OptionError
from autopar.mesh import LogicalMesh, Mesh, factored_view
from autopar.options import Manual, Options, StageOption
from autopar.passes.analysis import Analysis, microbatch_counts, recipe_counts
from autopar.passes.inter import (
    Candidate,
    StageLayout,
    axes_text,
    check_ranks,
    check_submesh,
    distinct_views,
    ends_by_modules,
    n_operators,
    pins_on,
    recipe_limits,
    views_of,
    views_text,
    with_pinned_axes,
)
from autopar.passes.intra import Constraints
from autopar.passes.search.evaluator import Evaluator


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

    def given(self, stages: Sequence[StageOption], evaluator: Evaluator) -> Iterator[Candidate]:
        """The user's stages, each on the view that is fastest for it.

        Raises `MeshError` if they do not add up to the mesh, `OptionError` if one has nothing to
        optimise.
        """
        held = sum(s.n_ranks for s in stages)
        if held != self.mesh.n_ranks:
            raise MeshError(
                f"stages= hold {held} ranks, the mesh has {self.mesh.n_ranks}",
                hint="make the submeshes add up to the mesh",
            )
        ends = ends_by_modules(self.analysis.program, stages)
        idle = evaluator.stage_without_parameters(ends)
        if idle is not None:
            raise OptionError(
                f"stage {idle} of stages= has no parameter that learns, so nothing to optimise",
                hint="give it a module with parameters",
            )
        first_rank, choices = 0, []
        for stage in stages:
            check_submesh(self.mesh, first_rank, stage)
            views = self.views(first_rank, stage.n_ranks)
            choices.append([self._layout(view) for view in views])
            first_rank += stage.n_ranks
        for m in microbatch_counts(self.analysis, self.options, self.mesh.n_ranks):
            try:
                layouts = evaluator.fastest_layouts(ends, choices, m)
            except InfeasibleError:  # solving the candidate raises it, for its first views
                layouts = tuple(of_stage[0] for of_stage in choices)
            name = f"{views_text([layout.view for layout in layouts])}, m={m}"
            yield Candidate(name, ends, layouts, m)

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
