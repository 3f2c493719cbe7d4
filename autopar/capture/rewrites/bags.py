"""Canonical forms of embedding bags (`operators/bags.py`).

ids [b, l]     `F.embedding_bag` flattens them, with offsets 0, l, 2 l, ...; here they are
               [b, l] again, so that the bags are a dim of the ids
ids [n]        starts and ends of the bags, made of the offsets
mean           the sum divided by the number of ids that count, which is a sum over the table's
               rows too
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar import operators
from autopar.capture.builder import Builder, TracedCall
from autopar.capture.rewrites.gathers import constant_values

aten = torch.ops.aten
_SUM, _MEAN, _MAX = 0, 1, 2
_sum_of = operators.bags.embedding_bag._opoverload
_max_of = operators.bags.embedding_bag_max._opoverload


def embedding_bag(b: Builder, call: TracedCall) -> tuple[fx.Node | None, ...] | None:
    """The first result of the call. Calls whose others are read are kept, and those that count ids
    or have sparse gradients.
    """
    bound = call.bind()
    users = call.origin.users
    if (
        bound["scale_grad_by_freq"]
        or bound["sparse"]
        or any(user.args[1] and user.users for user in users)
    ):
        return None
    weight, ids = bound["weight"], bound["indices"]
    padding = -1 if bound.get("padding_idx") is None else bound["padding_idx"]
    if padding < 0 and call.target is aten.embedding_bag.padding_idx:
        padding = -1 if bound["padding_idx"] is None else padding + len(weight.meta["val"])
    factors, mode = bound["per_sample_weights"], bound["mode"]
    length = _length(bound)
    if length:
        ids, starts, ends = _rows(b, ids, length), None, None
        factors = None if factors is None else _rows(b, factors, length)
    else:
        starts, ends = _ends(b, bound)
    if mode == _MAX:
        pair = b.op(_max_of, weight, ids, starts, ends, padding)
        return b.getitem(pair, 0), None, None, None
    out = b.op(_sum_of, weight, ids, starts, ends, factors, padding)
    if mode == _MEAN:
        out = b.op(aten.div.Tensor, out, _counts(b, ids, starts, ends, padding, out))
    return out, None, None, None


def _length(bound: dict[str, Any]) -> int:
    """The number of ids in every bag, if the offsets are constants that say so; else 0."""
    n_ids, offsets = len(bound["indices"].meta["val"]), bound["offsets"]
    n_bags = len(offsets.meta["val"]) - bool(bound["include_last_offset"])
    if n_bags < 1 or n_ids == 0 or n_ids % n_bags:
        return 0
    found, length = constant_values((offsets,)), n_ids // n_bags
    equal = torch.arange(len(offsets.meta["val"])) * length
    return length if found is not None and torch.equal(found[0].long(), equal) else 0


def _rows(b: Builder, ids: fx.Node, length: int) -> fx.Node:
    shape = [len(ids.meta["val"]) // length, length]
    source = ids.args[0] if ids.target is aten.reshape.default else ids
    assert isinstance(source, fx.Node)
    if list(source.meta["val"].shape) == shape:
        return source
    return b.op(aten.reshape.default, ids, shape)


def _ends(b: Builder, bound: dict[str, Any]) -> tuple[fx.Node, fx.Node]:
    """Where each bag begins and ends."""
    ids, offsets = bound["indices"], bound["offsets"]
    value = offsets.meta["val"]
    if bound["include_last_offset"]:
        n_bags = len(value) - 1
        return (
            b.op(aten.slice.Tensor, offsets, 0, 0, n_bags, 1),
            b.op(aten.slice.Tensor, offsets, 0, 1, n_bags + 1, 1),
        )
    last = b.op(aten.full.default, [1], len(ids.meta["val"]), dtype=value.dtype)
    if len(value) == 1:
        return offsets, last
    rest = b.op(aten.slice.Tensor, offsets, 0, 1, len(value), 1)
    return offsets, b.op(aten.cat.default, [rest, last])


def _counts(
    b: Builder, ids: fx.Node, starts: fx.Node | None, ends: fx.Node | None, padding: int,
    like: fx.Node,
) -> fx.Node | int:  # fmt: skip
    """How many ids of each bag count, at least 1: a column [b, 1], or a number."""
    if starts is None and padding < 0:
        return int(ids.meta["val"].shape[1])
    if starts is None:
        counts = b.op(aten.sum.dim_IntList, b.op(aten.ne.Scalar, ids, padding), [1], True)
    else:
        if padding >= 0:
            before = b.op(aten.cumsum.default, b.op(aten.ne.Scalar, ids, padding), 0)
            before = b.op(aten.constant_pad_nd.default, before, [1, 0])
            starts, ends = (b.op(aten.index.Tensor, before, [at]) for at in (starts, ends))
        counts = b.op(aten.unsqueeze.default, b.op(aten.sub.Tensor, ends, starts), 1)
    counts = b.op(aten.clamp_min.default, counts, 1)
    return b.cast(counts, like.meta["val"].dtype)


BAG_REWRITES = {aten.embedding_bag: embedding_bag, aten._embedding_bag: embedding_bag}
