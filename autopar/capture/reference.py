"""Runs a captured program on one process: the reference that others are compared with.

The only change: a bias is added inside its matmul, as in the user's module and in the programs that
run (`passes/lowering/fusion.py`). In half precision a sum of its own would round once more.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import fx, nn

from autopar.capture.constants import buffer
from autopar.errors import BatchError
from autopar.operators import seed_tensor, step_seed
from autopar.program.graph import Program
from autopar.rules import FUSED

aten = torch.ops.aten


def as_graph_module(program: Program) -> fx.GraphModule:
    """The main graph as a callable of all placeholders, in the graph's order."""
    return fx.GraphModule(nn.Module(), program.graph, class_name=program.model_name)


def reference_step(
    program: Program,
    parameters: Mapping[str, torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
    buffers: MutableMapping[str, torch.Tensor] | None = None,
    seed: int = 0,
    fuses_biases: bool = True,
) -> tuple[torch.Tensor | None, Any]:
    """Returns the loss and the model's own output structure; differentiable in `parameters`.

    parameters    by `ParameterInfo.name`
    inputs        by `InputInfo.path`
    buffers       by `BufferInfo.name`; start from `whole_buffers`; those that the step changes
                  are replaced by their new values
    seed          of the step (`Stream.seed`)
    fuses_biases  False runs every operator as it is captured

    Floating tensors are cast to the program's dtypes. Raises `BatchError` for inputs that are
    missing or have the wrong shape.
    """
    buffers = {} if buffers is None else buffers
    values: dict[str, torch.Tensor] = {}
    for name, parameter in program.parameters.items():
        value = parameters[parameter.name].to(parameter.dtype)
        values[name] = value.to(program.value(program.node(name)).dtype)  # mixed precision
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
    module = as_graph_module(program)
    if fuses_biases:
        module = fx.GraphModule(module, _with_biases(program), class_name=program.model_name)
    results = fx.Interpreter(module).run(*(values[name] for name in names))
    loss, first = (results[0], 1) if program.loss is not None else (None, 0)
    end = first + len(program.outputs)
    changed = (b.name for b in program.buffers.values() if b.update is not None)
    buffers.update(zip(changed, (r.detach() for r in results[end:]), strict=True))
    return loss, program.rebuild(results[first:end])


def _with_biases(program: Program) -> fx.Graph:
    """`linear(x, w) + b` as `linear(x, w, b)`, and `mm(x, w) + b` as `addmm(b, x, w)`."""
    graph = copy.deepcopy(program.graph)
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        if len(node.args) != 2 or node.kwargs:
            continue
        for matmul, bias in (node.args, node.args[::-1]):
            if not (isinstance(matmul, fx.Node) and isinstance(bias, fx.Node)):
                continue
            is_matmul = str(matmul.target) in FUSED and len(matmul.args) == 2
            if is_matmul and len(matmul.users) == 1 and _is_bias(program, bias, matmul, node):
                x, weight = matmul.args
                if matmul.target == aten.mm.default:
                    node.target, node.args = aten.addmm.default, (bias, x, weight)
                else:
                    node.target, node.args = aten.linear.default, (x, weight, bias)
                graph.erase_node(matmul)
                break
    return graph


def _is_bias(program: Program, bias: fx.Node, matmul: fx.Node, total: fx.Node) -> bool:
    """Is it a parameter with one number per column, and the sum like the matmul?"""
    shift, before, after = (n.meta["val"] for n in (bias, matmul, total))
    is_vector = bias.name in program.parameters and shift.shape == before.shape[-1:]
    is_like = before.shape == after.shape and shift.dtype == before.dtype == after.dtype
    return is_vector and is_like


def microbatch_inputs(
    program: Program, inputs: Mapping[str, torch.Tensor], seed: int = 0
) -> Iterator[tuple[Mapping[str, torch.Tensor], int]]:
    """The inputs, by path, and the seed of every run that one step needs on one process.

    This is one run on the whole batch, or one per microbatch if gradients are accumulated.
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
    """Apply the change of `buffers` by `n_times` further microbatches.

    For programs that split exactly into microbatches. There the change does not depend on the
    rows, and it happens once per microbatch.
    """
    with torch.no_grad():
        for _ in range(n_times if program.updates else 0):
            reference_step(program, parameters, inputs, buffers)


def whole_buffers(program: Program, model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the model's buffers that steps change, by name."""
    return {
        b.name: buffer(model, b.name)().to(b.dtype, copy=True) for b in program.buffers.values()
    }


def run_prologue(program: Program, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The divisors as scalars, by placeholder of the main graph; `inputs` by placeholder name."""
    if program.prologue is None:
        return {}
    module = program.prologue.graph
    names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    scalars = module(*(inputs[name] for name in names))
    return dict(zip(program.prologue.outputs, scalars, strict=True))
