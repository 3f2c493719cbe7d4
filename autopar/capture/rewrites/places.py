"""Canonical forms of operators that repeat, look up or write by index.

repeats       `repeat` is `expand` and `reshape`
look-ups      `index_select` is `index`. An `index` with constant indices that only move dims is a
              view (`gathers.py`). An `index` that looks up elements per row is `gather`, which
              keeps the rows apart.
masks         a number written where a mask is set is `where`
bilinear      `bilinear` is `einsum`
memory        uninitialised memory is zeros, because its content would differ between ranks
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from autopar.capture.builder import Builder, TracedCall
from autopar.capture.rewrites.gathers import constant_values, gather_as_view

aten = torch.ops.aten

INTEGERS = (torch.int32, torch.int64)


def expanded(b: Builder, source: fx.Node, shape: Sequence[int]) -> fx.Node:
    if tuple(source.meta["val"].shape) == tuple(shape):
        return source
    return b.op(aten.expand.default, source, list(shape))


def repeat(b: Builder, call: TracedCall) -> fx.Node | None:
    """Each dim n repeated r times becomes (1 n), expanded to (r n) and reshaped."""
    source, repeats = call.args[0], call.bind()["repeats"]
    shape = tuple(source.meta["val"].shape)
    sizes = (1,) * (len(repeats) - len(shape)) + shape
    pairs = list(zip(repeats, sizes, strict=True))
    apart = [n for pair in pairs for n in ((1, pair[1]) if pair[0] != 1 else pair[1:])]
    wide = [n for pair in pairs for n in (pair if pair[0] != 1 else pair[1:])]
    if apart != list(shape):
        source = b.op(aten.reshape.default, source, apart)
    source = expanded(b, source, wide)
    if wide == list(call.shape):
        return source
    return b.op(aten.reshape.default, source, list(call.shape))


def index_select(b: Builder, call: TracedCall) -> fx.Node | None:
    bound, rank = call.bind(), len(call.shape)
    index = bound["index"]
    if rank == 0:
        return bound["self"]
    if index.meta["val"].dim() == 0:
        index = b.op(aten.reshape.default, index, [1])
    dim = bound["dim"] % rank
    return b.op(aten.index.Tensor, bound["self"], [*[None] * dim, index])


def index(b: Builder, call: TracedCall) -> fx.Node | None:
    return gather_as_view(b, call) or gather_of_rows(b, call)


def gather_of_rows(b: Builder, call: TracedCall) -> fx.Node | None:
    """`x[arange(n_rows), j]` and `x[arange(n_rows)[:, None], j]`: row r of j indexes row r of x.

    A sequence classifier reads its pooled token like this.
    """
    source, indices = call.args
    if len(indices) < 2 or None in indices[:2] or any(indices[2:]):
        return None
    rows, places = indices[:2]
    if any(index.meta["val"].dtype not in INTEGERS for index in (rows, places)):
        return None
    n_rows, n_places, *rest = source.meta["val"].shape
    block = torch.broadcast_shapes(rows.meta["val"].shape, places.meta["val"].shape)
    if block[:1] != (n_rows,) or not _numbers_rows(rows, (n_rows, *[1] * len(block[1:]))):
        return None
    places = b.cast(places, torch.int64)
    # `index` counts negative indices from the end, but `gather` does not take them.
    below, from_end = b.op(aten.lt.Scalar, places, 0), b.op(aten.add.Tensor, places, n_places)
    places = expanded(b, b.op(aten.where.self, below, from_end, places), block)
    n_read = math.prod(block[1:])
    places = b.op(aten.reshape.default, places, [n_rows, n_read, *[1] * len(rest)])
    read = b.op(aten.gather.default, source, 1, expanded(b, places, (n_rows, n_read, *rest)))
    return b.op(aten.reshape.default, read, list(call.shape))


def _numbers_rows(rows: fx.Node, shape: tuple[int, ...]) -> bool:
    """Is `rows` 0, 1, ... along the first dim of the block?"""
    if tuple(rows.meta["val"].shape) != shape:
        return False
    found = constant_values((rows,))
    return found is not None and found[0].flatten().tolist() == list(range(shape[0]))


def index_put(b: Builder, call: TracedCall) -> fx.Node | None:
    """`x[mask] = number`, and of a vector, as `where`; the mask covers the leading dims of x, the
    vector those behind."""
    bound = call.bind()
    source, (mask, *others), value = bound["self"], bound["indices"], bound["values"]
    written = value.meta["val"]
    if others or mask is None or mask.meta["val"].dtype != torch.bool or bound["accumulate"]:
        return None
    shape, rank = tuple(source.meta["val"].shape), mask.meta["val"].dim()
    is_number = written.numel() == 1 and written.dim() <= 1
    if not is_number and written.dim() > len(shape) - rank:
        return None  # it may have an entry for each place
    if len(shape) > rank:
        mask = b.op(aten.reshape.default, mask, [*shape[:rank], *[1] * (len(shape) - rank)])
    if is_number and written.dim():
        value = b.op(aten.reshape.default, value, [])
    return b.op(aten.where.self, mask, value, source)


def bilinear(b: Builder, call: TracedCall) -> fx.Node | None:
    """`bilinear` of two inputs [... i] and [... j] and a weight [o i j]."""
    bound = call.bind()
    operands = [bound["input1"], bound["weight"], bound["input2"]]
    result = b.op(aten.einsum.default, "...i,oij,...j->...o", operands)
    return result if bound["bias"] is None else b.op(aten.add.Tensor, result, bound["bias"])


def zeros(b: Builder, call: TracedCall) -> fx.Node | None:
    return b.op(aten.zeros.default, list(call.shape), dtype=call.origin.meta["val"].dtype)


def zeros_like(b: Builder, call: TracedCall) -> fx.Node | None:
    return b.op(aten.zeros_like.default, call.args[0], dtype=call.origin.meta["val"].dtype)


PLACE_REWRITES: dict[Any, Callable[[Builder, TracedCall], fx.Node | None]] = {
    aten.repeat: repeat,
    aten.index.Tensor: index,
    aten.index_select: index_select,
    aten.index_put: index_put,
    aten.bilinear: bilinear,
    aten.empty: zeros,
    aten.empty_strided: zeros,
    aten.new_empty: zeros,
    aten.new_empty_strided: zeros,
    aten.empty_like: zeros_like,
}
