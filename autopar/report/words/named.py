"""One parameter, operator or module of a plan as text: its placements and their alternatives.

A name may stand for the same place of several layers (`matching.py`). Equal ones are explained
once, and counted; so are equal layers inside of a module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from autopar.plans import Decision, PlanData, Predicted, StageRecord
from autopar.program.lines import (
    CallLine,
    GatherLine,
    MoveLine,
    Pipeline,
    StageProgram,
    StoredParameter,
    starred,
)
from autopar.report.blocks import block_set, every_block
from autopar.report.stages import tie_text
from autopar.report.words.matching import matching_names
from autopar.report.words.next_best import next_best_lines
from autopar.units import format_seconds

# Name -> the decisions about it, stage by stage.
Decide = Callable[[str], Sequence[Decision]]
# Of names that differ, so many have their alternatives listed: that takes seconds each.
_N_DECIDED = 3


def explain_name(
    data: PlanData, pipeline: Pipeline, predicted: Predicted, name: str, decide: Decide
) -> str:
    """The text of one parameter, operator or module, or of equal ones of several layers.

    Raises `OptionError` for a name that the plan does not have, or has in several places.
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for full in matching_names(name, _names(data, pipeline)):
        texts = tuple(starred(text) for _, _, text in _found(data, pipeline, full))
        groups.setdefault(texts, []).append(full)
    parts = []
    for k, members in enumerate(groups.values()):
        decisions = decide(members[0]) if k < _N_DECIDED else ()
        parts.append(_explained(data, pipeline, predicted, members[0], decisions))
        if len(members) > 1:
            blocks = block_set(members).text(every_block(pipeline))
            parts[-1] += f"\n{len(members)} equal ones: {blocks}"
    return "\n\n".join(parts)


def _names(data: PlanData, pipeline: Pipeline) -> Iterator[str]:
    """Parameters with their aliases, and keys of operators."""
    for program in pipeline.stages:
        for parameter in program.parameters:
            yield from (parameter.name, *parameter.aliases)
    for record in data.stages:
        yield from record.operators


def _explained(
    data: PlanData,
    pipeline: Pipeline,
    predicted: Predicted,
    name: str,
    decisions: Sequence[Decision],
) -> str:
    """The text of one name; what is the same in several layers below it is there once."""
    equal: dict[tuple[int, str], list[tuple[str, str]]] = {}
    for stage, key, text in _found(data, pipeline, name):
        equal.setdefault((stage, starred(text)), []).append((key, text))
    lines = []
    for (stage, _), members in equal.items():
        key, text = members[0]
        lines.append(text)
        if len(members) > 1:
            blocks = block_set(k for k, _ in members).text(every_block(pipeline))
            lines.append(f"  {len(members)} equal ones: {blocks}")
        for decision in decisions:
            if decision.stage == stage and decision.name == key:
                found = next_best_lines(decision, predicted.step_time_s, pipeline.n_stages, text)
                lines += [f"  {line}" for line in found]
    ties = [
        tie_text(pipeline, tie)
        for tie in pipeline.ties
        if any(
            name in (p.name, *p.aliases)
            for stage, held in tie.places
            for p in [pipeline.parameter(stage, held)]
        )
    ]
    comment = [f"  {data.comments[name]}"] if name in data.comments else []
    return "\n".join([*lines, *comment, *ties])


def _found(data: PlanData, pipeline: Pipeline, name: str) -> Iterator[tuple[int, str, str]]:
    """(stage, name, text) of a parameter, or of all parameters and operators of a module."""
    for stage, (record, program) in enumerate(zip(data.stages, pipeline.stages, strict=True)):
        where = f"stage {stage}, " if pipeline.n_stages > 1 else ""
        for key, text in _found_on(record, program, name, where):
            yield stage, key, text


def _found_on(
    record: StageRecord, program: StageProgram, name: str, where: str
) -> Iterator[tuple[str, str]]:
    within = (f"{name}/", f"{name}.")
    for parameter in program.parameters:
        own = (parameter.name, *parameter.aliases)
        if name in own or any(full.startswith(within) for full in own):
            yield parameter.name, _explain_parameter(parameter, program, where)
    lines = {line.key: line for line in program.body if isinstance(line, CallLine)}
    for key, text in record.operators.items():
        if key == name or key.startswith(within):
            yield key, _explain_operator(key, text, lines.get(key), where)


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
