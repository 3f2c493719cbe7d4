"""Views with an axis cp as nodes of "auto": Megatron's layouts on them, and a search.

The search cuts rows over dp and sequences over cp, and is free on tp. A view of two axes that cuts
rows instead bounds both (`passes/inter/contexts.py`):

    shared      every operator in equal shares, nothing else
    rows        the view that cuts rows, without a memory limit; and what must run again to fit
    ...         the levels of recipes (`recipes.py`), and of one stage (`levels.py`)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from autopar.arrays import Array
from autopar.errors import InfeasibleError
from autopar.mesh import LogicalMesh, Mesh, factored_view
from autopar.passes.inter import (
    Candidate,
    StageLayout,
    axes_text,
    context_counts,
    microbatch_counts,
    n_operators,
    plain_order,
    rows_instead,
    stage_degrees,
)
from autopar.passes.intra import Constraints, Role, shared_s
from autopar.passes.search.branch_bound import Node
from autopar.passes.search.levels import Levels, Parts
from autopar.passes.search.recipes import RecipeNodes, megatron_on

# Those that are ruled out share a row among the alternatives.
_ROW = "views with cp"


@dataclass(frozen=True)
class ContextNodes:
    """Makes the nodes of one program on `mesh`; `times_s` are its `least_times_s`, [2]."""

    levels: Levels
    mesh: Mesh
    times_s: Array
    _rows_s: dict[tuple[LogicalMesh, int], tuple[float, float]] = field(default_factory=dict)

    def roots(self) -> Iterator[Node]:
        evaluator = self.levels.simulator.evaluator
        analysis, options, hardware = evaluator.analysis, evaluator.options, evaluator.hardware
        n_ranks = self.mesh.n_ranks
        for axes in stage_degrees(analysis, options, n_ranks):
            if "cp" not in axes:
                continue
            view = factored_view(self.mesh, hardware.links, hardware.device, axes)
            every = microbatch_counts(analysis, options, n_ranks, axes["dp"])
            counts = context_counts(analysis, options, view, every)
            for recipe in megatron_on(view, options) if counts else ():
                node = RecipeNodes(self.levels).single_stage(recipe)
                candidates = [self._candidate(view, recipe.roles, m) for m in counts]
                yield self._bounded(candidates, partial(_of_recipe, node))
            if len(view.active_axes) == 3:  # those of two are searched anyway
                for m in counts:
                    candidate = self._candidate(view, ("data", "context", "any"), m)
                    yield self._bounded([candidate], partial(self.levels.root, candidate))

    def _candidate(self, view: LogicalMesh, roles: Sequence[Role], m: int) -> Candidate:
        evaluator = self.levels.simulator.evaluator
        limits = Constraints(evaluator.options.forbid, tuple(roles))
        return Candidate(
            f"search on {axes_text(view)}", (n_operators(evaluator.analysis.program),),
            (StageLayout(view, limits),), m, schedule=plain_order(evaluator.options),
        )  # fmt: skip

    def _bounded(self, candidates: Sequence[Candidate], made: Callable[[float], Node]) -> Node:
        """A node with the bounds of these candidates, fewest microbatches first, before its own
        levels: `made` makes it with a bound."""
        analysis = self.levels.simulator.evaluator.analysis
        m = candidates[0].n_microbatches
        node = made(shared_s(self.times_s, analysis, self.mesh.n_ranks, m))
        refine = partial(self._bound_by_rows, node.bound_s, candidates, made)
        return replace(node, level="shared", row=_ROW, refine=refine)

    def _bound_by_rows(
        self, shared_s: float, candidates: Sequence[Candidate], made: Callable[[float], Node],
        limit_s: float,
    ) -> Parts:  # fmt: skip
        """As if rows were cut where sequences are."""
        evaluator = self.levels.simulator.evaluator
        (layout,) = candidates[0].stages
        counts = [of.n_microbatches for of in candidates]
        on = evaluator.analysis, self.mesh, evaluator.hardware, layout.view
        found, bound_s = rows_instead(*on, math.gcd(*counts)), shared_s
        if found is not None:
            free_s, hidden_s = self._free_s(*found, limit_s)
            again_s = evaluator.least_rerun_s(candidates[-1])  # more microbatches keep less
            bound_s = max(bound_s, free_s, hidden_s + again_s)
        return [replace(made(bound_s), level="rows", row=_ROW)]

    def _free_s(self, view: LogicalMesh, m: int, limit_s: float) -> tuple[float, float]:
        """The free bound of a view of two axes, and what it is if all that can hide is hidden."""
        if (view, m) not in self._rows_s:
            evaluator = self.levels.simulator.evaluator
            plain = evaluator.plain_evaluator or evaluator
            try:
                free = plain.placed(self._candidate(view, (), m), None, limit_s)
            except InfeasibleError:
                return 0.0, 0.0
            (chosen,) = free.choices
            self._rows_s[view, m] = free.bound_s, chosen.hidden_bound_s if chosen.settled else 0.0
        return self._rows_s[view, m]


def _of_recipe(node: Node, bound_s: float) -> Node:
    return replace(node, bound_s=bound_s)
