"""Names of logical axes, after what they do in a plan.

Views of the search are called dp x tp before anything is placed on them. An axis of the result on
which sequences are split, and no weights, is called cp: context parallelism. Axes that the user
names keep their names: those of `force`, `mesh_shape` and recipes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.mesh import LogicalMesh
from autopar.options import Options
from autopar.passes.inter import axes_text, views_text
from autopar.passes.search.simulator import Simulator, Solved
from autopar.report import context_axes

_CONTEXT = ("cp", "cp2", "cp3")


@dataclass(frozen=True)
class AxisNames:
    """Gives the axes of simulated plans their names."""

    simulator: Simulator
    options: Options

    def named(self, solved: Solved) -> Solved:
        """The same plan on axes that are named after what they do."""
        options, candidate = self.options, solved.candidate
        if options.force or options.mesh_shape != "auto" or options.manual or candidate.recipe:
            return solved
        programs = self.simulator.pipeline(solved.stages, solved.candidate.schedule).stages
        views = [stage.cost.mesh for stage in solved.stages]
        axes = dict[LogicalMesh, set[int]]()  # of a device all stages have one view
        for view, program in zip(views, programs, strict=True):
            of_program = set(context_axes(program))
            axes[view] = axes.get(view, of_program) & of_program
        renamed = [_rename_axes(view, tuple(sorted(axes[view]))) for view in views]
        layouts = zip(candidate.stages, renamed, strict=True)
        candidate = replace(
            candidate,
            name=candidate.name.replace(_text(views), _text(renamed)),
            stages=tuple(replace(layout, view=view) for layout, view in layouts),
        )
        stages = zip(solved.stages, renamed, strict=True)
        return replace(
            solved,
            candidate=candidate,
            stages=tuple(replace(s, cost=replace(s.cost, mesh=view)) for s, view in stages),
        )


def _rename_axes(view: LogicalMesh, axes: tuple[int, ...]) -> LogicalMesh:
    kept = {name for k, name in enumerate(view.names) if k not in axes}
    names = dict(zip(axes, (word for word in _CONTEXT if word not in kept), strict=False))
    return replace(view, names=tuple(names.get(k, name) for k, name in enumerate(view.names)))


def _text(views: list[LogicalMesh]) -> str:
    return axes_text(views[0]) if len(views) == 1 else views_text(views)
