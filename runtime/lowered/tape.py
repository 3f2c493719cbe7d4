"""Operators that run under autograd inside a program without it: their graph is what they keep.

For functions whose backward is not known before they run: `torch.autograd.Function`s of the user,
and operators that look at values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.runtime.lowered.lowered import Kept, Lowered, Results


def taped(operator: Callable[..., Any], differentiable: Sequence[bool] | None = None) -> Lowered:
    """`operator` with the backward that autograd finds for it.

    `differentiable` says which tensor arguments may have a gradient; by default all that can.
    """

    def forward(*args: Any, **kwargs: Any) -> tuple[Results, Kept]:
        leaves: list[Tensor] = []

        def leaf(value: Tensor) -> Tensor:
            if differentiable is None:
                has_grad = value.is_floating_point() or value.is_complex()
            else:
                has_grad = differentiable[len(leaves)]
            leaves.append(value.detach().requires_grad_(has_grad))
            return leaves[-1]

        with torch.enable_grad():
            own_args, own_kwargs = pytree.tree_map_only(Tensor, leaf, (args, kwargs))
            results = operator(*own_args, **own_kwargs)
        many = results if isinstance(results, (tuple, list)) else (results,)
        detached = tuple(r.detach() for r in many)
        plain = detached if isinstance(results, (tuple, list)) else detached[0]
        return plain, (leaves, many)

    def backward(
        kept: Kept, inputs: Sequence[Tensor], gradients: Sequence[Tensor | None],
        wanted: Sequence[bool],
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        leaves, results = kept
        pairs = [
            (r, g)
            for r, g in zip(results, gradients, strict=True)
            if g is not None and r.requires_grad
        ]
        asked = [x for x, is_wanted in zip(leaves, wanted, strict=True) if is_wanted]
        made: Sequence[Tensor] = [torch.zeros_like(x) for x in asked]
        if pairs and asked:
            made = torch.autograd.grad(
                [r for r, _ in pairs], asked, [g for _, g in pairs],
                allow_unused=True, materialize_grads=True,
            )  # fmt: skip
        found = iter(made)
        # Copies: what a user's backward returns may be its argument (a straight-through estimator),
        # a tensor that it saved, or one tensor twice, and gradients are added up in place.
        copy = torch.contiguous_format
        return tuple(next(found).clone(memory_format=copy) if w else None for w in wanted)

    return Lowered(forward, backward)
