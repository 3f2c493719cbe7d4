"""One parameter, operator or module of a plan as text: its placements and their alternatives."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.errors import OptionError
from autopar.plans import Decision, PlanData, Predicted, StageRecord
from autopar.program import CallLine, GatherLine, MoveLine, Pipeline, StageProgram, StoredParameter
from autopar.report.next_best import next_best_lines
from autopar.report.stages import tie_text
from autopar.units import format_seconds


def explain_name(
    data: PlanData,
    pipeline: Pipeline,
    predicted: Predicted,
    name: str,
    decisions: Sequence[Decision] = (),
) -> str:
    """The text of one parameter, operator or module; `decisions` are those about it.

    Raises `OptionError` for a name that the plan does not have.
    """
    found = []
    for stage, program in enumerate(pipeline.stages):
        texts = _found_on(data.stages[stage], program, name, _where(pipeline, stage))
        for decision in (d for d in decisions if texts and d.stage == stage):
            lines = next_best_lines(decision, predicted.step_time_s, pipeline.n_stages, texts[-1])
            texts.append("\n".join(f"  {line}" for line in lines))
        found += texts
    if not found:
        raise OptionError(
            f"the plan has no parameter, operator or module {name!r}",
            hint="names are those of model.named_parameters() and the keys in the plan file",
        )
    ties = [
        tie_text(tie)
        for tie in pipeline.ties
        if any(
            name in (p.name, *p.aliases)
            for stage, held in tie.places
            for p in [pipeline.parameter(stage, held)]
        )
    ]
    comment = [f"  {data.comments[name]}"] if name in data.comments else []
    return "\n".join([*found, *comment, *ties])


def _where(pipeline: Pipeline, stage: int) -> str:
    return f"stage {stage}, " if pipeline.n_stages > 1 else ""


def _found_on(record: StageRecord, program: StageProgram, name: str, where: str) -> list[str]:
    """The texts of one stage for `name`: of a parameter, or of operators."""
    found = [
        _explain_parameter(parameter, program, where)
        for parameter in program.parameters
        if name in (parameter.name, *parameter.aliases)
    ]
    if found:
        return found
    lines = {line.key: line for line in program.body if isinstance(line, CallLine)}
    return [
        _explain_operator(key, text, lines.get(key), where)
        for key, text in record.operators.items()
        if key == name or key.startswith(f"{name}/")
    ]


def _explain_operator(key: str, text: str, line: CallLine | None, where: str) -> str:
    """Its placements and its time. A fused bias has no line (`passes/lowering/fusion.py`)."""
    if line is None:
        place = f"  ({where.removesuffix(', ')})" if where else ""
        return f"{key}{place}\n  {text}\n  runs inside the matmul before it"
    total_s = line.forward_s + line.backward_s
    return (
        f"{key}  ({where}{line.where})\n  {text}\n"
        f"  {format_seconds(total_s)} forward and backward per microbatch"
    )


def _explain_parameter(parameter: StoredParameter, program: StageProgram, where: str) -> str:
    stored = parameter.stored
    whole = [math.prod(factors) for factors in parameter.dims]
    padded = "" if whole == list(parameter.shape) else f", padded to {whole}"
    out = [
        f"{parameter.name} {list(parameter.shape)}{padded}: {where}stored {stored.spec} as "
        f"{list(stored.shape)} on ({', '.join(program.axis_names)})",
    ]
    for use in parameter.uses:
        out.append(f"  used {use.local.spec}" + _conversion(use.moves))
    for line in program.body:
        if isinstance(line, GatherLine) and line.parameter == parameter.name:
            out.append(f"  gathered for one operator as {line.out.spec}" + _conversion(line.moves))
    return "\n".join(out)


def _conversion(moves: Sequence[MoveLine]) -> str:
    if not moves:
        return ", as it is stored"
    words = [f"{m.move.name} (forward {m.move.forward}, backward {m.move.backward})" for m in moves]
    return " by " + ", ".join(words)
