"""The whole compilation as one list: what happens in which order, what each step needs and makes.

    PASSES        a model, a mesh and options -> a plan -> the program of every stage
    OTHER_SHAPES  the same plan on a batch of another shape, or with the model's outputs
    EVALUATION    the same shards, forward only

`plan`, `parallelize`, `Plan.bind` and a replayed plan run `PASSES` from different points: what they
have is given (a saved plan gives `PlanData`), the rest is made when it is asked for
(`compilation.py`). `autopar passes MODEL` prints the list with what each pass took.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from autopar.codegen import emit, file_name
from autopar.cost.hardware import Hardware, resolve
from autopar.mesh import Mesh
from autopar.options import Options, schedule_name
from autopar.passes.analysis import (
    Analysis,
    Paddings,
    accept_again,
    accept_missing,
    compute_dtype,
    pad,
    padded_for,
)
from autopar.passes.binding import (
    ExampleInputs,
    capture_plan,
    capture_step,
    check_graph,
    check_rows,
    evaluation_parts,
    options_for,
    place_evaluation,
    place_stages,
    plan_evaluation,
    record_of,
    signature_of,
)
from autopar.passes.compilation import Facts, Pass
from autopar.passes.lowering import PlacedStage, join, stage_record
from autopar.passes.search import Planner, PlanningResult, StepPricer
from autopar.plans import InputSignature, PlanData, Predicted, StageRecord
from autopar.program import Pipeline, Program
from autopar.schedule import ORDERS, forward_only
from autopar.verifier import verify_pipeline

# -- facts of no other room ------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """What is compiled for: a machine, and the user's options."""

    mesh: Mesh
    options: Options


@dataclass(frozen=True)
class Source:
    """What is compiled: the user's model and one global batch."""

    model: nn.Module
    example_inputs: ExampleInputs


@dataclass(frozen=True)
class Inputs:
    """Tensor inputs by path, the other leaves of the batch, and whether they are positional."""

    tensors: tuple[InputSignature, ...]
    static: Mapping[str, Any]
    positional: bool


@dataclass(frozen=True)
class KeptWhole:
    """Operators without a rule that every rank runs whole."""

    operators: tuple[str, ...]


@dataclass(frozen=True)
class SearchSpace:
    """The program with every padding that could help, analysed; and the options that fit it."""

    analysis: Analysis
    paddings: Paddings
    options: Options


@dataclass(frozen=True)
class Placed:
    """The stages with all their placements, each on its ranks."""

    stages: tuple[PlacedStage, ...]


@dataclass(frozen=True)
class Unverified:
    """Lowered stages, joined, that nobody has checked."""

    pipeline: Pipeline


@dataclass(frozen=True)
class Sources:
    """File name -> generated source, one per stage."""

    files: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Trained:
    """The training program that evaluation shares its shards with."""

    placed: Placed
    pipeline: Pipeline


@dataclass(frozen=True)
class EvaluationStages:
    """Placements of evaluation, stage by stage, as text: rank 0's, for all ranks."""

    records: tuple[StageRecord, ...]


# -- from the model to a plan ----------------------------------------------------------------------


@dataclass(frozen=True)
class Capture(Pass):
    """Trace the model into one frozen graph of ATen operators."""

    requires = (Source, Target)
    may_read = (PlanData,)
    provides = (Program,)

    def run(self, facts: Facts) -> Iterable[object]:
        source, options, data = facts[Source], facts[Target].options, facts.get(PlanData)
        if data is not None:
            yield capture_plan(source.model, source.example_inputs, data, options.loss_fn)
        else:
            yield capture_step(source.model, source.example_inputs, options)


@dataclass(frozen=True)
class ReadInputs(Pass):
    """Note names, shapes and dtypes of the batch."""

    requires = (Source, Program)
    provides = (Inputs,)

    def run(self, facts: Facts) -> Iterable[object]:
        batch = facts[Source].example_inputs
        yield Inputs(*signature_of(facts[Program], batch), not isinstance(batch, Mapping))


@dataclass(frozen=True)
class KeepWhole(Pass):
    """Refuse operators without a rule, or keep them whole if the user accepts that."""

    requires = (Program, Target)
    may_read = (PlanData,)
    provides = (KeptWhole,)

    def run(self, facts: Facts) -> Iterable[object]:
        data = facts.get(PlanData)
        if data is not None:
            accept_again(data.kept_whole)
            yield KeptWhole(data.kept_whole)
        else:
            yield KeptWhole(accept_missing(facts[Program], facts[Target].options.fallback))


@dataclass(frozen=True)
class OpenSearch(Pass):
    """Pad what may be padded, and find factors, batch, groups and saved values."""

    requires = (Program, KeptWhole, Target)
    provides = (SearchSpace,)

    def run(self, facts: Facts) -> Iterable[object]:
        program, target = facts[Program], facts[Target]
        options = options_for(program, target.options)
        longer, paddings = padded_for(program, target.mesh.n_ranks)
        yield SearchSpace(Analysis.of(longer, options.batch_dims or None), paddings, options)


@dataclass(frozen=True)
class Search(Pass):
    """Choose cuts, submeshes, placements, microbatches and recompute: the least predicted step."""

    requires = (SearchSpace, Inputs, Target)
    provides = (PlanningResult,)

    def run(self, facts: Facts) -> Iterable[object]:
        space, mesh = facts[SearchSpace], facts[Target].mesh
        options, analysis = space.options, space.analysis
        report = options.progress if callable(options.progress) else lambda text: None
        yield Planner(analysis, mesh, options, facts[Inputs].tensors, report).run()


@dataclass(frozen=True)
class Record(Pass):
    """Write the decisions as data; drop paddings that no placement uses."""

    requires = (Program, Inputs, KeptWhole, SearchSpace, PlanningResult, Target)
    provides = (PlanData,)
    may_provide = (Analysis, Placed, Predicted)

    def run(self, facts: Facts) -> Iterable[object]:
        program, space, target = facts[Program], facts[SearchSpace], facts[Target]
        result, solved = facts[PlanningResult], facts[PlanningResult].solved
        options = space.options
        padded = space.paddings.used(item for stage in solved.stages for item in stage.specs())
        is_final = padded == space.paddings.shapes
        analysis = space.analysis
        if not is_final:
            analysis = Analysis.of(pad(program, padded), options.batch_dims or None)
        yield PlanData(
            model=program.model_name,
            graph_hash=analysis.program.hash(),
            mesh=record_of(target.mesh, result.hardware),
            microbatches=solved.candidate.n_microbatches,
            precision=options.precision,
            optimizer=options.optimizer,
            schedule=schedule_name(options),
            inputs=facts[Inputs].tensors,
            static_inputs=dict(facts[Inputs].static),
            positional=facts[Inputs].positional,
            batch_dims=dict(options.batch_dims or {}),
            forbid=tuple(sorted(result.forbid)),
            stages=tuple(_record(stage, target.mesh) for stage in solved.stages),
            objective_s=solved.objective_s,
            gap=solved.gap,
            chosen=solved.candidate.name,
            alternatives=result.alternatives,
            comments=space.paddings.refused,
            padded=padded,
            kept_whole=facts[KeptWhole].operators,
            accumulates=program.accumulation is not None,
        )
        yield analysis
        if is_final:
            yield Placed(solved.stages)
            yield solved.predicted


def _record(stage: PlacedStage, mesh: Mesh) -> StageRecord:
    view = stage.cost.mesh
    shape = mesh.submesh_shape(view.first_rank, view.n_ranks)
    return stage_record(stage.analysis, stage.strategy, view, shape)


def _hardware(mesh: Mesh, analysis: Analysis) -> Hardware:
    return resolve(mesh, compute_dtype(analysis))


# -- from a plan to programs -----------------------------------------------------------------------


@dataclass(frozen=True)
class Analyse(Pass):
    """Pad the graph as the plan says, and find factors, batch, groups and saved values."""

    requires = (Program, KeptWhole, PlanData)
    provides = (Analysis,)

    def run(self, facts: Facts) -> Iterable[object]:
        data = facts[PlanData]
        yield Analysis.of(pad(facts[Program], data.padded), data.batch_dims or None)


@dataclass(frozen=True)
class Place(Pass):
    """Lay the plan's decisions on the program, refusing what is not legal.

    same_graph     the program is the one that was planned
    n_blocks       row blocks of the training program, which the batch must divide by
    with_outputs   also for what the model returns
    """

    requires = (Analysis, PlanData, Target)
    provides = (Placed,)

    same_graph: bool = True
    n_blocks: int | None = None
    with_outputs: bool = False

    def run(self, facts: Facts) -> Iterable[object]:
        data, analysis, mesh = facts[PlanData], facts[Analysis], facts[Target].mesh
        if self.same_graph:
            check_graph(data, analysis)
        if self.n_blocks is not None:
            check_rows(data, analysis, self.n_blocks)
        hardware = _hardware(mesh, analysis)
        yield Placed(place_stages(data, analysis, mesh, hardware, self.with_outputs))


@dataclass(frozen=True)
class Lower(Pass):
    """Write the lines that every rank runs, join the stages, and order their work.

    with_outputs   the last stage returns the model's outputs
    only_forward   no backward, one microbatch
    """

    requires = (Placed, PlanData)
    provides = (Unverified,)

    with_outputs: bool = False
    only_forward: bool = False

    def run(self, facts: Facts) -> Iterable[object]:
        order = forward_only if self.only_forward else ORDERS[facts[PlanData].schedule]
        yield Unverified(join(facts[Placed].stages, order, self.with_outputs))


@dataclass(frozen=True)
class Verify(Pass):
    """Prove the invariants of every stage, and that no two ranks wait for each other for ever."""

    requires = (Unverified,)
    provides = (Pipeline,)

    def run(self, facts: Facts) -> Iterable[object]:
        pipeline = facts[Unverified].pipeline
        verify_pipeline(pipeline)
        yield pipeline


@dataclass(frozen=True)
class Price(Pass):
    """Predict time, memory and communication of a step."""

    requires = (Pipeline, Placed, Analysis, PlanData, Target)
    provides = (Predicted,)

    def run(self, facts: Facts) -> Iterable[object]:
        data, mesh, analysis = facts[PlanData], facts[Target].mesh, facts[Analysis]
        hardware = _hardware(mesh, analysis)
        pricer = StepPricer.of(analysis, mesh, hardware, data.optimizer, data.inputs)
        yield pricer(facts[Pipeline], [stage.cost for stage in facts[Placed].stages])


@dataclass(frozen=True)
class Emit(Pass):
    """Print the program of every stage as a Python file."""

    requires = (Pipeline,)
    provides = (Sources,)

    def run(self, facts: Facts) -> Iterable[object]:
        stages = facts[Pipeline].stages
        yield Sources({file_name(k): emit(stage, k, len(stages)) for k, stage in enumerate(stages)})


# -- evaluation ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlanEvaluation(Pass):
    """Choose placements of evaluation over the shards of training."""

    requires = (Analysis, PlanData, Trained)
    provides = (EvaluationStages,)

    def run(self, facts: Facts) -> Iterable[object]:
        data, trained = facts[PlanData], facts[Trained]
        parts = evaluation_parts(facts[Analysis], data)
        yield EvaluationStages(
            plan_evaluation(parts, data, trained.placed.stages, trained.pipeline)
        )


@dataclass(frozen=True)
class PlaceEvaluation(Pass):
    """Lay those placements on the program of evaluation."""

    requires = (Analysis, PlanData, EvaluationStages, Trained)
    provides = (Placed,)

    def run(self, facts: Facts) -> Iterable[object]:
        parts = evaluation_parts(facts[Analysis], facts[PlanData])
        records, trained = facts[EvaluationStages].records, facts[Trained]
        yield Placed(place_evaluation(parts, records, trained.placed.stages))


PASSES: tuple[Pass, ...] = (
    Capture(),
    ReadInputs(),
    KeepWhole(),
    OpenSearch(),
    Search(),
    Record(),
    Analyse(),
    Place(),
    Lower(),
    Verify(),
    Price(),
    Emit(),
)


def other_shapes(n_blocks: int, with_outputs: bool) -> tuple[Pass, ...]:
    """Of a plan that was made for another batch."""
    place = Place(same_graph=False, n_blocks=n_blocks, with_outputs=with_outputs)
    return KeepWhole(), Analyse(), place, Lower(with_outputs), Verify(), Emit()


EVALUATION: tuple[Pass, ...] = (
    KeepWhole(),
    Analyse(),
    PlanEvaluation(),
    PlaceEvaluation(),
    Lower(with_outputs=True, only_forward=True),
    Verify(),
    Emit(),
)
