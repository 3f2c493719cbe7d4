"""Attention with dropout of its weights, in blocks, with dropout by position (`random.py`).

    S = q kᵀ · scale + mask         [s, t] per head
    W = softmax(S),  D = dropout(W)
    out = D v

Forward and backward compute this for one block of rows at a time (`scores.py`).

Rows of a causal query are compared with keys by position, so a rank may hold any of the rows. If it
holds all of them, keys after a block's last row are left out.

`attention_dropout` is what a program calls. It brings all tensors to the shapes below, with views,
and calls an operator with these shapes; recompute keeps that one's results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.operators.random import element_keys, kept_elements
from autopar.operators.scores import (
    Block,
    Scores,
    block_sizes,
    empty_gradients,
    empty_results,
    mask_view,
    split_heads,
)
from autopar.operators.workspace import add_workspace
from autopar.precision import working_dtype

_SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor seed, Tensor[] positions, "
    "float p, int occurrence, bool is_causal, int n_queries, float scale, bool enable_gqa) "
    "-> Tensor"
)
torch.library.define("autopar::attention_dropout", _SCHEMA)


@torch.library.impl("autopar::attention_dropout", "CompositeImplicitAutograd")
def attention_dropout(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, seed: Tensor,
    positions: list[Tensor], p: float, occurrence: int, is_causal: bool, n_queries: int,
    scale: float, enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """`scaled_dot_product_attention` with dropout: * s e, * t e, * t f -> * s f.

    `positions` has one vector per dim of the weights [*, s, t]. `n_queries` is the number of rows
    of all ranks. The mask must not require grad.
    """
    lead = [len(vector) for vector in positions[:-2]]
    shared = key.shape[-3] if enable_gqa else (lead[-1] if lead else 1)
    q, k, v = split_heads(query, key, value, lead, shared)
    mask = None if attn_mask is None else mask_view(attn_mask, lead, shared)
    out, _ = torch.ops.autopar.attention_dropout_forward(
        q, k, v, mask, seed, positions, p, occurrence, is_causal, n_queries, scale
    )
    result: Tensor = out.reshape(*lead, *out.shape[-2:])
    return result


@torch.library.custom_op("autopar::attention_dropout_forward", mutates_args=())
def attention_dropout_forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, seed: Tensor,
    positions: list[Tensor], p: float, occurrence: int, is_causal: bool, n_queries: int,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out [b, n, g, s, f], L [b, n, g, s]); L is infinite for a row that sees no key."""
    scores = _Dropout(query, key, mask, seed, positions, p, occurrence, is_causal, n_queries, scale)
    return scores.forward(value)


@torch.library.custom_op("autopar::attention_dropout_backward", mutates_args=())
def attention_dropout_backward(
    gradient: Tensor, out: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor,
    mask: Tensor | None, seed: Tensor, positions: list[Tensor], p: float, occurrence: int,
    is_causal: bool, n_queries: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key and value."""
    scores = _Dropout(query, key, mask, seed, positions, p, occurrence, is_causal, n_queries, scale)
    return scores.backward(gradient, out, lse, value)


class _Dropout(Scores):
    """Scores of which dropout leaves some."""

    def __init__(
        self, query: Tensor, key: Tensor, mask: Tensor | None, seed: Tensor,
        positions: Sequence[Tensor], p: float, occurrence: int, is_causal: bool, n_queries: int,
        scale: float,
    ) -> None:  # fmt: skip
        super().__init__(query, key, scale, is_causal or mask is not None)
        self.mask, self.p, self.is_causal = mask, p, is_causal
        self.row_of, self.column_of = positions[-2:]
        rows, self._columns = element_keys(seed, positions, occurrence, query.device)
        self._rows = rows.view(query.shape[:-1])
        self._has_all_rows = query.shape[-2] == n_queries

    def keys(self, rows: slice) -> slice:
        n_keys = self.key.shape[-2]
        seen = min(rows.stop, n_keys) if self.is_causal and self._has_all_rows else n_keys
        return slice(0, seen)

    def hide(self, scores: Tensor, block: Block) -> Tensor:
        if self.is_causal:
            after = self.column_of[block.columns] > self.row_of[block.rows, None]
            block.split_groups(scores).masked_fill_(after, -math.inf)
        if self.mask is None:
            return scores
        mask = block.part(self.mask)
        if mask.dtype == torch.bool:
            block.split_groups(scores).masked_fill_(mask.logical_not(), -math.inf)
            return scores
        return (block.split_groups(scores) + mask).flatten(2, 3)

    def draw(self, block: Block) -> Tensor | None:
        if self.p == 0:
            return None
        rows = self._rows[block.queries]
        flags = kept_elements(rows.flatten(), self._columns[block.columns], self.p)
        return flags.view(*rows.shape[:2], -1, flags.shape[-1])

    def drop(self, x: Tensor, kept: Tensor | None) -> Tensor:
        """Rounded as by `dropout`."""
        return x if kept is None else x.mul_(kept).mul_(1 / (1 - self.p))


@attention_dropout_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_results(query, value)


@attention_dropout_backward.register_fake
def _(
    gradient: Tensor, out: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return empty_gradients(query, key, value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, mask, seed, positions, *ctx.options = inputs
    ctx.has_mask = mask is not None
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(
        *output, query, key, value, *([mask] if ctx.has_mask else []), seed, *positions
    )


def _workspace(tensors: Sequence[Tensor], is_forward: bool) -> int:
    """At its peak a block draws: it has bits twice, flags, and its weights."""
    query, key, value = tensors
    item, width = query.dtype.itemsize, working_dtype(query.dtype).itemsize
    n_batch, n_heads, n_groups, n_rows, _ = query.shape
    batch, heads, rows = block_sizes(query.shape, key.shape[-2])
    n_scores = min(batch, n_batch) * heads * n_groups * rows * key.shape[-2]
    drawn = 17 * n_scores + 8 * n_batch * n_heads * n_groups * n_rows
    if is_forward:
        return drawn + item * n_scores
    sums = 0 if item == width else width * (key.numel() + value.numel())
    return drawn + width * n_scores + sums


def _backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    out, lse, query, key, value, *rest = ctx.saved_tensors
    mask = rest.pop(0) if ctx.has_mask else None
    seed, *positions = rest
    gradients = torch.ops.autopar.attention_dropout_backward(
        gradient, out, lse, query, key, value, mask, seed, positions, *ctx.options
    )
    return *gradients, None, None, [None] * len(positions), *[None] * len(ctx.options)


attention_dropout_forward.register_autograd(_backward, setup_context=_keep)

ATTENTION_DROPOUT = torch.ops.autopar.attention_dropout.default
add_workspace(
    attention_dropout_forward._opoverload, lambda args: _workspace(args[:3], is_forward=True)
)
add_workspace(
    attention_dropout_backward._opoverload, lambda args: _workspace(args[3:6], is_forward=False)
)
