"""The Megatron recipe with stages: equal submeshes, layers of balanced FLOPs, one view for all.

Each of S stages has dp x tp ranks. The batch is split over dp and matmuls over tp (the roles "data"
and "tensor" of `passes/intra/constraints.py`). Placements are chosen on the abstract machine of
recipes (`recipe_cost`) and priced on the real one. They are some of those that the roles allow, so
the layers' optima bound them, too (`Megatron.layered_s`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autopar.errors import MeshError, OptionError
from autopar.mesh import LogicalMesh, Mesh, factored_view, has_degrees
from autopar.options import Manual, Options
from autopar.passes.analysis import Analysis
from autopar.passes.inter.bounds import step_bound_s
from autopar.passes.inter.candidate import Candidate, StageLayout
from autopar.passes.inter.counts import microbatch_counts, recipe_counts
from autopar.passes.inter.layers import MOST_LAYERS, balance
from autopar.passes.inter.space import PipelineSpace
from autopar.passes.inter.submeshes import view_at, views_text
from autopar.passes.intra import Constraints


@dataclass(frozen=True)
class Megatron:
    """One Megatron pipeline; `last_layers` has the last layer of each stage. `is_manual`: the user
    asked for it."""

    space: PipelineSpace
    view: LogicalMesh
    last_layers: tuple[int, ...]
    n_microbatches: int
    is_manual: bool = False

    @property
    def shared_s(self) -> float:
        """Lower bound on its step: every operator in equal shares; it costs nothing."""
        n_ranks, bounds = self.view.n_ranks, self.space.bounds
        return bounds.span_of(self.last_layers, n_ranks, self.n_microbatches)

    @property
    def layered_s(self) -> float:
        """Lower bound on its step: its span by what layers take at least on its view."""
        whole_s, work_s = self.space.layer_bounds.free(self.view, self.n_microbatches)
        whole_s, work_s = (np.add.reduceat(s, self._firsts) for s in (whole_s, work_s))
        of_ranges = self.space.bounds.messages.passed_s(self.view.n_ranks, self.n_microbatches)
        passed_s = of_ranges[self._firsts, self.last_layers]
        on = self.n_microbatches, self.space.is_1f1b
        return step_bound_s(whole_s, work_s, *on, passed_s=passed_s)

    @property
    def _firsts(self) -> list[int]:
        return [0, *(last + 1 for last in self.last_layers[:-1])]

    @property
    def candidate(self) -> Candidate:
        space, view = self.space, self.view
        n_stages, on = len(self.last_layers), (space.mesh, space.hardware)
        views = [view_at(*on, view, k * view.n_ranks) for k in range(n_stages)]
        name = "manual recipe" if self.is_manual else f"Megatron, {views_text(views)}"
        return Candidate(
            f"{name}, m={self.n_microbatches}",
            space.layers.ends_of(self.last_layers),
            tuple(StageLayout(v, space.constraints(v)) for v in views),
            self.n_microbatches,
            "" if self.is_manual else "Megatron",
            self._row,
        )

    @property
    def _row(self) -> str:
        """`TP8 x PP4 x DP2`, of tensor parallelism over all of a node."""
        dp, tp = self.view.sizes
        if self.is_manual or tp == 1 or tp != self.space.mesh.devices_per_node:
            return ""
        return f"TP{tp} x PP{len(self.last_layers)} x DP{dp} (Megatron)"


def megatron_pipelines(space: PipelineSpace, manual: Manual | None = None) -> list[Megatron]:
    """The Megatron pipelines for the program and machine of `space`, with every number of
    microbatches; with `manual` those of the recipe asked for.

    Raises `MeshError` if `manual` does not place every rank, `OptionError` if the model cannot be
    cut so often, and `OptionError` or `BatchError` if the batch does not divide as it says.
    """
    analysis, mesh, options = space.analysis, space.mesh, space.options
    if manual is None:
        splits = list(_splits(analysis, mesh, options))
    else:
        check_ranks(manual, mesh)
        splits = [(manual.pp, manual.dp, manual.tp)]
    # The recipe asked for is cut into the same layers as all others. `n_least` is capped, because
    # no model has thousands of layers worth a stage.
    n_least = max(min(mesh.n_ranks, MOST_LAYERS), manual.pp if manual else 0)
    limits = recipe_limits(options, manual)
    space = space.recipe_space(limits, n_least, max(mesh.n_ranks, MOST_LAYERS))
    ends = _ends_that_learn(space)
    if manual is not None and manual.pp > len(ends):  # some stages have nothing to optimise
        ends = list(range(space.layers.n_layers))
    flops = np.add.reduceat(space.layers.flops, [0, *(end + 1 for end in ends[:-1])]).tolist()
    cuts = {
        n: [ends[last] for last in balance(flops, n)]
        for n in {n for n, _, _ in splits}
        if n <= len(ends)
    }
    found = []
    for n_stages, dp, tp in splits:
        if n_stages not in cuts and manual is not None:
            some = "1 stage" if len(ends) == 1 else f"{len(ends)} stages"
            raise OptionError(
                f"Manual(pp={n_stages}): the model can be cut into {some}",
                hint="give fewer stages, and dp or tp the other ranks",
            )
        if n_stages not in cuts:
            continue
        axes = {"dp": dp, "tp": tp}
        view = factored_view(mesh, space.hardware.links, space.hardware.device, axes)
        if manual is not None:
            counts = recipe_counts(analysis, options, manual, mesh.n_ranks)
        else:
            counts = microbatch_counts(analysis, options, mesh.n_ranks, dp)
        on = space, view, tuple(cuts[n_stages])
        found += [Megatron(*on, m, manual is not None) for m in counts]
    return found


def _ends_that_learn(space: PipelineSpace) -> list[int]:
    """The layers after which stages may end, so that each has a parameter to optimise.

    Those without are joined to the next that has one. If no parameter learns, all layers.
    """
    (learn,) = np.nonzero(np.diag(space.bounds.is_possible))
    n_layers = space.layers.n_layers
    return [*learn[:-1].tolist(), n_layers - 1] if len(learn) else [*range(n_layers)]


def _splits(analysis: Analysis, mesh: Mesh, options: Options) -> Iterator[tuple[int, int, int]]:
    """Every number of stages, dp and tp that `forbid` allows. With `force` there is none: it pins
    what recipes decide."""
    if "pipeline" in options.forbid or options.force:
        return
    for n_stages in (n for n in range(2, mesh.n_ranks + 1) if mesh.n_ranks % n == 0):
        each = mesh.n_ranks // n_stages
        for tp in (n for n in range(1, each + 1) if each % n == 0):
            dp = each // tp
            if not has_degrees(options.mesh_shape, {"dp": dp, "tp": tp}):
                continue
            splits_batch = dp > 1 and ("data" in options.forbid or not analysis.batch.size)
            if not splits_batch and not (tp > 1 and "tensor" in options.forbid):
                yield n_stages, dp, tp


def check_ranks(manual: Manual, mesh: Mesh) -> None:
    """Raises `MeshError` if the recipe does not place every rank of the mesh."""
    if manual.pp * manual.dp * manual.tp != mesh.n_ranks:
        sizes = f"dp={manual.dp}, tp={manual.tp}, pp={manual.pp}"
        raise MeshError(
            f"Manual({sizes}) places {manual.pp * manual.dp * manual.tp} ranks, "
            f"the mesh has {mesh.n_ranks}",
            hint="make dp * tp * pp the number of devices",
        )


def recipe_limits(options: Options, manual: Manual | None) -> Constraints:
    """The constraints of Megatron; without `manual`, no ZeRO and no sequence parallelism."""
    sequence = frozenset() if manual is not None and manual.sp else frozenset({"sequence"})
    zero = manual.zero if manual is not None else 0
    return Constraints(options.forbid | sequence, ("data", "tensor"), zero)
