"""`Lowered`: a function of this room as a pair of functions, which run without autograd.

    results, kept = f.forward(*args)
    gradients     = f.backward(kept, inputs, gradients, wanted)

`kept` is what backward needs besides `inputs`, the tensor arguments at the positions `keeps`. So
a parameter that a program gathers again for backward is not held in between. `wanted` says for
which tensor arguments a gradient is wanted; the others get None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Results = Tensor | tuple[Tensor, ...]
Kept = tuple[Any, ...]


@dataclass(frozen=True)
class Lowered:
    """One function with its backward.

    like   a function of the same arguments whose results have the strides of this one's, for
           planning on fake tensors; None if results are contiguous
    """

    forward: Callable[..., tuple[Results, Kept]]
    backward: Callable[..., tuple[Tensor | None, ...]]
    keeps: tuple[int, ...] = ()
    like: Callable[..., Results] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The results; under autograd they have the function's own backward."""
        tensors = [value for value in args if isinstance(value, Tensor)]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return _Function.apply(self, args, kwargs, *tensors)
        return self.forward(*args, **kwargs)[0]


class _Function(torch.autograd.Function):
    """A lowered function under autograd."""

    @staticmethod
    def forward(
        ctx: Any, lowered: Lowered, args: tuple[Any, ...], kwargs: Any, *tensors: Tensor
    ) -> Results:  # fmt: skip
        results, ctx.kept = lowered.forward(*args, **kwargs)
        ctx.lowered, ctx.inputs = lowered, tuple(args[i] for i in lowered.keeps)
        if not isinstance(results, Tensor):
            ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[3:]
        return None, None, None, *ctx.lowered.backward(ctx.kept, ctx.inputs, gradients, wanted)
