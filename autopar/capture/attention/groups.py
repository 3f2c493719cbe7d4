"""Heads of keys and values that a model repeats for each query of a group: `enable_gqa` instead.

    b n t e -> b n 1 t e -> b n g t e -> b (n g) t e        unsqueeze, expand, reshape
    b 1 t e -> b g t e                                      expand

Queries that share a head are a group (J. Ainslie et al.: "GQA", arXiv:2305.13245). Traced models of
transformers repeat the heads, as do many that are written by hand. Attention that knows of groups
keeps and sends each head once. Under a mask the heads stay repeated: CUDA's fused kernels take
either a mask or groups.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.capture.attention.flags import ATTENTION
from autopar.capture.builder import Builder, TracedCall
from autopar.capture.names import source_line
from autopar.operators import ATTENTION_RANGES

aten = torch.ops.aten


def group_queries(b: Builder) -> None:
    """Let every attention without a mask read heads that are not repeated."""
    for node in list(b.graph.nodes):
        if node.target not in (*ATTENTION, ATTENTION_RANGES):
            continue
        call = TracedCall.of(node)
        bound = call.bind()
        if bound.get("attn_mask") is not None or bound["enable_gqa"]:
            continue
        key, value = bound["key"], bound["value"]
        heads = len(_shape(key)) - 3
        b.origin = node
        with b.graph.inserting_before(node):
            shared = [_skip_repeat(b, x, heads) for x in (key, value)]
        if None not in shared and len({_shape(x)[heads] for x in shared}) == 1:
            call.change(key=shared[0], value=shared[1], enable_gqa=True)
            b.findings.add(
                "replaced", "repeated heads of keys and values", "`enable_gqa`", source_line(node),
                routine=True,
            )  # fmt: skip


def _skip_repeat(b: Builder, node: Any, dim: int) -> Any:
    """`node` without its repetition along `dim`; None if it has none."""
    shape = _shape(node)
    if dim < 0:
        return None
    if node.target is aten.transpose.int:
        first, second = (d % len(shape) for d in node.args[1:])
        inner = _skip_repeat(b, node.args[0], {first: second, second: first}.get(dim, dim))
        return None if inner is None else b.op(aten.transpose.int, inner, first, second)
    if node.target is aten.to.dtype:  # as autocast casts what attention reads
        inner = _skip_repeat(b, node.args[0], dim)
        return None if inner is None else b.op(aten.to.dtype, inner, node.args[1])
    if node.target is aten.expand.default:
        narrow = node.args[0]
        return narrow if _shape(narrow) == _replace_size(shape, dim, 1) != shape else None
    if node.target is not aten.reshape.default or node.args[0].target is not aten.expand.default:
        return None
    wide, narrow = node.args[0], node.args[0].args[0]
    n = _shape(wide)[dim]
    if _shape(wide) != _replace_size(shape, dim, n, shape[dim] // n):
        return None
    if _shape(narrow) != _replace_size(shape, dim, n, 1):
        return None
    if narrow.target is aten.unsqueeze.default:
        return narrow.args[0]
    return b.op(aten.reshape.default, narrow, list(_replace_size(shape, dim, n)))


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _replace_size(shape: tuple[int, ...], dim: int, *sizes: int) -> tuple[int, ...]:
    """`shape` with other sizes in the place of one."""
    return (*shape[:dim], *sizes, *shape[dim + 1 :])
