"""Learned masks of attention that are the same in every row of the batch: made for one row.

A model that adds a learned bias to a mask may expand the mask to the batch first, as `transformers`
does whenever it is exported. The bias then has as many elements as all scores. In half precision
its gradient would be rounded in each row and then summed; of one row it is summed, then rounded.

    where(expand(mask), bias, low)  =  where(mask, bias, low)    if bias has one row

Attention broadcasts the result itself.
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.capture.attention import is_elementwise
from autopar.capture.builder import Builder
from autopar.capture.rewrites.places import expanded

aten = torch.ops.aten


def for_one_row(b: Builder, mask: fx.Node) -> fx.Node:
    """`mask` with size 1 in leading dims in which it repeats; a mask without gradient stays."""
    if mask not in b.has_grad:
        return mask
    found = _once(b, mask, {})
    return mask if found.meta["val"].shape == mask.meta["val"].shape else found


def _once(b: Builder, node: fx.Node, seen: dict[fx.Node, fx.Node]) -> fx.Node:
    """A value that broadcasts to `node`, which has the same last two dims."""
    if node not in seen:
        seen[node] = node
        if node.op == "call_function" and is_elementwise(node.target):
            sources = {source: _once(b, source, seen) for source in node.all_input_nodes}
            origin, b.origin = b.origin, node
            seen[node] = _made_once(b, node, sources)
            b.origin = origin
    return seen[node]


def _made_once(b: Builder, node: fx.Node, sources: dict[fx.Node, fx.Node]) -> fx.Node:
    assert isinstance(node.target, torch._ops.OpOverload)
    lead, last = node.meta["val"].shape[:-2], node.meta["val"].shape[-2:]
    if node.target is aten.expand.default:
        (source,) = sources.values()
        shape = source.meta["val"].shape[:-2]
        return node if shape == lead else expanded(b, source, (*shape, *last))
    if all(source is once for source, once in sources.items()):
        return node
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), sources.__getitem__)
    found = b.op(node.target, *args, **kwargs)
    return node if found.meta["val"].shape[:-2] == lead else found
