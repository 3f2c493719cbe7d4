"""Bags of a table whose rows are sharded contiguously on a group .

Ids of other ranks count with factor 0, so the sum over ranks is the bags' result: a Partial,
without communication. The gradient of the result is Replicate, so that of the table needs no
other rank. That of factors needs the table, which `vocab_parallel_weighted_bags` keeps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.runtime.groups import Group
from autopar.runtime.lowered.lowered import Kept, Lowered
from autopar.runtime.lowered.vocabulary import local_padding, localised


def _bags(
    weight_local: Tensor, ids: Tensor, g: Group, starts: Tensor | None = None,
    ends: Tensor | None = None, factors: Tensor | None = None, padding_idx: int = -1,
) -> tuple[Tensor, Kept]:  # fmt: skip
    """v h, b l -> b h, as `operators/bags.py` says; `ids` and `padding_idx` count all rows."""
    n_local = weight_local.shape[0]
    local, others = localised(ids, n_local, n_local * g.size, g)
    padding = local_padding(padding_idx, n_local, g)
    if factors is None:
        masked = (~others).to(weight_local.dtype)
    else:
        masked = factors.masked_fill(others, 0)
    bags = (local, starts, ends)
    out = torch.ops.autopar.embedding_bag(weight_local, *bags, masked, padding)
    return out, (*bags, masked, others, n_local, padding)


def _backward(
    kept: Kept, inputs: Sequence[Tensor], gradients: Sequence[Tensor], wanted: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    local, starts, ends, masked, others, n_local, padding = kept
    of_weight = of_factors = None
    if wanted[0]:
        of_weight = torch.ops.autopar.embedding_bag_of_weight(
            gradients[0], local, starts, ends, masked, n_local, padding
        )
    if wanted[-1]:  # factors are the last tensor, and ids never have a gradient
        of_factors = torch.ops.autopar.embedding_bag_of_factors(
            gradients[0], inputs[0], local, starts, ends, padding
        ).masked_fill(others, 0)
    return (of_weight, *[None] * (len(wanted) - 2), of_factors)


vocab_parallel_bags = Lowered(_bags, _backward)
vocab_parallel_weighted_bags = Lowered(_bags, _backward, keeps=(0,))
