"""Attention with dropout, decomposed into its parts (`attention_by_parts`).

    scores = q k^T scale              in float32 if the model's dtype is half precision
    mask                              boolean: -inf where False; else added; rows with nothing to
                                      attend to give 0, as in the fused operator
    softmax, dropout, matmul with v

Only so is the dropout mask a tensor of its own. Each part has a sharding rule. Attention without
dropout stays whole.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from autopar.capture.builder import Builder, TracedCall
from autopar.capture.rewrites.random import cast, dropped
from autopar.precision import working_dtype

aten = torch.ops.aten


def attention_by_parts(b: Builder, call: TracedCall) -> fx.Node | None:
    bound = call.bind()
    query, key, value, mask = (bound[n] for n in ("query", "key", "value", "attn_mask"))
    if bound["dropout_p"] == 0:
        return None
    dtype, width = query.meta["val"].dtype, query.meta["val"].shape[-1]
    scale = 1 / math.sqrt(width) if bound["scale"] is None else bound["scale"]
    last = key.meta["val"].dim() - 1
    transposed_key = b.op(aten.transpose.int, key, last - 1, last)
    scores = _matmul(b, b.op(aten.mul.Tensor, query, scale), transposed_key, bound["enable_gqa"])
    scores = cast(b, scores, working_dtype(dtype))
    if bound["is_causal"]:
        mask = _causal(b, *scores.meta["val"].shape[-2:])
    rank = scores.meta["val"].dim()
    if mask is None:
        weights = b.op(aten.softmax.int, scores, rank - 1)
    else:
        weights = b.op(aten._safe_softmax.default, _masked(b, scores, mask), rank - 1)
    weights = cast(b, weights, dtype)
    kept = dropped(b, weights, bound["dropout_p"], weights.meta["val"].shape)
    return _matmul(b, kept, value, bound["enable_gqa"])


def _matmul(b: Builder, left: fx.Node, right: fx.Node, grouped: bool) -> fx.Node:
    """left @ right. If grouped, a head of `right` serves several heads of `left`: these become rows
    of one matmul."""
    *batch, heads, rows, inner = left.meta["val"].shape
    n_heads, columns = right.meta["val"].shape[-3], right.meta["val"].shape[-1]
    if not grouped or heads == n_heads:
        return b.op(aten.matmul.default, left, right)
    folded = [*batch, n_heads, heads // n_heads * rows, inner]
    result = b.op(aten.matmul.default, b.op(aten.reshape.default, left, folded), right)
    return b.op(aten.reshape.default, result, [*batch, heads, rows, columns])


def _causal(b: Builder, rows: int, columns: int) -> fx.Node:
    whole = b.op(aten.ones.default, [rows, columns], dtype=torch.bool, device=torch.device("cpu"))
    return b.op(aten.tril.default, whole)


def _masked(b: Builder, scores: fx.Node, mask: fx.Node) -> fx.Node:
    if mask.meta["val"].dtype == torch.bool:
        return b.op(aten.where.ScalarOther, mask, scores, -math.inf)
    return b.op(aten.add.Tensor, scores, mask)
