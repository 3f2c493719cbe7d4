"""Place a plan's stages on an analysed program: every operator's placements, on its ranks."""

from __future__ import annotations

import math

from autopar.cost.hardware import Hardware
from autopar.cost.laws import CostModel
from autopar.errors import BatchError, PlanError
from autopar.mesh import Mesh, factored_view
from autopar.passes.analysis import Analysis, cut
from autopar.passes.lowering import PlacedStage, replay, replay_ends
from autopar.plans import PlanData


def check_graph(data: PlanData, analysis: Analysis) -> None:
    """Raises `PlanError` if the plan was made for another graph."""
    if data.graph_hash != analysis.program.hash():
        raise PlanError(
            f"the plan was made for graph {data.graph_hash} of {data.model}, "
            f"this model gives {analysis.program.hash()}",
            hint="same model, mode, input shapes, precision and versions; or plan again",
        )


def check_rows(data: PlanData, analysis: Analysis, n_blocks: int) -> None:
    """Raises `BatchError` if the batch does not divide by microbatches and row blocks."""
    n_splits = analysis.batch.n_splits(data.microbatches)
    n, size = n_splits * n_blocks, analysis.batch.size
    if size % n:
        # The graph of gradient accumulation is of one microbatch.
        of_step = analysis.batch.n_accumulated
        raise BatchError(
            f"a batch of {size * of_step} rows does not divide by {n * of_step}: "
            f"{data.microbatches} microbatches x {n_blocks} ranks that split the batch; "
            f"{nearest_sizes(size * of_step, n * of_step)}",
            hint="set drop_last=True in the loader, pad the batch, or use a size that divides",
        )


def nearest_sizes(size: int, n: int) -> str:
    """The sizes that work beside one that `n` does not divide."""
    below, above = size // n * n, (size // n + 1) * n
    return f"{below} and {above} would" if below else f"{above} would"


def place_stages(
    data: PlanData, analysis: Analysis, mesh: Mesh, hardware: Hardware, with_outputs: bool = False
) -> tuple[PlacedStage, ...]:
    """The plan's stages on a program; `with_outputs` keeps what the model returns.

    Raises `PlanError` if they do not fit the program, or do not add up to the mesh.
    """
    planned = math.prod(data.mesh.shape)
    if planned != mesh.n_ranks:
        raise PlanError(f"the plan's stages hold {planned} ranks, the mesh has {mesh.n_ranks}")
    ends = replay_ends(analysis.program, data.stages)
    parts = [analysis]
    if len(ends) > 1:
        parts = [analysis.part(p) for p in cut(analysis.program, ends, with_outputs)]
    found = []
    for part, record, first_rank in zip(parts, data.stages, data.first_ranks, strict=True):
        held_shape = mesh.submesh_shape(first_rank, record.n_ranks)
        if record.mesh_shape != held_shape:
            raise PlanError(
                f"a stage's mesh shape is {record.mesh_shape}, that of its ranks is {held_shape}",
                hint="stages hold consecutive ranks of the mesh",
            )
        view = factored_view(mesh, hardware.links, hardware.device, record.axes, first_rank)
        strategy = replay(part, record, data.microbatches, data.forbid)
        found.append(PlacedStage(part, strategy, CostModel.of(view, hardware)))
    return tuple(found)
