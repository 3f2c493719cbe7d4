"""A model made of one function, and capture held against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from autopar.capture import capture, reference_step, whole_buffers
from autopar.program.graph import Program, flatten_inputs

aten = torch.ops.aten


class Module(nn.Module):
    """A model of one linear layer and whatever `body` does with it."""

    def __init__(self, body: Callable[..., Any], width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.body = body

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, *args, **kwargs)


def targets(program: Program) -> list[Any]:
    return [n.target for n in program.operators]


def dtypes_of_floats(program: Program) -> set[torch.dtype]:
    """Of all values and constants, those of the prologue included."""
    prologue = list(program.prologue.graph.graph.nodes) if program.prologue else []
    values = tree_leaves([n.meta.get("val") for n in (*program.graph.nodes, *prologue)])
    values += [compute() for compute in program.constants.values()]
    return {v.dtype for v in values if isinstance(v, Tensor) and v.is_floating_point()}


def loss_of(outputs: Any) -> Tensor:
    if isinstance(outputs, Tensor):
        return outputs
    return outputs["loss"] if isinstance(outputs, dict) else outputs.loss


def check(
    model: nn.Module,
    batch: Any,
    tolerance: float = 1e-12,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    precision: str = "model",
    eager: nn.Module | None = None,
) -> Program:
    """Capture a model, which is then float64: loss, outputs, gradients and buffers must equal
    eager's, up to rounding. If `precision` is "model", it is float64 when it is captured, too.

    eager    computes the same, with parameters of the same names, where the model itself cannot
    """
    if precision == "model":
        model.double()
    program = capture(model, batch, loss_fn=loss_fn, precision=precision)
    model.double()
    if eager is not None:
        eager.double().load_state_dict(model.state_dict())
        model = eager
    buffers = whole_buffers(program, model)
    model.zero_grad()
    outputs = model(**batch) if isinstance(batch, dict) else model(*batch)
    loss = loss_of(outputs) if loss_fn is None else loss_fn(outputs, batch)
    loss.backward()
    leaves = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    got, its_outputs = reference_step(program, leaves, flatten_inputs(batch), buffers)
    assert got is not None
    got.backward()

    def same(mine: Any, value: Any) -> None:
        torch.testing.assert_close(
            mine, value, rtol=tolerance, atol=tolerance, check_dtype=precision == "model"
        )

    same(got, loss)
    assert type(its_outputs) is type(outputs)
    for mine, value in zip(tree_leaves(its_outputs), tree_leaves(outputs), strict=True):
        if isinstance(value, Tensor):
            same(mine, value)
    for name, parameter in model.named_parameters():
        gradient = leaves[name].grad
        assert (gradient is None) == (parameter.grad is None), name
        if gradient is not None:
            same(gradient, parameter.grad)
    held = dict(model.named_buffers())
    for name, value in buffers.items():
        same(value, held[name])
    return program


def x(rows: int = 3) -> Tensor:
    return torch.randn(rows, 4, dtype=torch.float64)
