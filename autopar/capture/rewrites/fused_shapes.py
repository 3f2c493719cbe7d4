"""Attention in the shapes that fused kernels take.

Torch computes any other call as two matmuls and a softmax, and keeps the weights of all queries and
keys for backward. Fused kernels take four dims, as many features in values as in queries, and
grouped heads only where that is said:

    two, three or more than four dims    reshaped; three are heads, rows and features
    other features of values             the shorter get zeros, which change no score and no other
                                         result (latent attention: A. Liu et al., "DeepSeek-V2",
                                         arXiv:2405.04434, has 192 in queries, 128 in values)
    one head of keys for all of queries  `enable_gqa`

A mask must broadcast over what is reshaped; one of heads, rows and keys gets a dim, too. A mask
with a gradient has no fused kernel anyway.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from autopar.capture.builder import Builder, TracedCall
from autopar.capture.rewrites.slices import cut

aten = torch.ops.aten
_TENSORS = ("query", "key", "value")


def for_fused_kernels(b: Builder, call: TracedCall, bound: dict[str, Any]) -> fx.Node | None:
    """The call in a shape that fused kernels take; None if it has one, or cannot get one."""
    shapes = [tuple(bound[name].meta["val"].shape) for name in _TENSORS]
    grouped, mask = _is_grouped(shapes, bound["enable_gqa"]), bound["attn_mask"]
    of_heads = mask is not None and len(mask.meta["val"].shape) == 3
    if grouped is None or (mask is not None and not _broadcasts(b, mask, shapes[0])):
        return None
    n_dims, widths = len(shapes[0]), [shape[-1] for shape in shapes]
    if (n_dims, len({*widths}), grouped, of_heads) == (4, 1, bound["enable_gqa"], False):
        return None
    tensors = [_widened(b, _in_four_dims(b, bound[name]), max(widths)) for name in _TENSORS]
    if of_heads:
        mask = b.op(aten.unsqueeze.default, mask, 0)
    scale = 1 / math.sqrt(widths[0]) if bound["scale"] is None else bound["scale"]
    args = (*tensors, mask, bound["dropout_p"], bound["is_causal"])
    found = b.emit(call.target, args, {"scale": scale, "enable_gqa": grouped})
    found = cut(b, found, 3, 0, widths[2])
    return found if n_dims == 4 else b.op(aten.reshape.default, found, list(call.shape))


def _is_grouped(shapes: list[tuple[int, ...]], enabled: bool) -> bool | None:
    """Do heads of the query share those of keys? None if dims before them broadcast, or differ."""
    leads = [shape[:-2] for shape in shapes]
    if len({lead[:-1] for lead in leads}) > 1 or len({len(lead) for lead in leads}) > 1:
        return None
    heads = [lead[-1] if lead else 1 for lead in leads]
    if heads[1] != heads[2] or (heads[0] != heads[1] and not enabled and heads[1] != 1):
        return None
    return enabled or heads[0] != heads[1]


def _broadcasts(b: Builder, mask: fx.Node, query: tuple[int, ...]) -> bool:
    """Is it one mask of rows and keys, of heads too, or has it the four dims of the query?"""
    n_dims = len(mask.meta["val"].shape)
    return mask not in b.has_grad and n_dims <= min(len(query), 4) and n_dims in (2, 3, len(query))


def _in_four_dims(b: Builder, x: fx.Node) -> fx.Node:
    shape = x.meta["val"].shape
    if len(shape) == 4:
        return x
    heads = shape[-3] if len(shape) > 2 else 1
    return b.op(aten.reshape.default, x, [math.prod(shape[:-3]), heads, *shape[-2:]])


def _widened(b: Builder, x: fx.Node, width: int) -> fx.Node:
    """With zeros as further features."""
    missing = width - x.meta["val"].shape[-1]
    return b.op(aten.pad.default, x, [0, missing]) if missing else x
