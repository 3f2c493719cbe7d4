"""Matmuls with one matrix per row: `weight[ids] @ x` becomes `expert_linear`.

    y[.., 0] = weight[ids] @ x[.., 0]        weight e o i, ids *, x * i 1
    y[0, ..] = x[0, ..] @ weight[ids]        weight e i o, ids *, x * 1 i

transformers writes mixtures of experts in this form when asked for one without loops over data
(`TRACEABLE_EXPERTS` in `capture/trace/isolate.py`). As a lookup and a matmul, every row has its own
copy of a matrix: a thousand tokens need the memory of a thousand experts. After the rewrite,
nothing reads the lookup.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autopar import operators
from autopar.capture.builder import Builder, TracedCall

aten = torch.ops.aten
expert_linear = operators.experts.expert_linear._opoverload
_TRANSPOSES = (aten.transpose.int, aten.mT.default)


def expert_matmul(b: Builder, call: TracedCall) -> fx.Node | None:
    """Rewrite a `bmm` or `matmul` of one vector per row with one looked-up matrix per row."""
    left, right = call.args
    for vectors, matrices, dim in ((right, left, -1), (left, right, -2)):
        found = _looked_up(matrices)
        if found is None or _shape(vectors)[dim] != 1:
            continue
        weight, ids, transposed = found
        rows = _shape(ids)
        if _shape(vectors)[:-2] != rows:
            continue
        n_rows = math.prod(rows)
        x = _reshaped(b, vectors, (n_rows, _shape(vectors)[-3 - dim]))
        # A vector on the left multiplies the columns.
        by_columns = transposed != (dim == -2)
        y = b.op(expert_linear, x, weight, _reshaped(b, ids, (n_rows,)), by_columns)
        return b.op(aten.reshape.default, y, list(call.shape))
    return None


def without_transpose(b: Builder, call: TracedCall) -> fx.Node | None:
    """Rewrite an `expert_linear` that reads transposed matrices."""
    x, weight, ids, *transposed = call.args
    if weight.target not in _TRANSPOSES or not _swaps_last_two(weight):
        return None
    return b.op(expert_linear, x, _arguments(weight)[0], ids, not any(transposed))


def _looked_up(matrices: fx.Node) -> tuple[fx.Node, fx.Node, bool] | None:
    """`weight[ids]` -> weight, ids, and whether the matrices are transposed afterwards."""
    transposed, args = False, _arguments(matrices)
    while matrices.target in _TRANSPOSES and _swaps_last_two(matrices):
        matrices, transposed = args[0], not transposed
        args = _arguments(matrices)
    if matrices.target is not aten.index.Tensor:
        return None
    weight, indices = args
    if len(indices) != 1 or len(_shape(weight)) != 3 or not _counts(indices[0]):
        return None
    return weight, indices[0], transposed


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    return node.args


def _swaps_last_two(node: fx.Node) -> bool:
    rank, dims = len(_shape(node)), _arguments(node)[1:] or (-2, -1)
    return {dim % rank for dim in dims} == {rank - 2, rank - 1}


def _counts(index: fx.Node | None) -> bool:
    return index is not None and index.meta["val"].dtype in (torch.int32, torch.int64)


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _reshaped(b: Builder, node: fx.Node, shape: Sequence[int]) -> fx.Node:
    """`node` in another shape; undoes an `unsqueeze` instead of adding a reshape if possible."""
    for same in (node, *(_arguments(node)[:1] if node.target is aten.unsqueeze.default else ())):
        if _shape(same) == tuple(shape):
            return same
    return b.op(aten.reshape.default, node, list(shape))
