"""Attention: learned masks for one row (`repeated.py`), shapes of fused kernels
(`fused_shapes.py`), and dropout by position.

With dropout it is one operator, else its parts.

`ATTENTION_DROPOUT` (`operators/attention.py`) computes both at once and keeps no [s, t] tensor. The
parts are for what it does not compute (`_obstacle`), such as the gradient of a learned mask:

    scores = q k^T scale              in float32 if the model's dtype is half precision
    mask                              boolean: -inf where False; else added; rows with nothing to
                                      attend to give 0, as in the fused operator
    softmax, dropout, matmul with v

Both draw the same bits, and results are equal but for rounding. Attention without dropout stays
torch's. Every replacement is a note of the audit.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from autopar.capture.builder import Builder, TracedCall
from autopar.capture.names import source_line
from autopar.capture.rewrites.fused_shapes import for_fused_kernels
from autopar.capture.rewrites.random import dropped, places
from autopar.capture.rewrites.repeated import for_one_row
from autopar.operators import ATTENTION_DROPOUT
from autopar.precision import working_dtype

aten = torch.ops.aten


def attention(b: Builder, call: TracedCall) -> fx.Node | None:
    bound = call.bind()
    mask = bound["attn_mask"]
    if mask is not None:
        bound["attn_mask"] = for_one_row(b, mask)
    if bound["dropout_p"] == 0:
        fused = for_fused_kernels(b, call, bound)
        if fused is not None or bound["attn_mask"] is mask:
            return fused
        args, kwargs = fx.node.map_arg(
            (call.args, call.kwargs), lambda n: bound["attn_mask"] if n is mask else n
        )
        return b.emit(call.target, args, kwargs, call.origin)
    obstacle = _obstacle(b, call, bound)
    made_of = "fused, with dropout by position"
    if obstacle is not None:
        made_of = (
            f"matmuls, softmax and dropout by position, because {obstacle}; the weights of all "
            "queries and keys are kept for backward"
        )
    b.findings.add("replaced", "attention with dropout", made_of, source_line(call.origin))
    return _fused(b, call, bound) if obstacle is None else _attention_parts(b, bound)


def _obstacle(b: Builder, call: TracedCall, bound: dict[str, Any]) -> str | None:
    """Why the fused operator does not compute this call, or None."""
    q, k, v = (bound[name].meta["val"].shape for name in ("query", "key", "value"))
    mask = bound["attn_mask"]
    if mask in b.has_grad:
        return "its mask has a gradient"
    if bound["dropout_p"] == 1:
        return "it drops everything"
    if bound["enable_gqa"]:
        if k[-3] != v[-3]:
            return "keys and values have different numbers of heads"
        lead = (*torch.broadcast_shapes(q[:-3], k[:-3], v[:-3]), q[-3])
    else:
        lead = tuple(torch.broadcast_shapes(q[:-2], k[:-2], v[:-2]))
    if call.shape[:-2] != lead or (mask is not None and len(mask.meta["val"].shape) > len(q)):
        return "its mask has dims that queries and keys do not have"
    return None


def _fused(b: Builder, call: TracedCall, bound: dict[str, Any]) -> fx.Node:
    n_queries, n_keys = call.shape[-2], bound["key"].meta["val"].shape[-2]
    fused = b.op(
        ATTENTION_DROPOUT, bound["query"], bound["key"], bound["value"], bound["attn_mask"],
        b.seed(), places(b, [*call.shape[:-1], n_keys]), bound["dropout_p"], b.next_occurrence(),
        bound["is_causal"], n_queries, _scale(bound), bound["enable_gqa"],
    )  # fmt: skip
    b.restrided.add(fused)
    return fused


def _scale(bound: dict[str, Any]) -> float:
    width = bound["query"].meta["val"].shape[-1]
    return 1 / math.sqrt(width) if bound["scale"] is None else float(bound["scale"])


def _attention_parts(b: Builder, bound: dict[str, Any]) -> fx.Node:
    query, key, value, mask = (bound[n] for n in ("query", "key", "value", "attn_mask"))
    dtype = query.meta["val"].dtype
    last = key.meta["val"].dim() - 1
    transposed_key = b.op(aten.transpose.int, key, last - 1, last)
    scaled = b.op(aten.mul.Tensor, query, _scale(bound))
    scores = _matmul(b, scaled, transposed_key, bound["enable_gqa"])
    scores = b.cast(scores, working_dtype(dtype))
    if bound["is_causal"]:
        mask = _causal(b, *scores.meta["val"].shape[-2:])
    rank = scores.meta["val"].dim()
    if mask is None:
        weights = b.op(aten.softmax.int, scores, rank - 1)
    else:
        weights = b.op(aten._safe_softmax.default, _masked(b, scores, mask), rank - 1)
    weights = b.cast(weights, dtype)
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
