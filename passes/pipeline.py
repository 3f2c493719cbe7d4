"""The whole compilation as one list of passes, with the facts that each reads and makes.

    capture        Source, Target                        -> Program
    read-inputs    Source, Program                       -> Inputs
    keep-whole     Program, Target                       -> KeptWhole
    open-search    Program, KeptWhole, Target            -> SearchSpace
    search         SearchSpace, Inputs, Target           -> PlanningResult
    record         SearchSpace, PlanningResult, ...      -> PlanData
    analyse        Program, KeptWhole, PlanData          -> Analysis
    resolve-mesh   Analysis, Target                      -> Hardware
    place          Analysis, PlanData, Target, ...       -> Placed
    lower          Placed, PlanData                      -> Unverified
    verify         Unverified                            -> Pipeline
    price          Pipeline, Placed, ...                 -> Predicted
    differentiate  Pipeline, Target                      -> Differentiated
    emit           Differentiated, Target                -> Sources

`plan`, `parallelize` and `Plan.bind` run this list (`PASSES`); a pass runs when its fact is first
read (`compilation.py`). A saved plan gives `PlanData`, so nothing is searched. `record` may hand on
the analysis, hardware, placements and prediction of the search. So `analyse`, `resolve-mesh`,
`place` and `price` run only for a plan from another process, or if unused paddings were dropped.

`other_shapes` is the list for the same plan on another batch. `evaluation` is the list for a
forward program over the same shards. `autopar passes MODEL --mesh 1x4` prints the time and the
facts of each pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import autopar.passes.fact_text  # noqa: F401  (registers how facts are printed)
from autopar.codegen import emit, file_name
from autopar.cost.hardware import Hardware, resolve
from autopar.cost.price import StepPricer
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.passes.analysis import (
    Analysis,
    accept_missing,
    check_lengths,
    compute_dtype,
    keep_whole_as_planned,
    pad,
    pad_for_ranks,
)
from autopar.passes.backward import proved
from autopar.passes.binding import (
    capture_plan,
    capture_step,
    check_graph,
    check_rows,
    evaluation_parts,
    options_for,
    place_evaluation,
    place_stages,
    plan_evaluation,
    planned_row_dims,
    record_of,
    signature_of,
)
from autopar.passes.compilation import Compilation, Pass
from autopar.passes.facts import (
    Differentiated,
    EvaluationStages,
    Inputs,
    KeptWhole,
    Placed,
    SearchSpace,
    Source,
    Sources,
    Target,
    Trained,
    Unverified,
)
from autopar.passes.inter import Candidate, plain_order
from autopar.passes.lowering import PlacedStage, join, lower_few, stage_record
from autopar.passes.search import Planner, PlanningResult
from autopar.plans import MANUAL, PlanData, Predicted, StageRecord
from autopar.program.graph import Program
from autopar.program.lines import Pipeline, StageProgram
from autopar.verifier import verify_pipeline


@dataclass(frozen=True)
class Capture(Pass):
    """Trace the model into one frozen graph of ATen operators."""

    requires = (Source, Target)
    may_read = (PlanData,)
    provides = (Program,)

    def run(self, facts: Compilation) -> Iterable[object]:
        source, options = facts[Source], facts[Target].options
        if PlanData in facts:
            data = facts[PlanData]
            yield capture_plan(source.model, source.example_inputs, data, options.loss_fn)
        else:
            yield capture_step(source.model, source.example_inputs, options)


@dataclass(frozen=True)
class ReadInputs(Pass):
    """Record paths, shapes and dtypes of the batch."""

    requires = (Source, Program)
    provides = (Inputs,)

    def run(self, facts: Compilation) -> Iterable[object]:
        batch = facts[Source].example_inputs
        yield Inputs(*signature_of(facts[Program], batch), not isinstance(batch, Mapping))


@dataclass(frozen=True)
class KeepWhole(Pass):
    """Refuse operators without a rule, or keep them whole if the user allows it."""

    requires = (Program, Target)
    may_read = (PlanData,)
    provides = (KeptWhole,)

    def run(self, facts: Compilation) -> Iterable[object]:
        if PlanData in facts:
            kept_whole = facts[PlanData].kept_whole
            keep_whole_as_planned(kept_whole)
        else:
            kept_whole = accept_missing(facts[Program], facts[Target].options.fallback)
        yield KeptWhole(kept_whole)


@dataclass(frozen=True)
class OpenSearch(Pass):
    """Pad all that padding may help; find factors, batch, groups and saved values."""

    requires = (Program, KeptWhole, Target)
    provides = (SearchSpace,)

    def run(self, facts: Compilation) -> Iterable[object]:
        program, target = facts[Program], facts[Target]
        options = options_for(program, target.options)
        longer, paddings = pad_for_ranks(program, target.mesh.n_ranks)
        analysis = Analysis.of(longer, options.batch_dims or None)
        check_lengths(analysis.operators, options.lengths)
        analysis = analysis.set_schedule(plain_order(options))
        yield SearchSpace(analysis, paddings, options, _hardware(target, analysis))


@dataclass(frozen=True)
class Search(Pass):
    """Choose cuts, submeshes, placements, microbatches and recompute for the fastest step."""

    requires = (SearchSpace, Inputs, Target)
    provides = (PlanningResult,)

    def run(self, facts: Compilation) -> Iterable[object]:
        space, options = facts[SearchSpace], facts[SearchSpace].options
        report = options.progress if callable(options.progress) else lambda text: None
        spent_s = sum(ran.seconds for ran in facts.ran)
        on = space.analysis, facts[Target].mesh, space.hardware, options
        yield Planner(*on, facts[Inputs].tensors, report, spent_s).run()


@dataclass(frozen=True)
class Record(Pass):
    """Write the decisions as data, without paddings that no placement uses."""

    requires = (Program, Inputs, KeptWhole, SearchSpace, PlanningResult, Target)
    provides = (PlanData,)
    may_provide = (Analysis, Hardware, Placed, Predicted)

    def run(self, facts: Compilation) -> Iterable[object]:
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
            mesh=record_of(target.mesh, space.hardware),
            microbatches=solved.candidate.n_microbatches,
            precision=options.precision,
            optimizer=options.optimizer,
            schedule=solved.candidate.schedule,
            inputs=facts[Inputs].tensors,
            static_inputs=dict(facts[Inputs].static),
            positional=facts[Inputs].positional,
            batch_dims=dict(options.batch_dims or {}),
            forbid=tuple(sorted(result.forbid)),
            stages=tuple(_record(stage, target.mesh) for stage in solved.stages),
            objective_s=solved.objective_s,
            stage_gap=solved.gap,
            chosen=solved.candidate.name,
            alternatives=result.alternatives,
            comments=space.paddings.refused,
            padded=padded,
            kept_whole=facts[KeptWhole].operators,
            accumulates=program.accumulation is not None,
            recipe=_recipe(solved.candidate, options),
            bound_s=result.bound_s,
            ruled_out=result.ruled_out,
            limit_bytes=space.hardware.limit_bytes(options.memory_limit, options.memory_margin),
            reduce_dtype=str(options.reduce_dtype).removeprefix("torch.")
            if options.reduce_dtype
            else None,
            master_weights=options.master_weights,
            imbalance=options.imbalance,
            lengths=options.lengths,
            software=options.software,
        )
        yield analysis
        yield space.hardware
        if is_final:
            yield Placed(solved.stages)
            yield solved.predicted


def _recipe(candidate: Candidate, options: Options) -> str:
    """The recipe that placed a candidate; empty for the search."""
    if options.manual is not None:
        return MANUAL
    return candidate.name if candidate.is_recipe else ""


def _record(stage: PlacedStage, mesh: Mesh) -> StageRecord:
    view = stage.cost.mesh
    shape = mesh.submesh_shape(view.first_rank, view.n_ranks)
    return stage_record(stage.analysis, stage.strategy, view, shape)


def _hardware(target: Target, analysis: Analysis) -> Hardware:
    found = resolve(target.mesh, compute_dtype(analysis), target.options.software)
    found = replace(found, imbalance=target.options.imbalance, lengths=target.options.lengths)
    return replace(found, kernels="compiled") if target.options.compiles else found


@dataclass(frozen=True)
class Analyse(Pass):
    """Pad the graph as the plan says, and find factors, batch, groups and saved values."""

    requires = (Program, KeptWhole, PlanData)
    provides = (Analysis,)

    def run(self, facts: Compilation) -> Iterable[object]:
        data = facts[PlanData]
        yield Analysis.of(pad(facts[Program], data.padded), planned_row_dims(data) or None)


@dataclass(frozen=True)
class ResolveMesh(Pass):
    """Find the rates and links of the mesh, for the dtype that the model computes in."""

    requires = (Analysis, Target)
    provides = (Hardware,)

    def run(self, facts: Compilation) -> Iterable[object]:
        yield _hardware(facts[Target], facts[Analysis])


@dataclass(frozen=True)
class Place(Pass):
    """Place the plan on the program; refuse what is not legal.

    same_graph     the program must be the planned one
    n_blocks       row blocks of the training program, which must divide the batch
    with_outputs   keep what the model returns
    """

    requires = (Analysis, PlanData, Target, Hardware)
    provides = (Placed,)

    same_graph: bool = True
    n_blocks: int | None = None
    with_outputs: bool = False

    def run(self, facts: Compilation) -> Iterable[object]:
        data, analysis, mesh = facts[PlanData], facts[Analysis], facts[Target].mesh
        if self.same_graph:
            check_graph(data, analysis)
        if self.n_blocks is not None:
            check_rows(data, analysis, self.n_blocks)
        yield Placed(place_stages(data, analysis, mesh, facts[Hardware], self.with_outputs))


@dataclass(frozen=True)
class Lower(Pass):
    """Write the lines that ranks run, join the stages, and schedule them.

    with_outputs   the last stage returns the model's outputs
    only_forward   no backward, one microbatch
    """

    requires = (Placed, PlanData)
    provides = (Unverified,)

    with_outputs: bool = False
    only_forward: bool = False

    def run(self, facts: Compilation) -> Iterable[object]:
        schedule = None if self.only_forward else facts[PlanData].schedule
        yield Unverified(join(facts[Placed].stages, schedule, self.with_outputs))


@dataclass(frozen=True)
class Verify(Pass):
    """Verify the invariants of every stage, and that ranks cannot deadlock."""

    requires = (Unverified,)
    provides = (Pipeline,)

    def run(self, facts: Compilation) -> Iterable[object]:
        pipeline = facts[Unverified].pipeline
        verify_pipeline(pipeline)
        yield pipeline


@dataclass(frozen=True)
class Price(Pass):
    """Predict the time, memory and communication of a step."""

    requires = (Pipeline, Placed, Analysis, PlanData, Target, Hardware)
    provides = (Predicted,)

    def run(self, facts: Compilation) -> Iterable[object]:
        data, n_samples = facts[PlanData], facts[Analysis].batch.n_samples
        on = facts[Target].mesh, facts[Hardware]
        pricer = StepPricer.of(*on, data.optimizer, n_samples, data.inputs)
        yield pricer(facts[Pipeline], [stage.cost for stage in facts[Placed].stages])


@dataclass(frozen=True)
class Differentiate(Pass):
    """Write out the backward of every stage, and verify it.

    Lines of backward are kernels, reshards, and what runs or is gathered again. A deep stage has
    those of few of its repeated blocks.
    """

    requires = (Pipeline, Target)
    may_read = (Placed,)
    provides = (Differentiated,)

    def run(self, facts: Compilation) -> Iterable[object]:
        pipeline, few = facts[Pipeline], list[StageProgram | None]()
        if Placed in facts:
            for stage, whole in zip(facts[Placed].stages, pipeline.stages, strict=True):
                few.append(lower_few(stage, bool(whole.outputs)))
        yield Differentiated(proved(pipeline, facts[Target].device, few))


@dataclass(frozen=True)
class Emit(Pass):
    """Print the program of every stage as a Python file, in regions if they are compiled."""

    requires = (Differentiated, Target)
    provides = (Sources,)

    def run(self, facts: Compilation) -> Iterable[object]:
        stages = facts[Differentiated].stages
        has_graphs = facts[Target].options.compile == "regions+graphs"
        texts = [emit(stage, k, len(stages), has_graphs) for k, stage in enumerate(stages)]
        yield Sources({file_name(k): text for k, text in enumerate(texts)})


@dataclass(frozen=True)
class PlanEvaluation(Pass):
    """Choose placements for evaluation over the shards of training.

    with_outputs   keep what the model returns, beside the loss
    """

    requires = (Analysis, PlanData, Trained)
    provides = (EvaluationStages,)

    with_outputs: bool = True

    def run(self, facts: Compilation) -> Iterable[object]:
        data, trained = facts[PlanData], facts[Trained]
        parts = evaluation_parts(facts[Analysis], data, self.with_outputs)
        yield EvaluationStages(
            plan_evaluation(parts, data, trained.placed.stages, trained.pipeline)
        )


@dataclass(frozen=True)
class PlaceEvaluation(Pass):
    """Place the program of evaluation as chosen."""

    requires = (Analysis, PlanData, EvaluationStages, Trained)
    provides = (Placed,)

    with_outputs: bool = True

    def run(self, facts: Compilation) -> Iterable[object]:
        parts = evaluation_parts(facts[Analysis], facts[PlanData], self.with_outputs)
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
    ResolveMesh(),
    Place(),
    Lower(),
    Verify(),
    Price(),
    Differentiate(),
    Emit(),
)


def other_shapes(n_blocks: int, with_outputs: bool) -> tuple[Pass, ...]:
    """The passes for a plan that was made for another batch."""
    place = Place(same_graph=False, n_blocks=n_blocks, with_outputs=with_outputs)
    found = KeepWhole(), Analyse(), ResolveMesh(), place
    return *found, Lower(with_outputs), Verify(), Differentiate(), Emit()


def evaluation(with_outputs: bool) -> tuple[Pass, ...]:
    """The passes for a forward program: of the loss alone, or with the model's outputs."""
    return (
        KeepWhole(),
        Analyse(),
        PlanEvaluation(with_outputs),
        PlaceEvaluation(with_outputs),
        Lower(with_outputs, only_forward=True),
        Verify(),
        Differentiate(),
        Emit(),
    )
