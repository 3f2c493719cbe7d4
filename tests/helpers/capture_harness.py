"""A model made of one function, and capture held against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autopar.capture import capture, reference_step, whole_buffers
from autopar.program import Program, flatten_inputs

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


def loss_of(outputs: Any) -> torch.Tensor:
    if isinstance(outputs, torch.Tensor):
        return outputs
    return outputs["loss"] if isinstance(outputs, dict) else outputs.loss


def run(
    program: Program, model: nn.Module, batch: Any
) -> tuple[torch.Tensor, Any, dict[str, torch.Tensor]]:
    leaves = {
        name: p.detach().clone().requires_grad_(p.requires_grad)
        for name, p in model.named_parameters()
    }
    loss, outputs = reference_step(program, leaves, flatten_inputs(batch))
    assert loss is not None
    loss.backward()
    return loss.detach(), outputs, {n: p.grad for n, p in leaves.items() if p.grad is not None}


def eager(model: nn.Module, batch: Any) -> tuple[torch.Tensor, Any, dict[str, torch.Tensor]]:
    model.zero_grad()
    outputs = model(**batch)
    loss = loss_of(outputs)
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), outputs, gradients


def assert_same(
    got: tuple[torch.Tensor, dict[str, torch.Tensor]],
    want: tuple[torch.Tensor, dict[str, torch.Tensor]],
    tolerance: float,
) -> None:
    assert got[1].keys() == want[1].keys()
    norm = max(1.0, float(sum(g.square().sum() for g in want[1].values()) ** 0.5))
    assert abs(got[0] - want[0]) <= tolerance * max(1.0, abs(float(want[0])))
    for name, gradient in want[1].items():
        assert (got[1][name] - gradient).abs().max() <= tolerance * norm, name
