"""Moves under autograd: backward is the transposed move, as generated programs run it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.placement import Move
from autopar.runtime.collectives import moves
from autopar.runtime.groups import Group, phase


def moved(name: str, x: Tensor, g: Group, *args: Any) -> Tensor:
    """The move `name` of `x`, which may take a gradient."""
    out: Tensor = _Moved.apply(x, g, name, args)
    return out


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, g: Group, name: str, args: tuple[Any, ...]) -> Tensor:
        ctx.g, ctx.name, ctx.args = g, name, args
        out: Tensor = _run(name, x, g, args)
        return out.view_as(out) if out is x else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        # (source, target) are swapped; (dim, outer) are not.
        args = ctx.args[::-1] if ctx.name == "s_to_s" else ctx.args
        with phase("backward", ctx.g.context):
            transposed = Move(ctx.name, ()).transposed.name
            return _run(transposed, gradient, ctx.g, args), None, None, None


def _run(name: str, x: Tensor, g: Group, args: tuple[Any, ...]) -> Tensor:
    if name == "s_to_s":
        return moves.s_to_s(x, g, source=args[0], target=args[1])
    out: Tensor = getattr(moves, name)(x, g, *args)
    return out
