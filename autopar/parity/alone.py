"""A step of the captured program on one process (`reference`), and the values it starts from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from autopar.capture import change_buffers, microbatch_inputs, reference_step
from autopar.program.graph import Program


class StepResult(NamedTuple):
    """The results of one step; gradients and buffers by name."""

    loss: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def whole_parameters(program: Program, model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters in the program's dtypes; random values for a model on meta."""
    named = dict(model.named_parameters(remove_duplicate=False))
    generator = torch.Generator().manual_seed(0)
    out = {}
    for info in program.parameters.values():
        value = named[info.name].detach()
        if value.is_meta:
            value = torch.randn(info.shape, generator=generator) * 0.02
        out[info.name] = value.to("cpu", info.dtype).clone().requires_grad_(info.requires_grad)
    return out


def reference(
    program: Program,
    parameters: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    n_microbatches: int = 1,
    seed: int = 0,
) -> StepResult:
    """A step of the captured program on one process, starting from `buffers`."""
    changed = dict(buffers)
    total = torch.zeros(())
    for rows, of_rows in microbatch_inputs(program, inputs, seed):
        loss, _ = reference_step(program, parameters, rows, changed, of_rows)
        assert loss is not None
        loss.backward()
        total = total + loss.detach()
    if program.accumulation is None:
        change_buffers(program, parameters, inputs, changed, n_microbatches - 1)
    return StepResult(total, gradients_of(parameters), changed)


def gradients_of(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients after a step; zeros for a parameter that got none."""
    return {
        name: p.grad if p.grad is not None else torch.zeros_like(p)
        for name, p in parameters.items()
    }
