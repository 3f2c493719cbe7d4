"""Compiled programs of one rank: of the plan's graph, of other shapes, and of evaluation.

Every input shape, and evaluation, is a graph of its own. The plan is laid on it stage by
stage; each rank compiles the generated file of its own stage, and all hold the same pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.codegen import emit, file_name
from autopar.cost.laws import CostModel
from autopar.errors import BatchError, PlanError
from autopar.mesh import LogicalMesh, Mesh
from autopar.module.job import from_rank_0
from autopar.passes.analysis import Analysis, cut
from autopar.passes.inter import ends_by_stage
from autopar.passes.intra import Constraints, PlacementRequest, choose
from autopar.passes.lowering import PlacedStage, join, replay, stage_record
from autopar.planning import Bound, lay_stages
from autopar.plans import PlanData, StageRecord
from autopar.program import Pipeline, Program, Storage
from autopar.runtime.collectives import DistMessenger, Messenger
from autopar.runtime.execute import Environment, Executor, load_code
from autopar.runtime.groups import Group, make_groups, world_group
from autopar.schedule import ORDERS, forward_only
from autopar.verifier import verify_pipeline


@dataclass(frozen=True)
class Links:
    """How this rank talks to others: its stage's groups, and what joins the stages."""

    rank: int
    device: torch.device
    groups: Mapping[tuple[int, ...], Group]
    messenger: Messenger | None
    world: Group | None

    @staticmethod
    def join(meshes: Sequence[LogicalMesh], rank: int, device: torch.device) -> Links:
        """Every rank calls it with the same meshes: process groups are made by all together."""
        several = len(meshes) > 1
        groups: Mapping[tuple[int, ...], Group] = {}
        for mesh in meshes:
            made = make_groups(mesh) if dist.is_initialized() else {}
            if rank in mesh.ranks:
                groups = made
        return Links(
            rank, device, groups,
            DistMessenger(device) if several else None, world_group() if several else None,
        )  # fmt: skip

    def environment(self) -> Environment:
        return Environment(self.device, self.groups, self.messenger, self.world)


@dataclass(frozen=True)
class Built:
    """One captured and compiled program: of one mode, one input signature."""

    program: Program
    pipeline: Pipeline
    executor: Executor
    code_path: Path

    @staticmethod
    def of(
        program: Program, pipeline: Pipeline, links: Links, buffers: Mapping[str, Tensor]
    ) -> Built:
        """Compile this rank's stage; the pipeline is verified by whoever made it.

        `buffers` are what the module holds, written by programs that change them.
        """
        k = pipeline.stage_of(links.rank)
        stage = pipeline.stages[k]
        code, path = load_code(file_name(k), emit(stage, k, pipeline.n_stages))
        taken = {item.source for item in stage.delivered}
        constants = {name: make() for name, make in program.constants.items() if name in taken}
        executor = Executor(pipeline, links.rank, code, links.environment(), constants, buffers)
        return Built(program, pipeline, executor, path)


def training_pipeline(
    program: Program, data: PlanData, bound: Bound, mesh: Mesh, with_outputs: bool
) -> Pipeline:
    """The plan laid on a training graph of other shapes, or with its outputs.

    Raises `BatchError` where the rows do not divide as the plan needs.
    """
    analysis = Analysis.of(program, data.batch_dims or None)
    n_blocks = bound.pipeline.n_blocks
    n_splits = analysis.batch.n_splits(data.microbatches)
    n = n_splits * n_blocks
    if analysis.batch.size % n:
        raise BatchError(
            f"a batch of {analysis.batch.size} rows does not divide by {n}: "
            f"{n_splits} microbatches x {n_blocks} ranks that split the batch",
            hint="set drop_last=True in the loader, or use a batch size that divides",
        )
    stages = lay_stages(data, analysis, mesh, bound.hardware, with_outputs)
    pipeline = join(stages, ORDERS[data.schedule], with_outputs)
    verify_pipeline(pipeline)
    return pipeline


def evaluation_pipeline(program: Program, data: PlanData, bound: Bound) -> Pipeline:
    """A forward pipeline over the same shards: storage is fixed, the rest is planned anew.

    Operators run on the stage they train on; what evaluation adds, with the operator before.
    """
    analysis = Analysis.of(program, data.batch_dims or None)
    stage_of = {key: k for k, stage in enumerate(data.stages) for key in stage.operators}
    ends = ends_by_stage(program, stage_of, len(data.stages))
    parts = [analysis]
    if len(ends) > 1:
        parts = [analysis.part(p) for p in cut(program, ends, with_outputs=True)]

    def on_rank_0() -> list[dict[str, object]]:
        return [
            asdict(_evaluated(part, k, data, bound)) for k, part in enumerate(parts)
        ]  # plain data crosses between processes

    found = [StageRecord(**record) for record in from_rank_0(on_rank_0)]  # type: ignore[arg-type]
    stages = [
        PlacedStage(part, replay(part, record, 1), trained.cost)
        for part, record, trained in zip(parts, found, bound.stages, strict=True)
    ]
    pipeline = join(stages, forward_only, with_outputs=True)
    verify_pipeline(pipeline)
    return pipeline


def _evaluated(part: Analysis, k: int, data: PlanData, bound: Bound) -> StageRecord:
    cost: CostModel = bound.stages[k].cost
    stored = {p.name: Storage(p.stored.spec, p.period) for p in bound.pipeline.stages[k].parameters}
    storage: dict[str, Storage] = {}
    for placeholder, info in part.program.parameters.items():
        if info.name not in stored:
            raise PlanError(
                f"evaluation uses {info.name} on stage {k}, which does not have it",
                hint="plan with stages that keep a module's operators together",
            )
        storage[placeholder] = stored[info.name]
    changed = {b.name for b in bound.pipeline.stages[k].changed}
    for buffer in part.program.buffers.values():
        if buffer.name not in changed:
            raise PlanError(
                f"evaluation uses buffer {buffer.name} on stage {k}, which does not change it",
                hint="plan with stages that keep a module's operators together",
            )
    ask = PlacementRequest(cost, 1, Constraints(storage=storage))
    chosen = choose(part, ask, data.optimizer, None)
    return stage_record(part, chosen.strategy, cost.mesh, data.stages[k].mesh_shape)
