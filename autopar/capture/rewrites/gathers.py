"""Gathers at constant indices that only move dims: `mask[batch_index, key_index]`.

    y[..., j, ...] = x[i_0[j], i_1[j], ...]    index tensors i_d broadcast to one block of dims

Suppose every i_d is `arange(size of dim d)` and varies along a block dim of its own. Then y is x
with its dims permuted, then reshaped to add unit dims (`gather_as_view`). transformers indexes
attention masks and positions like this. As gathers they could not be sharded.

This needs the values of the index tensors at capture, so they must be small and depend on no
placeholder (`constant_values`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autopar.capture.builder import Builder, TracedCall
from autopar.capture.dependence import is_random, subgraph

aten = torch.ops.aten

# Limit for all index tensors of a call together, and for each value they are computed from.
MAX_ELEMENTS = 2**20


def gather_as_view(b: Builder, call: TracedCall) -> fx.Node | None:
    """`index.Tensor` as permute and reshape; None if it does more than move dims."""
    source, indices = call.args
    order = _dims_in_result(tuple(source.meta["val"].shape), indices)
    if order is None:
        return None
    if order != sorted(order):
        source = b.op(aten.permute.default, source, order)
    if tuple(source.meta["val"].shape) == call.shape:
        return source
    return b.op(aten.reshape.default, source, list(call.shape))


def _dims_in_result(shape: tuple[int, ...], indices: Sequence[fx.Node | None]) -> list[int] | None:
    """The dims of the source in the order of the result; None if the result is not a view."""
    indexed = {dim: index for dim, index in enumerate(indices) if index is not None}
    values = constant_values(tuple(indexed.values()))
    if not values:
        return None
    rank = max(value.dim() for value in values)
    along: dict[int, int] = {}  # dim of the block -> dim of the source
    for dim, value in zip(indexed, values, strict=True):
        whole = torch.arange(shape[dim], dtype=value.dtype, device=value.device)
        if not torch.equal(value.flatten(), whole):
            return None
        varying_dims = [rank - value.dim() + i for i, size in enumerate(value.shape) if size != 1]
        if len(varying_dims) > 1 or (varying_dims and varying_dims[0] in along):
            return None
        if varying_dims:
            along[varying_dims[0]] = dim
    block = [along[i] for i in sorted(along)]
    # The block replaces adjacent indexed dims in place. If they are not adjacent, it comes first.
    first, last = min(indexed), max(indexed)
    start = first if last - first + 1 == len(indexed) else 0
    rest = [dim for dim in range(len(shape)) if dim not in indexed]
    moved = [*(d for d in rest if d < start), *block, *(d for d in rest if d >= start)]
    return _with_unit_dims(moved, shape)


def _with_unit_dims(moved: list[int], shape: tuple[int, ...]) -> list[int]:
    """The order of all dims of the source; dims of size 1 stay in place, so often nothing moves."""
    large = iter(dim for dim in moved if shape[dim] != 1)
    return [dim if size == 1 else next(large) for dim, size in enumerate(shape)]


def constant_values(indices: tuple[fx.Node, ...]) -> tuple[torch.Tensor, ...] | None:
    """The values of the index tensors; None if they are large or not constant."""
    if sum(map(_size, indices)) > MAX_ELEMENTS or not _is_small_constant(indices):
        return None
    graph, _ = subgraph(indices)
    with torch.no_grad():
        found: tuple[torch.Tensor, ...] = fx.Interpreter(fx.GraphModule(nn.Module(), graph)).run()
    return found


def _is_small_constant(indices: Sequence[fx.Node]) -> bool:
    """Are they computed from small values alone, and from no placeholder?"""
    stack, seen = list(indices), set[fx.Node]()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        if node.op == "placeholder" or is_random(node) or _size(node) > MAX_ELEMENTS:
            return False
        seen.add(node)
        stack.extend(node.all_input_nodes)
    return True


def _size(node: fx.Node) -> int:
    values = pytree.tree_leaves(node.meta["val"])
    return sum(v.numel() for v in values if isinstance(v, torch.Tensor))
