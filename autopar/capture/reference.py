"""Run a captured program as it stands, on one process: the reference for verification."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import fx, nn

from autopar.capture.constants import buffer
from autopar.errors import BatchError
from autopar.operators import seed_tensor, step_seed
from autopar.program import Program


def as_graph_module(program: Program) -> fx.GraphModule:
    """The main graph as a callable on all placeholders, in the graph's order."""
    return fx.GraphModule(nn.Module(), program.graph, class_name=program.model_name)


def reference_step(
    program: Program,
    parameters: Mapping[str, torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
    buffers: MutableMapping[str, torch.Tensor] | None = None,
    seed: int = 0,
) -> tuple[torch.Tensor | None, Any]:
    """(loss, the model's own output structure); differentiable in `parameters`.

    `parameters` is keyed by `ParameterInfo.name`, `inputs` by `InputInfo.path`, `buffers` by
    `BufferInfo.name`; floating tensors are cast to the program's dtypes. Those of `buffers` that
    the step changes are replaced by what they hold afterwards (start from `whole_buffers`).
    `seed` is the step's (`Stream.seed`). Raises `BatchError` for missing or misshapen inputs.
    """
    buffers = {} if buffers is None else buffers
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
    for name, held in program.buffers.items():
        if held.name not in buffers:
            raise BatchError(f"buffer `{held.name}` is missing; given: {sorted(buffers)}")
        values[name] = buffers[held.name].to(held.dtype)
    values |= {name: compute() for name, compute in program.constants.items()}
    values |= run_prologue(program, values)
    if program.seed is not None:
        values[program.seed] = seed_tensor(seed)
    names = [node.name for node in program.graph.nodes if node.op == "placeholder"]
    results = fx.Interpreter(as_graph_module(program)).run(*(values[name] for name in names))
    loss, first = (results[0], 1) if program.loss is not None else (None, 0)
    end = first + len(program.outputs)
    changed = (b.name for b in program.buffers.values() if b.update is not None)
    buffers.update(zip(changed, (r.detach() for r in results[end:]), strict=True))
    return loss, program.rebuild(results[first:end])


def microbatch_inputs(
    program: Program, inputs: Mapping[str, torch.Tensor], seed: int = 0
) -> Iterator[tuple[Mapping[str, torch.Tensor], int]]:
    """The inputs, by path, and the seed of every run that makes a step on one process.

    That is one on the whole batch, or one for each part of it where they are accumulated.
    """
    if program.accumulation is None:
        yield inputs, seed
        return
    for i in range(program.accumulation.n):
        yield program.accumulation.rows(inputs, i), step_seed(seed, i)


def change_buffers(
    program: Program,
    parameters: Mapping[str, torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
    buffers: MutableMapping[str, torch.Tensor],
    n_times: int,
) -> None:
    """What further microbatches leave in `buffers`, where more than one is exact: the change
    then depends on no row, and happens once per microbatch.
    """
    with torch.no_grad():
        for _ in range(n_times if program.updates else 0):
            reference_step(program, parameters, inputs, buffers)


def whole_buffers(program: Program, model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of what the model's own buffers hold, for those that steps change, by name."""
    return {
        b.name: buffer(model, b.name)().to(b.dtype, copy=True) for b in program.buffers.values()
    }


def run_prologue(program: Program, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Main-graph placeholder -> scalar; `inputs` by placeholder name."""
    if program.prologue is None:
        return {}
    module = program.prologue.graph
    names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    scalars = module(*(inputs[name] for name in names))
    return dict(zip(program.prologue.outputs, scalars, strict=True))
