"""Delivery: which part of each model input a rank's program takes, per microbatch.

Rows of the batch are exchangeable, so microbatches are dealt such that every rank's rows are
contiguous. With D ranks sharding the batch and m microbatches, the B rows are viewed as
(D, m, B / (D m)): rank c owns block c, and microbatch i takes part i of every block. A tensor
that is not sharded takes the same rows in the same order, so gathered and replicated tensors
agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.errors import BatchError
from autopar.placement import Spec, intervals_of
from autopar.program.lines import Delivered, batch_shards


def batch_index(item: Delivered, sizes: Sequence[int], coordinate: Sequence[int]) -> int:
    """Which of the item's batch shards the rank at `coordinate` holds."""
    index = 0
    for axis in item.local.spec.axes_of(item.batch_cell) if item.batch_cell else ():
        index = index * sizes[axis] + coordinate[axis]
    return index


def _batch_view(item: Delivered, rows: int, n_outer: int, n_microbatches: int) -> tuple[int, ...]:
    """The batch factor of `item` as (outer blocks, microbatches, rest)."""
    per_block, left = divmod(rows, n_outer * n_microbatches)
    if left:
        raise BatchError(
            f"{rows} rows do not divide over {n_outer} blocks of {n_microbatches} microbatches",
            hint="use drop_last=True in the loader, or a batch size that divides",
        )
    return n_outer, n_microbatches, per_block


def microbatch_of(
    whole: Tensor, item: Delivered, index: int, n_microbatches: int, n_blocks: int
) -> Tensor:
    """The rows of microbatch `index`: part `index` of each of the `n_blocks` blocks of `whole`.

    All of `whole` if it has no batch dim, or if there is one microbatch.
    """
    if item.batch_cell is None or n_microbatches == 1:
        return whole
    dim, factor = item.batch_cell
    before = math.prod(item.dims[dim][:factor])
    after = math.prod(item.dims[dim][factor + 1 :])
    rows = whole.shape[dim] // (before * after)
    split = (before, *_batch_view(item, rows, n_blocks, n_microbatches), after)
    seen = whole.reshape(*whole.shape[:dim], *split, *whole.shape[dim + 1 :])
    part = seen.select(dim + 2, index)
    return part.flatten(dim, dim + 3)  # not by -1, which no size of an empty tensor tells


def shard(
    whole: Tensor,
    dims: Sequence[Sequence[int]],
    spec: Spec,
    sizes: Sequence[int],
    coordinate: Sequence[int],
    skip: tuple[int, int] | None = None,
    folded: int | None = None,
) -> Tensor:
    """One rank's part of a whole tensor; factor `skip` is already cut, and the shard on axis
    `folded` is in head-tail order."""
    left = [list(factors) for factors in dims]
    out = whole
    for axis in spec.order or range(len(sizes)):
        placement, n = spec.placements[axis], sizes[axis]
        if not placement.is_shard:
            continue
        dim, factor = placement.cell
        size = left[dim][factor] // n
        left[dim][factor] = size
        if placement.cell == skip:
            continue
        outer, inner = math.prod(left[dim][:factor]), math.prod(left[dim][factor + 1 :])
        seen = out.reshape(*out.shape[:dim], outer, n * size, inner, *out.shape[dim + 1 :])
        parts = [
            seen.narrow(dim + 1, start, stop - start)
            for start, stop in intervals_of(coordinate[axis], n, n * size, axis == folded)
        ]
        part = torch.cat(parts, dim + 1) if len(parts) > 1 else parts[0]
        out = part.reshape(*out.shape[:dim], outer * size * inner, *out.shape[dim + 1 :])
    return out


def deliver(
    value: Tensor,
    item: Delivered,
    microbatch: int,
    n_microbatches: int,
    n_blocks: int,
    sizes: Sequence[int],
    coordinate: Sequence[int],
    is_local: bool,
) -> Tensor:
    """This rank's part of `value` for one microbatch.

    `value` is the global tensor, or this rank's rows of it if `is_local`.
    """
    dims = [list(factors) for factors in item.dims]
    if is_local and item.batch_cell is not None:
        blocks = max(n_blocks // batch_shards(item, sizes), 1)
        part = microbatch_of(value, item, microbatch, n_microbatches, blocks)
        cell, folded = item.batch_cell, item.local.folded
        return shard(part, dims, item.local.spec, sizes, coordinate, cell, folded)
    part = microbatch_of(value, item, microbatch, n_microbatches, n_blocks)
    return shard(part, dims, item.local.spec, sizes, coordinate, folded=item.local.folded)
