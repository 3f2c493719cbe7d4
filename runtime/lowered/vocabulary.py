"""Embedding and cross-entropy over a vocabulary that is sharded contiguously on a group.

Rank r of n holds rows (embedding) or columns (logits) [r·v, (r+1)·v) of V = n·v.

Embedding (`vocab_parallel_embedding`). Ids of other ranks give rows of zeros. The sum over ranks
is the embedding: a Partial, without communication. The gradient of the result is Replicate, so
each rank sees all of it and uses the part for its own rows.

Cross-entropy (`vocab_parallel_cross_entropy`). For a row of logits z with label y,

    loss = lse(z) − (1−ε)·z_y − ε/V·Σ_j z_j,    lse(z) = m + log Σ_j exp(z_j − m),  m = max_j z_j

where ε is the label smoothing. Three all_reduces of one number per row compute m (a maximum),
Σ exp, and (1−ε)·z_y + ε/V·Σ z. The logits are never gathered, and the backward is local:

    ∂loss/∂z_j = exp(z_j − lse) − (1−ε)·[j = y] − ε/V

This is Megatron-LM's vocabulary-parallel cross-entropy (Shoeybi et al., arXiv:1909.08053), with
an exact label smoothing term.

Rows and columns from `n_valid` on are padding, on the last ranks. V and the sums exclude them,
and their gradient is 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.precision import working_dtype
from autopar.runtime.groups import Group


def _localised(ids: Tensor, n_local: int, n_valid: int, g: Group) -> tuple[Tensor, Tensor]:
    """(ids as local row numbers, which ids belong to other ranks); the latter become row 0.

    Ids outside the vocabulary, or in its padding, are out of range on every rank. So the
    indexing operator fails as it does unsharded.
    """
    start = g.rank * n_local
    mine = (ids >= start) & (ids < start + n_local)
    others = (ids >= 0) & (ids < n_valid) & ~mine
    local = (ids - start).masked_fill(others, 0)
    if n_valid < g.size * n_local:
        local = local.masked_fill(ids >= n_valid, n_local)
    return local, others


def vocab_parallel_embedding(
    weight_local: Tensor, ids: Tensor, g: Group, padding_idx: int = -1, n_valid: int | None = None
) -> Tensor:
    """Rows of the table at `ids`, as a Partial: v h, * -> * h.

    `ids` and `padding_idx` count over the whole vocabulary. Rows at `padding_idx` get no
    gradient, as in `aten.embedding` (-1: none). Rows from `n_valid` on are padding.
    """
    n_local = weight_local.shape[0]
    n_valid = n_local * g.size if n_valid is None else n_valid
    local, others = _localised(ids, n_local, n_valid, g)
    padding = padding_idx - g.rank * n_local
    if padding_idx < 0 or not 0 <= padding < n_local:
        padding = -1
    rows = torch.ops.aten.embedding.default(weight_local, local, padding)
    out: Tensor = rows.masked_fill(others.unsqueeze(-1), 0)
    return out


def vocab_parallel_cross_entropy(
    logits_local: Tensor,
    labels: Tensor,
    g: Group,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    n_valid: int | None = None,
) -> Tensor:
    """The sum of the rows' losses, Invariant: n v, n -> scalar.

    Rows whose label is `ignore_index` count 0. Half-precision logits are computed in float32;
    the result has the logits' dtype, as in `aten.cross_entropy_loss`. Columns from `n_valid` on
    are padding.
    """
    n_valid = logits_local.shape[1] * g.size if n_valid is None else n_valid
    loss: Tensor = _VocabParallelCrossEntropy.apply(
        logits_local, labels, g, ignore_index, label_smoothing, n_valid
    )
    return loss


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        g: Group,
        ignore_index: int,
        smoothing: float,
        n_valid: int,
    ) -> Tensor:
        n_local = logits.shape[1]
        counted = labels != ignore_index
        # Ignored labels become label 0, so that only invalid labels are out of range.
        local, others = _localised(labels.where(counted, 0), n_local, n_valid, g)
        local = local.unsqueeze(1)

        n_own = min(max(n_valid - g.rank * n_local, 0), n_local)
        wide = logits.to(working_dtype(logits.dtype))
        z = wide[:, :n_own]
        # A rank may hold only padding.
        highest = z.amax(dim=1) if n_own else wide.new_full((len(wide),), -torch.inf)
        peak = g.all_reduce(highest, op="max")
        lse = peak + g.all_reduce((z - peak.unsqueeze(1)).exp().sum(dim=1)).log()
        picked = wide.gather(1, local).squeeze(1).masked_fill(others, 0) * (1 - smoothing)
        if smoothing:
            picked = picked + z.sum(dim=1) * (smoothing / n_valid)
        losses = lse - g.all_reduce(picked)

        ctx.save_for_backward(logits, lse, local, others, counted)
        ctx.smoothing, ctx.n_valid, ctx.n_own = smoothing, n_valid, n_own
        return losses.masked_fill(~counted, 0).sum().to(logits.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        logits, lse, local, others, counted = ctx.saved_tensors
        out = (logits.to(lse.dtype) - lse.unsqueeze(1)).exp_()
        hit = (~others).to(out.dtype).unsqueeze(1) * (1 - ctx.smoothing)
        out.scatter_add_(1, local, -hit)
        if ctx.smoothing:
            out.sub_(ctx.smoothing / ctx.n_valid)
        out.mul_(gradient.to(out.dtype)).masked_fill_(~counted.unsqueeze(1), 0)
        out[:, ctx.n_own :] = 0
        return out.to(logits.dtype), None, None, None, None, None
