"""Evaluation: a forward program over the shards of training.

The storage of parameters is fixed; placements of operators are chosen anew. An operator runs on the
stage that trains it. An operator that only evaluation has runs on the stage of the one before it.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost.laws import CostModel
from autopar.errors import PlanError
from autopar.passes.analysis import Analysis, cut
from autopar.passes.inter import ends_by_stage
from autopar.passes.intra import Constraints, PlacementRequest, choose
from autopar.passes.lowering import PlacedStage, replay, stage_record
from autopar.placement import I, R, Spec
from autopar.plans import PlanData, StageRecord
from autopar.program.lines import Pipeline, Storage


def evaluation_parts(
    analysis: Analysis, data: PlanData, with_outputs: bool = True
) -> list[Analysis]:
    """The program of evaluation, cut into the stages of training; `with_outputs` or the loss."""
    stage_of = {key: k for k, stage in enumerate(data.stages) for key in stage.operators}
    ends = ends_by_stage(analysis.program, stage_of, len(data.stages))
    if len(ends) == 1:
        return [analysis]
    parts = cut(analysis.program, ends, with_outputs, keeps_unread=False)
    return [analysis.part(p) for p in parts]


def plan_evaluation(
    parts: Sequence[Analysis], data: PlanData, stages: Sequence[PlacedStage], pipeline: Pipeline
) -> tuple[StageRecord, ...]:
    """The fastest placements of evaluation; `stages` and `pipeline` are those of training.

    Raises `PlanError` if evaluation uses a parameter or buffer on a stage that lacks it.
    """
    return tuple(
        _stage_record(part, k, data, stages[k].cost, pipeline) for k, part in enumerate(parts)
    )


def place_evaluation(
    parts: Sequence[Analysis], records: Sequence[StageRecord], stages: Sequence[PlacedStage]
) -> tuple[PlacedStage, ...]:
    """The stages of evaluation with recorded placements, each on the ranks that train it."""
    return tuple(
        PlacedStage(part, replay(part, record, 1), trained.cost)
        for part, record, trained in zip(parts, records, stages, strict=True)
    )


def _stage_record(
    part: Analysis, k: int, data: PlanData, cost: CostModel, pipeline: Pipeline
) -> StageRecord:
    stored = {
        p.name: Storage(_kept(p.stored.spec), p.period) for p in pipeline.stages[k].parameters
    }
    storage: dict[str, Storage] = {}
    for placeholder, info in part.program.parameters.items():
        if info.name not in stored:
            raise PlanError(
                f"evaluation uses {info.name} on stage {k}, which does not have it",
                hint="plan with stages that keep a module's operators together",
            )
        storage[placeholder] = stored[info.name]
    changed = {b.name for b in pipeline.stages[k].changed}
    for buffer in part.program.buffers.values():
        if buffer.name not in changed:
            raise PlanError(
                f"evaluation uses buffer {buffer.name} on stage {k}, which does not change it",
                hint="plan with stages that keep a module's operators together",
            )
    ask = PlacementRequest(cost, 1, Constraints(storage=storage))
    chosen = choose(part, ask, data.optimizer, None)
    return stage_record(part, chosen.strategy, cost.mesh, data.stages[k].mesh_shape)


def _kept(spec: Spec) -> Spec:
    """How a plan says that a parameter is stored; of a frozen one, training has R for I."""
    return Spec.of([I if p == R else p for p in spec.placements], spec.order)
