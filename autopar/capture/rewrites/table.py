"""The canonical forms: one small function per rewrite, and the table of all (`REWRITES`).

    no-ops        removed: casts to the same dtype, aliases, copies (there is no mutation),
                  views of the whole
    casts         every other cast is `to.dtype`
    views         `view`, `flatten`, ... are `reshape` with explicit sizes. A view of a shard, or
                  of a tensor whose copy was removed, may need a copy. `squeeze` would also drop
                  a dim of which a shard has one element.
    writes        functional `copy` and `fill` are the written value, expanded
    slices        also of complex tensors: `slices.py`
    places        repeats, look-ups, writes by mask, uninitialised memory: `places.py`
    bias          `linear(x, w, b)` = `linear(x, w) + b`, `addmm(b, x, w)` = `mm(x, w) + b`, so
                  that partial sums do not add the bias once per rank
    images        convolutions and global pools: `images.py`
    bags          of embeddings: `bags.py`
    experts       a matmul with a looked-up matrix per row: `experts.py`
    means         mean(x) = sum(x) / n with n a Python number, because a sum can be sharded
    mean losses   `losses.py`
    random        `random.py`; attention: `attention.py`

A rewrite returns the node that replaces the call (a tuple for several results), or None to keep
the call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from autopar.capture.builder import Builder, TracedCall
from autopar.capture.rewrites.attention import attention
from autopar.capture.rewrites.bags import BAG_REWRITES
from autopar.capture.rewrites.experts import expert_linear, expert_matmul, without_transpose
from autopar.capture.rewrites.images import IMAGE_REWRITES
from autopar.capture.rewrites.losses import LOSS_REWRITES, mean_of
from autopar.capture.rewrites.places import PLACE_REWRITES, expanded
from autopar.capture.rewrites.random import RANDOM_REWRITES
from autopar.capture.rewrites.slices import SLICE_REWRITES

aten = torch.ops.aten
Rewrite = Callable[[Builder, TracedCall], fx.Node | tuple[fx.Node | None, ...] | None]


def same_value(b: Builder, call: TracedCall) -> fx.Node | None:
    return call.args[0]


def cast(b: Builder, call: TracedCall) -> fx.Node | None:
    """Any `to`: only its change of dtype is kept. Of a number, as vmap writes it: a tensor."""
    bound, source = call.bind(), call.args[0]
    if not isinstance(source, fx.Node):
        return b.op(aten.full.default, [], source, dtype=call.dtype, device=torch.device("cpu"))
    if "dtype" in bound:
        wanted = bound["dtype"]
    else:  # to.other, type_as
        wanted = bound["other"].meta["val"].dtype
    return source if wanted is None else b.cast(source, wanted)


def reshape(b: Builder, call: TracedCall) -> fx.Node | None:
    source = call.args[0]
    for same in (source, *(source.args[:1] if source.target is aten.reshape.default else ())):
        if tuple(same.meta["val"].shape) == call.shape:
            return same
    return b.op(aten.reshape.default, source, list(call.shape))


def expand(b: Builder, call: TracedCall) -> fx.Node | None:
    return expanded(b, call.args[0], call.shape)


def broadcast_tensors(b: Builder, call: TracedCall) -> tuple[fx.Node, ...]:
    """Losses of `torch.nn.functional` call this even for equal shapes; then nothing is expanded."""
    sources = call.args[0]
    shape = torch.broadcast_shapes(*(source.meta["val"].shape for source in sources))
    return tuple(expanded(b, source, shape) for source in sources)


def copied(b: Builder, call: TracedCall) -> fx.Node | None:
    """`x.copy_(src)` becomes src with the dtype and shape of x."""
    bound, target = call.bind(), call.args[0]
    return _filled(b, target, bound["src"])


def filled(b: Builder, call: TracedCall) -> fx.Node | None:
    bound, target = call.bind(), call.args[0]
    if isinstance(bound["value"], fx.Node):
        return _filled(b, target, bound["value"])
    return b.op(aten.full_like.default, target, bound["value"])


def _filled(b: Builder, target: fx.Node, value: fx.Node) -> fx.Node:
    like = target.meta["val"]
    return expanded(b, b.cast(value, like.dtype), like.shape)


def linear(b: Builder, call: TracedCall) -> fx.Node | None:
    bound = call.bind()
    if bound["bias"] is None:
        return None
    matmul = b.op(aten.linear.default, bound["input"], bound["weight"])
    return b.op(aten.add.Tensor, matmul, bound["bias"])


def add(b: Builder, call: TracedCall) -> fx.Node | None:
    """Sums begin with zeros (`x = torch.zeros(n)`): partial sums add to nothing else in place."""
    bound = call.bind()
    for zeros, other in (("self", "other"), ("other", "self")):
        first, second = bound[zeros], bound[other]
        if _is_zeros(first) and isinstance(second, fx.Node) and bound["alpha"] == 1:
            value = second.meta["val"]
            if (tuple(value.shape), value.dtype) == (call.shape, call.origin.meta["val"].dtype):
                return second
    return None


def _is_zeros(value: Any) -> bool:
    made = {aten.zeros.default, aten.zeros_like.default}
    return value == 0 if not isinstance(value, fx.Node) else value.target in made


def scaled(b: Builder, node: fx.Node, factor: Any) -> fx.Node:
    return node if factor == 1 else b.op(aten.mul.Tensor, node, factor)


def add_matmul(matmul: torch._ops.OpOverload, first: str, second: str) -> Rewrite:
    """`beta * self + alpha * product(first, second)`."""

    def rewrite(b: Builder, call: TracedCall) -> fx.Node | None:
        bound = call.bind()
        result = scaled(b, b.op(matmul, bound[first], bound[second]), bound["alpha"])
        if bound["beta"] == 0:  # torch then ignores self, NaNs included
            return result
        return b.op(aten.add.Tensor, result, scaled(b, bound["self"], bound["beta"]))

    return rewrite


def complex_view(b: Builder, call: TracedCall) -> fx.Node | None:
    """A view of pairs that lie apart, because what made them contiguous is gone, is no view."""
    (source,) = call.args
    *strides, last = source.meta["val"].stride()
    if last == 1 and all(stride % 2 == 0 for stride in strides):
        return b.op(call.target, source)
    real, imaginary = (b.op(aten.select.int, source, -1, i) for i in range(2))
    return b.op(aten.complex.default, real, imaginary)


# How `cdist` computes: not as a sum of squares, which loses digits of short distances.
_NEVER_BY_MATMUL = 2


def pair_distances(b: Builder, call: TracedCall) -> fx.Node:
    """All distances between two sets of rows, of which each pair is taken once.

    torch's own operator wants rows that are contiguous, and shards nothing.
    """
    rows, norm = call.bind()["self"], call.bind()["p"]
    n = len(rows.meta["val"])
    distances = b.op(aten._cdist_forward.default, rows, rows, norm, _NEVER_BY_MATMUL)
    pairs = [b.constant("pairs", partial(_pair_rows, n, k)) for k in range(2)]
    return b.op(aten.index.Tensor, distances, pairs)


def _pair_rows(n: int, side: int) -> torch.Tensor:
    return torch.triu_indices(n, n, 1)[side]


def mean(b: Builder, call: TracedCall) -> fx.Node | None:
    bound = call.bind()
    shape = bound["self"].meta["val"].shape
    dims = bound.get("dim") or list(range(len(shape)))
    count = math.prod(shape[d] for d in dims)
    whole = len(dims) == len(shape) and not bound.get("keepdim", False)
    return mean_of(
        b,
        bound["self"],
        None if whole else list(dims),
        bound.get("keepdim", False),
        count,
        bound["dtype"],
    )


def same_as(target: torch._ops.OpOverload) -> Rewrite:
    """Another operator with the same arguments."""
    return lambda b, call: b.emit(target, call.args, call.kwargs)


REWRITES: dict[Any, Rewrite] = {
    aten.alias: same_value,
    aten.clone: same_value,
    aten.contiguous: same_value,
    aten.lift_fresh: same_value,
    aten.view_as_complex: complex_view,
    # A tensor whose memory holds conjugates: no kernel or collective needs to ask for that.
    aten._conj: same_as(aten._conj_physical.default),
    aten.resolve_conj: same_value,
    aten._pdist_forward: pair_distances,
    aten.lift_fresh_copy: same_value,
    aten.to: cast,
    aten._to_copy: cast,
    aten.type_as: cast,
    aten.view.default: reshape,
    aten._unsafe_view: reshape,
    aten.reshape: reshape,
    aten.view_as: reshape,
    aten.reshape_as: reshape,
    aten.flatten.using_ints: reshape,
    aten.unflatten.int: reshape,
    aten.expand: expand,
    aten.expand_as: expand,
    aten.broadcast_to: expand,
    aten.squeeze: reshape,
    aten.unsafe_chunk: same_as(aten.chunk.default),
    aten.unsafe_split: same_as(aten.split.Tensor),
    aten.unsafe_split_with_sizes: same_as(aten.split_with_sizes.default),
    aten.copy.default: copied,
    aten.fill: filled,
    aten.broadcast_tensors: broadcast_tensors,
    aten.add.Tensor: add,
    aten.linear: linear,
    aten.addmm.default: add_matmul(aten.mm.default, "mat1", "mat2"),
    aten.baddbmm.default: add_matmul(aten.bmm.default, "batch1", "batch2"),
    aten.addmv.default: add_matmul(aten.mv.default, "mat", "vec"),
    aten.bmm.default: expert_matmul,
    aten.matmul.default: expert_matmul,
    expert_linear: without_transpose,
    aten.mean.default: mean,
    aten.mean.dim: mean,
    **LOSS_REWRITES,
    **IMAGE_REWRITES,
    **PLACE_REWRITES,
    **SLICE_REWRITES,
    **BAG_REWRITES,
    **RANDOM_REWRITES,
    aten.scaled_dot_product_attention: attention,
}


def rewrite_of(target: torch._ops.OpOverload) -> Rewrite | None:
    """The rewrite for one overload, or for all overloads of its packet."""
    return REWRITES.get(target, REWRITES.get(target.overloadpacket))
