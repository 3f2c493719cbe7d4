"""A model made of one function, and capture held against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autopar.capture import capture, reference_step, whole_buffers
from autopar.program.program import Program, flatten_inputs

aten = torch.ops.aten


class Module(nn.Module):
    """A model of one linear layer and whatever `body` does with it."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.body = body

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, *args, **kwargs)


def targets(program: Program) -> list[Any]:
    return [n.target for n in program.operators]


def check(
    model: nn.Module,
    batch: Any,
    tolerance: float = 1e-12,
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
) -> Program:
    """Capture a float64 model; loss, gradients and buffers must equal eager's, up to rounding."""
    model.double()
    program = capture(model, batch, loss_fn=loss_fn)
    buffers = whole_buffers(program, model)
    model.zero_grad()
    outputs = model(**batch) if isinstance(batch, dict) else model(*batch)
    loss = outputs if loss_fn is None else loss_fn(outputs, batch)
    loss.backward()
    leaves = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    got, _ = reference_step(program, leaves, flatten_inputs(batch), buffers)
    assert got is not None
    got.backward()
    torch.testing.assert_close(got, loss, rtol=tolerance, atol=tolerance)
    for name, parameter in model.named_parameters():
        mine = leaves[name].grad
        assert (mine is None) == (parameter.grad is None), name
        if mine is not None:
            torch.testing.assert_close(mine, parameter.grad, rtol=tolerance, atol=tolerance)
    held = dict(model.named_buffers())
    for name, value in buffers.items():
        torch.testing.assert_close(value, held[name], rtol=tolerance, atol=tolerance)
    return program


def x(rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, 4, dtype=torch.float64)


# Inputs, outputs, and the user's model.
