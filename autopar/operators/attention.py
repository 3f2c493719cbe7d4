"""Attention with dropout of its weights, in blocks, with dropout by position (`random.py`).

    S = q kᵀ · scale + mask         [s, t] per head
    W = softmax(S),  D = dropout(W)
    out = D v

Forward and backward compute this for one block of rows at a time, so no [s, t] tensor exists as a
whole. Backward keeps q, k, v, the mask, out and L = logsumexp(S) per row, and computes each block
again (Dao et al.: "FlashAttention", 2022, without its blocks of keys):

    W = exp(S - L),  dv = Dᵀ dout,  dD = dout vᵀ,  dW = dropout(dD)
    dS = W (dW - rowsum(dout · out))
    dq = dS k · scale,  dk = dSᵀ q · scale

dropout is linear, so rowsum(dW · W) = rowsum(dD · D) = rowsum(dout · out). Every block has the
dtypes and roundings of the same computation by separate operators: matmuls in the dtype of q,
softmax in `working_dtype`.

Rows of a causal query are compared with keys by position, so a rank may hold any of the rows. If it
holds all of them, keys after a block's last row are left out.

`attention_dropout` is what a program calls. It brings all tensors to the shapes below, with views,
and calls an operator with these shapes; recompute keeps that one's results:

    q [b, n, g, s, e]   k [b, n, t, e]   v [b, n, t, f]   g query heads share a key head
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.operators.random import element_keys, kept_elements
from autopar.precision import working_dtype

# Scores per block. On a CPU larger blocks leave the last cache, and smaller ones pay for the calls
# of some twenty operators: 2^18 to 2^20 took the least time, 2^15 and 2^22 up to twice as long (one
# core; 4 x 12 heads of 512 rows and 64 features). A GPU needs larger ones (`random.py`).
_BLOCK_ON_CPU = 1 << 20
_BLOCK_ON_GPU = 1 << 22
# Rows per block: with fewer, a causal block leaves out more keys, and matmuls are smaller. 128 took
# 0.8 of the time of 256 if causal, and as much if not.
_ROWS = 128

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
    n_heads = lead[-1] if lead else 1
    shared = key.shape[-3] if enable_gqa else n_heads
    batch = math.prod(lead[:-1])

    def canonical(x: Tensor, *heads: int) -> Tensor:
        x = x.expand(*lead[:-1], *([math.prod(heads)] if lead else []), *x.shape[-2:])
        return x.reshape(batch, *heads, *x.shape[-2:])

    q = canonical(query, shared, n_heads // shared)
    k, v = canonical(key, shared), canonical(value, shared)
    mask = None if attn_mask is None else _mask_view(attn_mask, lead, shared)
    out, _ = torch.ops.autopar.attention_dropout_forward(
        q, k, v, mask, seed, positions, p, occurrence, is_causal, n_queries, scale
    )
    result: Tensor = out.reshape(*lead, *out.shape[-2:])
    return result


def _mask_view(mask: Tensor, lead: Sequence[int], shared: int) -> Tensor:
    """The mask as [b, n, g, s, t]; dims over which it broadcasts have size 1."""
    mask = mask.reshape(*([1] * (max(len(lead), 1) + 2 - mask.dim())), *mask.shape)
    if len(lead) > 2 and math.prod(mask.shape[:-3]) > 1:
        mask = mask.expand(*lead[:-1], *mask.shape[-3:])
    heads = mask.shape[-3]
    groups = (1, 1) if heads == 1 else (shared, heads // shared)
    return mask.reshape(math.prod(mask.shape[:-3]), *groups, *mask.shape[-2:])


@torch.library.custom_op("autopar::attention_dropout_forward", mutates_args=())
def attention_dropout_forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, seed: Tensor,
    positions: list[Tensor], p: float, occurrence: int, is_causal: bool, n_queries: int,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out [b, n, g, s, f], L [b, n, g, s]); L is infinite for a row that sees no key."""
    out, lse = _results(query, value)
    scores = _Scores(query, key, mask, seed, positions, p, occurrence, is_causal, n_queries, scale)
    for block in scores.blocks():
        own, sums = scores.results(block, value)
        out[block.queries] = block.split(own)
        lse[block.queries] = block.split(sums)[..., 0]
    return out, lse


@torch.library.custom_op("autopar::attention_dropout_backward", mutates_args=())
def attention_dropout_backward(
    gradient: Tensor, out: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor,
    mask: Tensor | None, seed: Tensor, positions: list[Tensor], p: float, occurrence: int,
    is_causal: bool, n_queries: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key and value."""
    of_query = torch.empty_like(query)
    # Blocks of rows add to these, so they have the dtype in which sums are exact enough.
    working = working_dtype(query.dtype)
    of_key, of_value = (torch.zeros_like(x, dtype=working) for x in (key, value))
    scores = _Scores(query, key, mask, seed, positions, p, occurrence, is_causal, n_queries, scale)
    for block in scores.blocks():
        upstream = block.joined(gradient)
        sums = (upstream.to(working) * block.joined(out)).sum(-1, keepdim=True)
        of_scores, own = scores.gradients(block, value, lse, upstream, sums)
        of_value[block.keys] += own
        of_query[block.queries] = block.split((of_scores @ key[block.keys]).mul_(scale))
        of_key[block.keys] += of_scores.mT @ (block.joined(query) * scale)
        del of_scores  # else it would still be there with the next block's
    return of_query, of_key.to(query.dtype), of_value.to(query.dtype)


@dataclass(frozen=True)
class _Block:
    """Some rows of some heads, with the keys that they see.

    `queries` selects from [b, n, g, s, ...], `keys` from [b, n, t, ...].
    """

    batch: slice
    heads: slice
    rows: slice
    columns: slice
    n_groups: int

    @property
    def queries(self) -> tuple[slice, ...]:
        return (self.batch, self.heads, slice(None), self.rows)

    @property
    def keys(self) -> tuple[slice, ...]:
        return (self.batch, self.heads, self.columns)

    def joined(self, x: Tensor) -> Tensor:
        """The block of [b, n, g, s, e] as [b, n, g s, e]: rows of one matmul."""
        return x[self.queries].flatten(2, 3)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.n_groups, -1))


class _Scores:
    """The masked scores of one call and its dropout, block by block."""

    def __init__(
        self, query: Tensor, key: Tensor, mask: Tensor | None, seed: Tensor,
        positions: Sequence[Tensor], p: float, occurrence: int, is_causal: bool, n_queries: int,
        scale: float,
    ) -> None:  # fmt: skip
        self.query, self.key, self.mask = query, key, mask
        self.p, self.is_causal, self.scale = p, is_causal, scale
        self.is_masked = is_causal or mask is not None
        self.row_of, self.column_of = positions[-2:]
        rows, self._columns = element_keys(seed, positions, occurrence, query.device)
        self._rows = rows.view(query.shape[:-1])
        self._has_all_rows = query.shape[-2] == n_queries

    def blocks(self) -> Iterator[_Block]:
        """All blocks; those of one head in order, so that sums over rows are always the same."""
        n_batch, n_heads, n_groups, n_rows, _ = self.query.shape
        n_keys = self.key.shape[-2]
        size = _BLOCK_ON_CPU if self.query.device.type == "cpu" else _BLOCK_ON_GPU
        batch, heads, rows = _block_sizes(self.query.shape, n_keys, size)
        for b in range(0, n_batch, batch):
            for h in range(0, n_heads, heads):
                for r in range(0, n_rows, rows):
                    last = min(r + rows, n_rows)
                    seen = min(last, n_keys) if self.is_causal and self._has_all_rows else n_keys
                    yield _Block(
                        slice(b, b + batch), slice(h, h + heads), slice(r, last), slice(0, seen),
                        n_groups,
                    )  # fmt: skip

    def results(self, block: _Block, value: Tensor) -> tuple[Tensor, Tensor]:
        """A block's rows of `out` [b, n, g s, f], and of L [b, n, g s, 1]."""
        raw = self.of(block)
        weights = torch._safe_softmax(raw, -1) if self.is_masked else raw.softmax(-1)
        largest = weights.amax(-1, keepdim=True)
        # The largest weight is exp(largest score - L).
        sums = torch.where(largest == 0, math.inf, raw.amax(-1, keepdim=True) - largest.log())
        del raw
        weights = weights.to(self.query.dtype)
        return self.dropped(weights, self.kept(block)) @ value[block.keys], sums

    def gradients(
        self, block: _Block, value: Tensor, lse: Tensor, upstream: Tensor, sums: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Of a block's scores, and its summand of the values' gradient.

        `upstream` is the gradient of its rows, `sums` rowsum(dout · out).
        """
        weights = self.of(block).sub_(block.joined(lse[..., None])).exp_()
        kept = self.kept(block)
        dropped = self.dropped(weights.to(self.query.dtype, copy=True), kept)
        of_value = dropped.mT @ upstream
        del dropped
        of_weights = self.dropped(upstream @ value[block.keys].mT, kept)
        of_scores = weights.mul_(of_weights.to(sums.dtype).sub_(sums))
        return of_scores.to(self.query.dtype), of_value

    def of(self, block: _Block) -> Tensor:
        """The scores of a block: [b, n, g s, t]."""
        scores = (block.joined(self.query) * self.scale) @ self.key[block.keys].mT
        scores = scores.to(working_dtype(self.query.dtype))
        if self.is_causal:
            after = self.column_of[block.columns] > self.row_of[block.rows, None]
            block.split(scores).masked_fill_(after, -math.inf)
        if self.mask is None:
            return scores
        index = (block.batch, block.heads, slice(None), block.rows, block.columns)
        sizes = zip(self.mask.shape, index, strict=True)
        mask = self.mask[tuple(slice(None) if n == 1 else part for n, part in sizes)]
        if mask.dtype == torch.bool:
            block.split(scores).masked_fill_(mask.logical_not(), -math.inf)
            return scores
        return (block.split(scores) + mask).flatten(2, 3)

    def kept(self, block: _Block) -> Tensor:
        """Which weights of a block dropout keeps: flags [b, n, g s, t]."""
        rows = self._rows[block.queries]
        flags = kept_elements(rows.flatten(), self._columns[block.columns], self.p)
        return flags.view(*rows.shape[:2], -1, flags.shape[-1])

    def dropped(self, x: Tensor, kept: Tensor) -> Tensor:
        """`x`, dropped in place and rounded as by `dropout`."""
        return x.mul_(kept).mul_(1 / (1 - self.p))


def _block_sizes(query: Sequence[int], n_keys: int, size: int) -> tuple[int, int, int]:
    """(batch, heads, rows) of a block of at most `size` scores, if a row has no more."""
    _, n_heads, n_groups, n_rows, _ = query
    per_row = max(n_groups * n_keys, 1)
    rows = max(min(n_rows, _ROWS, size // per_row), 1)
    pairs = max(size // (per_row * rows), 1)
    return max(pairs // max(n_heads, 1), 1), max(min(pairs, n_heads), 1), rows


def _results(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """`out` has the rows outside the heads, so that joining heads needs no copy."""
    b, n, g, s, _ = query.shape
    out = query.new_empty(b, s, n, g, value.shape[-1]).permute(0, 2, 3, 1, 4)
    return out, query.new_empty(b, n, g, s, dtype=working_dtype(query.dtype))


@attention_dropout_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _results(query, value)


@attention_dropout_backward.register_fake
def _(
    gradient: Tensor, out: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(query),
        torch.empty_like(key, dtype=query.dtype),
        torch.empty_like(value, dtype=query.dtype),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, mask, seed, positions, *ctx.options = inputs
    ctx.has_mask = mask is not None
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(
        *output, query, key, value, *([mask] if ctx.has_mask else []), seed, *positions
    )


def workspace_bytes(operator: Any, args: Sequence[Any]) -> int:
    """Bytes of temporaries inside a call of one of this file's kernels; 0 for other operators.

    They are those on a GPU, where blocks are larger: programs are traced on the CPU for any device.
    """
    if operator is _FORWARD:
        query, key, value = args[:3]
    elif operator is _BACKWARD:
        query, key, value = args[3:6]
    else:
        return 0
    item, width = query.dtype.itemsize, working_dtype(query.dtype).itemsize
    n_batch, n_heads, n_groups, n_rows, _ = query.shape
    batch, heads, rows = _block_sizes(query.shape, key.shape[-2], _BLOCK_ON_GPU)
    n_scores = min(batch, n_batch) * heads * n_groups * rows * key.shape[-2]
    # At its peak a block draws: it has bits twice, flags, and its weights.
    drawn = 17 * n_scores + 8 * n_batch * n_heads * n_groups * n_rows
    if operator is _FORWARD:
        return int(drawn + item * n_scores)
    sums = 0 if item == width else width * (key.numel() + value.numel())
    return int(drawn + width * n_scores + sums)


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
_FORWARD = torch.ops.autopar.attention_dropout_forward.default
_BACKWARD = torch.ops.autopar.attention_dropout_backward.default
# Recompute that keeps the result of attention keeps this kernel's.
ATTENTION_DROPOUT_KERNEL = torch.ops.autopar.attention_dropout_forward
