"""Run a captured program as it stands, on one process: the reference for verification."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from autopar.errors import BatchError
from autopar.program import Program


def as_graph_module(program: Program) -> fx.GraphModule:
    """The main graph as a callable on all placeholders, in the graph's order."""
    return fx.GraphModule(nn.Module(), program.graph, class_name=program.model_name)


def reference_step(
    program: Program, parameters: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor | None, Any]:
    """(loss, the model's own output structure); differentiable in `parameters`.

    `parameters` is keyed by `ParameterInfo.name`, `inputs` by `InputInfo.path`; floating
    tensors are cast to the program's dtypes. Raises `BatchError` for missing or misshapen
    inputs.
    """
    values: dict[str, torch.Tensor] = {}
    for name, parameter in program.parameters.items():
        values[name] = parameters[parameter.name].to(parameter.dtype)
    for name, info in program.inputs.items():
        if info.path not in inputs:
            raise BatchError(f"input `{info.path}` is missing; given: {sorted(inputs)}")
        value = inputs[info.path]
        if tuple(value.shape) != info.shape:
            raise BatchError(
                f"input `{info.path}` has shape {tuple(value.shape)}, captured with {info.shape}"
            )
        values[name] = value.to(info.dtype)
    values |= {name: compute() for name, compute in program.constants.items()}
    values |= run_prologue(program, values)
    names = [node.name for node in program.graph.nodes if node.op == "placeholder"]
    results = fx.Interpreter(as_graph_module(program)).run(*(values[name] for name in names))
    loss = results[0] if program.loss is not None else None
    return loss, program.rebuild(results[len(results) - len(program.outputs) :])


def run_prologue(program: Program, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Main-graph placeholder -> scalar; `inputs` by placeholder name."""
    if program.prologue is None:
        return {}
    module = program.prologue.graph
    names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    scalars = module(*(inputs[name] for name in names))
    return dict(zip(program.prologue.outputs, scalars, strict=True))
