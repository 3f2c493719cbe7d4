"""Facts as text: whole for `AUTOPAR_PRINT_AFTER`, and their sizes for `autopar passes`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

import torch

from autopar.cost.hardware import Hardware
from autopar.passes.analysis import Analysis
from autopar.passes.compilation import size_of, text_of
from autopar.passes.facts import (
    Differentiated,
    Inputs,
    KeptWhole,
    Placed,
    SearchSpace,
    Source,
    Sources,
    Unverified,
)
from autopar.passes.lowering import PlacedStage
from autopar.passes.search import PlanningResult
from autopar.plans import PlanData, Predicted
from autopar.program.graph import Program
from autopar.program.lines import Pipeline, program_text
from autopar.units import format_bytes, format_seconds


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _operators(program: Program) -> int:
    return sum(1 for _ in program.operators)


def _type(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, tuple | list):
        return ", ".join(map(_type, value))
    return type(value).__name__


@text_of.register
def _(program: Program) -> str:
    """One line per node: its name, operator, arguments, type and source line."""
    lines = [f"{name} = parameter {info.name}" for name, info in program.parameters.items()]
    lines += [f"{name} = input {info.path}" for name, info in program.inputs.items()]
    for node in program.operators:
        arguments = ", ".join(map(str, node.args))
        made, where = _type(program.value(node)), program.sources.get(node.name, "")
        lines.append(f"{node.name} = {node.target}({arguments})  # {made}  {where}")
    return "\n".join(lines)


@text_of.register
def _(analysis: Analysis) -> str:
    """One line per operator: its tensors with their factors."""
    tensors = analysis.types.tensors

    def shown(names: Iterable[str]) -> str:
        return ", ".join(f"{name}{list(tensors[name].dims)}" for name in names)

    batch = analysis.batch
    lines = [f"batch of {batch.size} rows"]
    for operator in analysis.operators:
        lines.append(f"{operator.name}: {shown(operator.inputs)} -> {shown(operator.outputs)}")
    return "\n".join(lines)


@text_of.register
def _(space: SearchSpace) -> str:
    return text_of(space.analysis)


@text_of.register
def _(result: PlanningResult) -> str:
    """One line per candidate: its name, and what is known of it."""
    lines = []
    for row in result.alternatives:
        known = {key: value for key, value in asdict(row).items() if value and key != "name"}
        words = (f"{key}={value:.6g}" if isinstance(value, float) else f"{key}={value}"
                 for key, value in known.items())  # fmt: skip
        lines.append(f"{row.name}: {' '.join(words)}")
    return "\n".join(lines)


@text_of.register
def _(data: PlanData) -> str:
    return data.to_json()


@text_of.register
def _(placed: Placed) -> str:
    """One line per parameter and operator of each stage."""
    return "\n".join(line for k, stage in enumerate(placed.stages) for line in _stage(k, stage))


def _stage(k: int, stage: PlacedStage) -> Iterable[str]:
    yield f"stage {k} on {dict(stage.cost.mesh.axes)}"
    for name, storage in stage.strategy.storage.items():
        yield f"  {name}: stored {storage.spec}, gathered once a {storage.period}"
    for name, chosen in stage.strategy.operators.items():
        inputs, outputs = (", ".join(map(str, specs)) for specs in (chosen.inputs, chosen.outputs))
        yield f"  {name}: {inputs} -> {outputs}"


@text_of.register
def _(pipeline: Pipeline) -> str:
    """The stages, as text that parses back (`on_text.py`)."""
    return "".join(map(program_text, pipeline.stages))


@text_of.register
def _(made: Differentiated) -> str:
    return "".join(map(program_text, made.stages))


@text_of.register
def _(unverified: Unverified) -> str:
    return text_of(unverified.pipeline)


@text_of.register
def _(sources: Sources) -> str:
    return "\n".join(sources.files.values())


@size_of.register
def _(source: Source) -> str:
    return type(source.model).__name__


@size_of.register
def _(program: Program) -> str:
    n_operators = _count(_operators(program), "operator")
    return f"{n_operators}, {_count(len(program.parameters), 'parameter')}"


@size_of.register
def _(inputs: Inputs) -> str:
    return _count(len(inputs.tensors), "tensor")


@size_of.register
def _(kept: KeptWhole) -> str:
    return _count(len(kept.operators), "operator")


@size_of.register
def _(space: SearchSpace) -> str:
    n_padded = len(space.paddings.shapes)
    return f"{size_of(space.analysis)}, {_count(n_padded, 'padded parameter')}"


@size_of.register
def _(analysis: Analysis) -> str:
    n_kinds = len(set(analysis.kinds.values()))
    return f"{_count(len(analysis.operators), 'operator')} of {_count(n_kinds, 'kind')}"


@size_of.register
def _(hardware: Hardware) -> str:
    return hardware.profile_name


@size_of.register
def _(result: PlanningResult) -> str:
    stats = result.stats
    return (
        f"{_count(len(result.alternatives), 'plan')} considered, "
        f"{stats.n_solved} solved, {stats.n_variables} choices in the largest problem"
    )


@size_of.register
def _(data: PlanData) -> str:
    return f"{_count(len(data.stages), 'stage')}, {format_bytes(len(data.to_json()))} of JSON"


@size_of.register
def _(placed: Placed) -> str:
    n_operators = sum(len(stage.strategy.operators) for stage in placed.stages)
    return f"{_count(len(placed.stages), 'stage')}, {_count(n_operators, 'operator')}"


@size_of.register
def _(pipeline: Pipeline) -> str:
    n_lines = sum(len(stage.body) for stage in pipeline.stages)
    return f"{_count(pipeline.n_stages, 'stage')}, {_count(n_lines, 'line')}"


@size_of.register
def _(unverified: Unverified) -> str:
    return size_of(unverified.pipeline)


@size_of.register
def _(made: Differentiated) -> str:
    n_forward = sum(len(stage.forward) for stage in made.stages)
    n_backward = sum(len(stage.backward) for stage in made.stages)
    return f"{_count(n_forward, 'line')} forward, {_count(n_backward, 'line')} backward"


@size_of.register
def _(predicted: Predicted) -> str:
    time, peak = format_seconds(predicted.step_time_s), format_bytes(predicted.peak_bytes)
    return f"a step of {time}, {peak} at its peak"


@size_of.register
def _(sources: Sources) -> str:
    n_lines = sum(text.count("\n") for text in sources.files.values())
    return f"{_count(len(sources.files), 'file')}, {_count(n_lines, 'line')}"
