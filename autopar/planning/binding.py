"""Binding: a plan's decisions laid on a captured program, verified, and priced.

Costs are computed from the program, never read from a plan. What runs is lowered when it is first
asked for (`Bound.pipeline`). Programs of other input shapes, and those that return outputs, are
laid by the same plan (`lay_stages`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.cost.hardware import Hardware, resolve
from autopar.cost.laws import CostModel
from autopar.cost.price import link_between, predict
from autopar.errors import PlanError
from autopar.mesh import Mesh, factored_view
from autopar.passes.analysis import Analysis, compute_dtype, cut
from autopar.passes.lowering import PlacedStage, join, replay, replay_ends
from autopar.passes.search import Predict
from autopar.plans import InputSignature, PlanData, Predicted
from autopar.program import Pipeline
from autopar.schedule import ORDERS
from autopar.verifier import verify_pipeline


@dataclass(frozen=True)
class Bound:
    """A plan laid on a captured program: everything that can be computed from it.

    `simulated` is what planning has priced these stages at, with few of their blocks; None where
    they were not planned here.
    """

    data: PlanData
    analysis: Analysis
    mesh: Mesh
    stages: tuple[PlacedStage, ...]
    simulated: Predicted | None = None

    @cached_property
    def hardware(self) -> Hardware:
        return resolve(self.mesh, compute_dtype(self.analysis))

    @property
    def costs(self) -> list[CostModel]:
        return [stage.cost for stage in self.stages]

    @cached_property
    def pipeline(self) -> Pipeline:
        """The stages lowered and joined, as they run; verified before anyone has them."""
        pipeline = join(self.stages, ORDERS[self.data.schedule])
        verify_pipeline(pipeline)
        return pipeline

    @cached_property
    def predicted(self) -> Predicted:
        if self.simulated is not None:
            return self.simulated
        predicted = predict_on(self.mesh, self.analysis, self.data.optimizer, self.data.inputs)
        return predicted(self.pipeline, self.costs)


def predict_on(
    mesh: Mesh, analysis: Analysis, optimizer: str, inputs: Sequence[InputSignature]
) -> Predict:
    """How pipelines of a program are priced on a machine; `inputs` are one global batch."""
    hardware = resolve(mesh, compute_dtype(analysis))
    integers = [i for i in inputs if i.dtype.startswith("int") and len(i.shape) == 2]
    n_tokens = max((math.prod(i.shape) for i in integers), default=0)
    n_samples = analysis.batch.size * analysis.batch.n_accumulated

    def predicted(pipeline: Pipeline, costs: Sequence[CostModel]) -> Predicted:
        return predict(
            pipeline, costs, optimizer, link_between(mesh, hardware.links),
            peak_flops_per_s=hardware.peak_flops_per_s,
            n_samples=n_samples or None, n_tokens=n_tokens or None,
        )  # fmt: skip

    return predicted


def bind(data: PlanData, analysis: Analysis, mesh: Mesh) -> Bound:
    """Lay plan data on an analysed program.

    Raises `PlanError` where the plan is another graph's, or not legal on it.
    """
    if data.graph_hash != analysis.program.hash():
        raise PlanError(
            f"the plan was made for graph {data.graph_hash} of {data.model}, "
            f"this model gives {analysis.program.hash()}",
            hint="same model, mode, input shapes, precision and versions; or plan again",
        )
    hardware = resolve(mesh, compute_dtype(analysis))
    return Bound(data, analysis, mesh, lay_stages(data, analysis, mesh, hardware))


def lay_stages(
    data: PlanData, analysis: Analysis, mesh: Mesh, hardware: Hardware, with_outputs: bool = False
) -> tuple[PlacedStage, ...]:
    """The plan's stages on a program; `with_outputs` also for what the model returns.

    Raises `PlanError` where they do not fit it, or do not add up to the mesh.
    """
    held = sum(stage.n_ranks for stage in data.stages)
    if held != mesh.n_ranks:
        raise PlanError(f"the plan's stages hold {held} ranks, the mesh has {mesh.n_ranks}")
    ends = replay_ends(analysis.program, data.stages)
    parts = [analysis]
    if len(ends) > 1:
        parts = [analysis.part(p) for p in cut(analysis.program, ends, with_outputs)]
    found, first_rank = [], 0
    for part, record in zip(parts, data.stages, strict=True):
        held_shape = mesh.submesh_shape(first_rank, record.n_ranks)
        if record.mesh_shape != held_shape:
            raise PlanError(
                f"a stage's mesh shape is {record.mesh_shape}, that of its ranks is {held_shape}",
                hint="stages hold consecutive ranks of the mesh",
            )
        view = factored_view(mesh, hardware.links, hardware.device, record.axes, first_rank)
        strategy = replay(part, record, data.microbatches, data.forbid)
        found.append(PlacedStage(part, strategy, CostModel(view, compute_dtype(analysis))))
        first_rank += record.n_ranks
    return tuple(found)
