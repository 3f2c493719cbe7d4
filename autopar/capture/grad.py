"""Which values carry gradient.

Parameters that require grad carry gradient. So does a floating result of an operator with such an
input, unless the operator's derivative is zero everywhere by definition.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

aten = torch.ops.aten

# Autograd cuts the results of these off from their inputs. But for `detach`, they read only the
# shape and dtype of their input.
CUTS_GRADIENT = frozenset(
    {
        aten.detach,
        aten.zeros_like,
        aten.ones_like,
        aten.full_like,
        aten.empty_like,
        aten.rand_like,
        aten.randn_like,
        aten.new_zeros,
        aten.new_ones,
        aten.new_full,
        aten.new_empty,
    }
)
# Operators of which only the results at these positions are differentiable.
DIFFERENTIABLE_RESULTS = {
    aten._native_batch_norm_legit_functional: frozenset({0}),
}


def is_differentiable(value: torch.Tensor) -> bool:
    """Can a tensor of this dtype carry gradient?"""
    return value.is_floating_point() or value.is_complex()


def carries_gradient(node: fx.Node, value: Any, has_grad: Container[fx.Node]) -> bool:
    """Does any result of `node` carry gradient, given the nodes that do (`has_grad`)?"""
    if getattr(node.target, "overloadpacket", None) in CUTS_GRADIENT:
        return False
    if not any(source in has_grad for source in node.all_input_nodes):
        return False
    return any(
        isinstance(v, torch.Tensor) and is_differentiable(v) for v in pytree.tree_leaves(value)
    )


def result_carries_gradient(node: fx.Node, index: int) -> bool:
    """Does result `index` of `node` carry gradient, given that `node` does and it is floating?"""
    assert isinstance(node.target, torch._ops.OpOverload)
    return index in DIFFERENTIABLE_RESULTS.get(node.target.overloadpacket, (index,))
