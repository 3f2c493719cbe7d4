"""Scores of attention in blocks of rows, so that no [s, t] tensor exists as a whole.

    S = q kᵀ · scale, masked        [s, t] per head
    W = softmax(S),  D = W or what dropout leaves of it
    out = D v

Forward keeps L = logsumexp(S) per row. Backward computes each block again (Dao et al.:
"FlashAttention", 2022, without its blocks of keys):

    W = exp(S - L),  dv = Dᵀ dout,  dD = dout vᵀ,  dW = dD where it was kept
    dS = W (dW - rowsum(dout · out))
    dq = dS k · scale,  dk = dSᵀ q · scale

Dropout is linear, so rowsum(dW · W) = rowsum(dD · D) = rowsum(dout · out). Every block has the
dtypes and roundings of the same computation by separate operators: matmuls in the dtype of q,
softmax in `working_dtype`. Tensors have these shapes:

    q [b, n, g, s, e]   k [b, n, t, e]   v [b, n, t, f]   g query heads share a key head
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.precision import working_dtype

# Scores per block. On a CPU larger blocks leave the last cache, and smaller ones pay for the calls
# of some twenty operators: 2^18 to 2^20 took the least time, 2^15 and 2^22 up to twice as long (one
# core; 4 x 12 heads of 512 rows and 64 features). A GPU needs larger ones (`random.py`).
_BLOCK_ON_CPU = 1 << 20
_BLOCK_ON_GPU = 1 << 22
# Rows per block: with fewer, a causal block leaves out more keys, and matmuls are smaller. 128 took
# 0.8 of the time of 256 if causal, and as much if not.
_ROWS = 128


@dataclass(frozen=True)
class Block:
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

    def part(self, mask: Tensor) -> Tensor:
        """Its part of [b, n, g, s, t]; dims over which it broadcasts have size 1."""
        index = (self.batch, self.heads, slice(None), self.rows, self.columns)
        sizes = zip(mask.shape, index, strict=True)
        return mask[tuple(slice(None) if n == 1 else part for n, part in sizes)]

    def join_groups(self, x: Tensor) -> Tensor:
        """The block of [b, n, g, s, e] as [b, n, g s, e]: rows of one matmul."""
        return x[self.queries].flatten(2, 3)

    def split_groups(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.n_groups, -1))


class Scores(ABC):
    """The masked scores of one call, block by block."""

    def __init__(
        self, query: Tensor, key: Tensor, scale: float, is_masked: bool, share: float = 1.0
    ) -> None:
        """`share` of all keys are seen by a row, on average."""
        self.query, self.key, self.scale, self.is_masked = query, key, scale, is_masked
        self.share = share

    @abstractmethod
    def keys(self, rows: slice) -> slice:
        """Keys outside of these are hidden from all these rows."""

    @abstractmethod
    def hide(self, scores: Tensor, block: Block) -> Tensor:
        """A block's scores [b, n, g s, t] under the mask; may write to them."""

    def draw(self, block: Block) -> Tensor | None:
        """Which weights of a block dropout keeps; None: all."""
        return None

    def drop(self, x: Tensor, kept: Tensor | None) -> Tensor:
        """`x` with dropout; may write to it."""
        return x

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """(out [b, n, g, s, f], L [b, n, g, s]); L is infinite for a row that sees no key."""
        out, lse = empty_results(self.query, value)
        for block in self.blocks():
            own, sums = self._results(block, value)
            out[block.queries] = block.split_groups(own)
            lse[block.queries] = block.split_groups(sums)[..., 0]
            del own, sums  # else they would still be there with the next block's
        return out, lse

    def backward(
        self, gradient: Tensor, out: Tensor, lse: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value."""
        query, key = self.query, self.key
        of_query = torch.empty_like(query)
        # Blocks of rows add to these, so they have the dtype in which sums are exact enough.
        working = working_dtype(query.dtype)
        of_key, of_value = (torch.zeros_like(x, dtype=working) for x in (key, value))
        for block in self.blocks():
            upstream = block.join_groups(gradient)
            sums = (upstream.to(working) * block.join_groups(out)).sum(-1, keepdim=True)
            of_scores, own = self._gradients(block, value, lse, upstream, sums)
            of_value[block.keys] += own
            of_rows = (of_scores @ key[block.keys]).mul_(self.scale)
            of_query[block.queries] = block.split_groups(of_rows)
            of_key[block.keys] += of_scores.mT @ (block.join_groups(query) * self.scale)
            del of_scores, of_rows, own
        return of_query, of_key.to(query.dtype), of_value.to(query.dtype)

    def blocks(self) -> Iterator[Block]:
        """All blocks; those of one head in order, so that sums over rows are always the same."""
        n_batch, n_heads, n_groups, n_rows, _ = self.query.shape
        n_keys = seen_keys(self.key.shape[-2], self.share)
        batch, heads, rows = block_sizes(self.query.shape, n_keys, self.query.is_cpu)
        for b in range(0, n_batch, batch):
            for h in range(0, n_heads, heads):
                for r in range(0, n_rows, rows):
                    own = slice(r, min(r + rows, n_rows))
                    parts = slice(b, b + batch), slice(h, h + heads)
                    yield Block(*parts, own, self.keys(own), n_groups)

    def _results(self, block: Block, value: Tensor) -> tuple[Tensor, Tensor]:
        """A block's rows of `out` [b, n, g s, f], and of L [b, n, g s, 1]."""
        raw = self._of(block)
        weights = torch._safe_softmax(raw, -1) if self.is_masked else raw.softmax(-1)
        largest = weights.amax(-1, keepdim=True)
        # The largest weight is exp(largest score - L).
        sums = torch.where(largest == 0, math.inf, raw.amax(-1, keepdim=True) - largest.log())
        del raw
        weights = weights.to(self.query.dtype)
        return self.drop(weights, self.draw(block)) @ value[block.keys], sums

    def _gradients(
        self, block: Block, value: Tensor, lse: Tensor, upstream: Tensor, sums: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Of a block's scores, and its summand of the values' gradient.

        `upstream` is the gradient of its rows, `sums` rowsum(dout · out).
        """
        weights = self._of(block).sub_(block.join_groups(lse[..., None])).exp_()
        kept = self.draw(block)
        dropped = self.drop(weights.to(self.query.dtype, copy=True), kept)
        of_value = dropped.mT @ upstream
        del dropped
        of_weights = self.drop(upstream @ value[block.keys].mT, kept)
        of_scores = weights.mul_(of_weights.to(sums.dtype).sub_(sums))
        return of_scores.to(self.query.dtype), of_value

    def _of(self, block: Block) -> Tensor:
        """The scores of a block: [b, n, g s, t]."""
        scores = (block.join_groups(self.query) * self.scale) @ self.key[block.keys].mT
        return self.hide(scores.to(working_dtype(self.query.dtype)), block)


def seen_keys(n_keys: int, share: float) -> int:
    """How many keys a row sees, on average."""
    return max(math.ceil(n_keys * share), 1)


def block_sizes(query: Sequence[int], n_keys: int, on_cpu: bool = False) -> tuple[int, int, int]:
    """(batch, heads, rows) of a block of few scores, if a row has no more."""
    size = _BLOCK_ON_CPU if on_cpu else _BLOCK_ON_GPU
    _, n_heads, n_groups, n_rows, _ = query
    per_row = max(n_groups * n_keys, 1)
    rows = max(min(n_rows, _ROWS, size // per_row), 1)
    pairs = max(size // (per_row * rows), 1)
    return max(pairs // max(n_heads, 1), 1), max(min(pairs, n_heads), 1), rows


def empty_results(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """`out` has the rows outside the heads, so that joining heads needs no copy."""
    b, n, g, s, _ = query.shape
    out = query.new_empty(b, s, n, g, value.shape[-1]).permute(0, 2, 3, 1, 4)
    return out, query.new_empty(b, n, g, s, dtype=working_dtype(query.dtype))


def empty_gradients(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Fake gradients of query, key and value."""
    keys, values = (torch.empty_like(x, dtype=query.dtype) for x in (key, value))
    return torch.empty_like(query), keys, values


def lead_of(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[Sequence[int], int]:
    """(dims of the result before its rows, heads of keys)."""
    dims = [x.shape[: -3 if enable_gqa else -2] for x in (query, key, value)]
    lead = (*torch.broadcast_shapes(*dims), *([query.shape[-3]] if enable_gqa else []))
    n_heads = lead[-1] if lead else 1
    return lead, key.shape[-3] if enable_gqa else n_heads


def split_heads(
    query: Tensor, key: Tensor, value: Tensor, lead: Sequence[int], shared: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value in the shapes of this file, as views where they do not broadcast."""
    n_heads = lead[-1] if lead else 1

    def canonical(x: Tensor, *heads: int) -> Tensor:
        x = x.expand(*lead[:-1], *([math.prod(heads)] if lead else []), *x.shape[-2:])
        return x.reshape(math.prod(lead[:-1]), *heads, *x.shape[-2:])

    q = canonical(query, shared, n_heads // shared)
    return q, canonical(key, shared), canonical(value, shared)


def mask_view(mask: Tensor, lead: Sequence[int], shared: int) -> Tensor:
    """The mask as [b, n, g, s, t]; dims over which it broadcasts have size 1."""
    mask = mask.reshape(*([1] * (max(len(lead), 1) + 2 - mask.dim())), *mask.shape)
    if len(lead) > 2 and math.prod(mask.shape[:-3]) > 1:
        mask = mask.expand(*lead[:-1], *mask.shape[-3:])
    heads = mask.shape[-3]
    groups = (1, 1) if heads == 1 else (shared, heads // shared)
    return mask.reshape(math.prod(mask.shape[:-3]), *groups, *mask.shape[-2:])
