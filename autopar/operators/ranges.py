"""Attention in which each row sees one range of keys.

    row i sees key j  if  first[i] <= j < after[i]

That is every causal mask, window of neighbours, prefix, and mask of documents that lie one after
another. A mask of s rows has s·t numbers; ranges have 2·s, and rows may be sharded with theirs.
Keys that no row of a block sees are left out, so a window of w keys takes s·w of the s·t pairs
(with ranges of rows per key: Wang et al., "FlashMask", arXiv:2410.01359).

`attention_ranges` is what a program calls. It calls an operator with the shapes of `scores.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.operators.scores import (
    Block,
    Scores,
    block_sizes,
    empty_gradients,
    empty_results,
    lead_of,
    mask_view,
    seen_keys,
    split_heads,
)
from autopar.operators.workspace import add_workspace
from autopar.precision import working_dtype

torch.library.define(
    "autopar::attention_ranges",
    "(Tensor query, Tensor key, Tensor value, Tensor first, Tensor after, float seen, float scale, "
    "bool enable_gqa, bool documents=False) -> Tensor",
)


@torch.library.impl("autopar::attention_ranges", "CompositeImplicitAutograd")
def attention_ranges(
    query: Tensor, key: Tensor, value: Tensor, first: Tensor, after: Tensor, seen: float,
    scale: float, enable_gqa: bool, documents: bool = False,
) -> Tensor:  # fmt: skip
    """`scaled_dot_product_attention` of rows to ranges of keys: * s e, * t e, * t f -> * s f.

    `first` and `after` are int64 [*, s, 1], with size 1 where they broadcast. `seen` is the share
    of pairs of rows and keys in ranges: what a plan expects. If ranges are of `documents` of the
    batch, it is the share if each row were one. A row that sees no key gets 0.
    """
    lead, shared = lead_of(query, key, value, enable_gqa)
    q, k, v = split_heads(query, key, value, lead, shared)
    ranges = [mask_view(x, lead, shared) for x in (first, after)]
    out, _ = torch.ops.autopar.attention_ranges_forward(q, k, v, *ranges, seen, scale)
    result: Tensor = out.reshape(*lead, *out.shape[-2:])
    return result


@torch.library.custom_op("autopar::attention_ranges_forward", mutates_args=())
def attention_ranges_forward(
    query: Tensor, key: Tensor, value: Tensor, first: Tensor, after: Tensor, seen: float,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out [b, n, g, s, f], L [b, n, g, s]); L is infinite for a row that sees no key."""
    return _Ranges(query, key, first, after, seen, scale).forward(value)


@torch.library.custom_op("autopar::attention_ranges_backward", mutates_args=())
def attention_ranges_backward(
    gradient: Tensor, out: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor,
    first: Tensor, after: Tensor, seen: float, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key and value."""
    scores = _Ranges(query, key, first, after, seen, scale)
    return scores.backward(gradient, out, lse, value)


class _Ranges(Scores):
    def __init__(
        self, query: Tensor, key: Tensor, first: Tensor, after: Tensor, seen: float, scale: float
    ) -> None:
        super().__init__(query, key, scale, True, seen)
        self.first, self.after = first, after
        n_keys = key.shape[-2]
        bounds = [first.amin((0, 1, 2, 4)), after.amax((0, 1, 2, 4))]
        self._bounds = torch.stack(bounds).clamp(0, n_keys).tolist()  # the host needs them once
        self._columns = torch.arange(n_keys, device=key.device)

    def keys(self, rows: slice) -> slice:
        first, after = (bound[rows] for bound in self._bounds)
        if len(first) < rows.stop - rows.start:  # rows share one range
            first, after = self._bounds
        start = min(min(first), self.key.shape[-2] - 1)
        return slice(start, max(*after, start + 1))

    def hide(self, scores: Tensor, block: Block) -> Tensor:
        columns = self._columns[block.columns]
        hidden = (columns < block.part(self.first)) | (columns >= block.part(self.after))
        block.split_groups(scores).masked_fill_(hidden, -math.inf)
        return scores


@attention_ranges_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_results(query, value)


@attention_ranges_backward.register_fake
def _(
    gradient: Tensor, out: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return empty_gradients(query, key, value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.seen, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*output, *tensors)


def _backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    gradients = torch.ops.autopar.attention_ranges_backward(
        gradient, *ctx.saved_tensors, ctx.seen, ctx.scale
    )
    return *gradients, None, None, None, None


attention_ranges_forward.register_autograd(_backward, setup_context=_keep)


def _workspace(tensors: Sequence[Tensor], seen: float, is_forward: bool) -> int:
    """Scores of a block twice: before and after softmax, or those and their gradients; flags."""
    query, key, value = tensors
    item, width = query.dtype.itemsize, working_dtype(query.dtype).itemsize
    n_keys = seen_keys(key.shape[-2], seen)
    n_batch, n_heads, n_groups = query.shape[:3]
    batch, heads, rows = block_sizes(query.shape, n_keys)
    n_scores = min(batch, n_batch) * min(heads, n_heads) * n_groups * rows * n_keys
    if is_forward:
        return (2 * width + 1) * n_scores
    of_block, n_summed = (2 * width + item) * n_scores, key.numel() + value.numel()
    if item == width:
        return of_block
    # Sums are rounded at the end: then blocks are gone, and before that the results are not there.
    return max(width * n_summed, (width - item) * n_summed + of_block)


ATTENTION_RANGES = torch.ops.autopar.attention_ranges.default


add_workspace(
    attention_ranges_forward._opoverload,
    lambda args: _workspace(args[:3], args[5], is_forward=True),
)
add_workspace(
    attention_ranges_backward._opoverload,
    lambda args: _workspace(args[3:6], args[8], is_forward=False),
)

torch.library.define(
    "autopar::count_below", "(Tensor columns, Tensor rows, bool inclusive) -> Tensor"
)


@torch.library.impl("autopar::count_below", "CompositeExplicitAutograd")
def count_below(columns: Tensor, rows: Tensor, inclusive: bool) -> Tensor:
    """How many columns are below each row, or equal if `inclusive`: * 1 t, * s 1 -> * s 1, int64.

    Columns do not decrease along t.
    """
    lead = torch.broadcast_shapes(columns.shape[:-2], rows.shape[:-2])
    columns = columns.expand(*lead, 1, -1).squeeze(-2).contiguous()
    rows = rows.expand(*lead, -1, 1).squeeze(-1).contiguous()
    return torch.searchsorted(columns, rows, right=inclusive).unsqueeze(-1)


COUNT_BELOW = torch.ops.autopar.count_below.default
