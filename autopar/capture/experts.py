"""Products with matrices that are looked up per row: `weight[ids] @ x` is `expert_linear`.

    y[.., 0] = weight[ids] @ x[.., 0]        weight e o i, ids *, x * i 1
    y[0, ..] = x[0, ..] @ weight[ids]        weight e i o, ids *, x * 1 i

transformers writes mixtures of experts so when asked for a form without loops over data
(`isolate.TRACEABLE_EXPERTS`). As a lookup and a product, every row has a copy of a matrix: a
thousand tokens take the memory of a thousand experts. The lookup is dead afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from autopar import operators
from autopar.capture.builder import Builder, Call

aten = torch.ops.aten
expert_linear = operators.experts.expert_linear._opoverload
_TRANSPOSES = (aten.transpose.int, aten.mT.default)


def product_with_experts(b: Builder, call: Call) -> fx.Node | None:
    """`bmm` or `matmul` of one vector per row with a matrix per row."""
    left, right = call.args
    for vectors, matrices, dim in ((right, left, -1), (left, right, -2)):
        found = _looked_up(matrices)
        if found is None or _shape(vectors)[dim] != 1:
            continue
        weight, ids, transposed = found
        rows = _shape(ids)
        if _shape(vectors)[:-2] != rows:
            continue
        x = _reshaped(b, vectors, (ids.meta["val"].numel(), _shape(vectors)[-3 - dim]))
        # A vector on the left multiplies the columns.
        y = b.op(expert_linear, x, weight, _reshaped(b, ids, (-1,)), transposed != (dim == -2))
        return b.op(aten.reshape.default, y, list(call.shape))
    return None


def _looked_up(matrices: fx.Node) -> tuple[fx.Node, fx.Node, bool] | None:
    """The weight and the ids of `weight[ids]`, and whether its matrices are transposed after."""
    transposed = False
    while matrices.target in _TRANSPOSES and _swaps_last_two(matrices):
        matrices, transposed = matrices.args[0], not transposed
    if matrices.target is not aten.index.Tensor:
        return None
    weight, indices = matrices.args
    if len(indices) != 1 or len(_shape(weight)) != 3 or not _counts(indices[0]):
        return None
    return weight, indices[0], transposed


def _swaps_last_two(node: fx.Node) -> bool:
    rank = len(_shape(node))
    dims = node.args[1:] or (-2, -1)
    return {dim % rank for dim in dims} == {rank - 2, rank - 1}


def _counts(index: fx.Node | None) -> bool:
    return index is not None and index.meta["val"].dtype in (torch.int32, torch.int64)


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _reshaped(b: Builder, node: fx.Node, shape: Sequence[int]) -> fx.Node:
    """A reshape, or what the node is a view of where that has the shape."""
    value = node.meta["val"]
    size = value.numel()
    wanted = tuple(size if n == -1 else n for n in shape)
    if node.target is aten.unsqueeze.default and _shape(node.args[0]) == wanted:
        return node.args[0]
    return node if _shape(node) == wanted else b.op(aten.reshape.default, node, list(wanted))
