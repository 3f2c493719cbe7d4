"""Operators over a vocabulary sharded contiguously on a group: their inner collectives.

Rank r of n holds rows (embedding) or columns (logits) [r·v, (r+1)·v) of V = n·v.

Embedding (`vocab_parallel_embedding`). Ids of other ranks give zero rows, so the sum over
ranks is the embedding: a Partial result, without communication. Its gradient is Replicate,
so each rank sees the whole gradient and keeps that of its own rows.

Cross-entropy (`vocab_parallel_cross_entropy`). Of a row of logits z with label y,

    loss = lse(z) − (1−ε)·z_y − ε/V·Σ_j z_j,    lse(z) = m + log Σ_j exp(z_j − m),  m = max_j z_j

with ε the label smoothing. Three all_reduces of one number per row: m (a maximum),
Σ exp, and (1−ε)·z_y + ε/V·Σ z. The logits are never gathered, and the backward

    ∂loss/∂z_j = exp(z_j − lse) − (1−ε)·[j = y] − ε/V

is local. This is Megatron-LM's vocabulary-parallel cross-entropy (Shoeybi et al.,
arXiv:1909.08053), with its label smoothing term made exact.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.runtime.groups import Group


def _localised(ids: Tensor, n_local: int, g: Group) -> tuple[Tensor, Tensor]:
    """Ids as local rows, and which of them are another rank's (those become 0).

    Ids outside the whole vocabulary stay out of range, so that the operator that indexes
    with them fails as it does unsharded.
    """
    start = g.rank * n_local
    mine = (ids >= start) & (ids < start + n_local)
    others = (ids >= 0) & (ids < g.size * n_local) & ~mine
    return (ids - start).masked_fill(others, 0), others


def vocab_parallel_embedding(
    weight_local: Tensor, ids: Tensor, g: Group, padding_idx: int = -1
) -> Tensor:
    """Rows of the table at `ids`, as a Partial: v h, * -> * h.

    `ids` and `padding_idx` count in the whole vocabulary; rows at `padding_idx` take no
    gradient, as in `aten.embedding` (-1: none).
    """
    n_local = weight_local.shape[0]
    local, others = _localised(ids, n_local, g)
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
) -> Tensor:
    """The sum of the rows' losses, Invariant: n v, n -> scalar.

    Rows whose label is `ignore_index` count 0. Half-precision logits are computed in float32,
    and the result has the logits' dtype, as in `aten.cross_entropy_loss`.
    """
    loss: Tensor = _VocabParallelCrossEntropy.apply(
        logits_local, labels, g, ignore_index, label_smoothing
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
    ) -> Tensor:
        n_local = logits.shape[1]
        z = _widened(logits)
        counted = labels != ignore_index
        # Ignored labels look like label 0, so that only real mistakes are out of range.
        local, others = _localised(labels.where(counted, 0), n_local, g)
        local = local.unsqueeze(1)

        peak = g.all_reduce(z.amax(dim=1), op="max")
        lse = peak + g.all_reduce((z - peak.unsqueeze(1)).exp().sum(dim=1)).log()
        picked = z.gather(1, local).squeeze(1).masked_fill(others, 0) * (1 - smoothing)
        if smoothing:
            picked = picked + z.sum(dim=1) * (smoothing / (n_local * g.size))
        losses = lse - g.all_reduce(picked)

        ctx.save_for_backward(logits, lse, local, others, counted)
        ctx.smoothing, ctx.n_global = smoothing, n_local * g.size
        return losses.masked_fill(~counted, 0).sum().to(logits.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, lse, local, others, counted = ctx.saved_tensors
        out = (_widened(logits) - lse.unsqueeze(1)).exp_()
        hit = (~others).to(out.dtype).unsqueeze(1) * (1 - ctx.smoothing)
        out.scatter_add_(1, local, -hit)
        if ctx.smoothing:
            out.sub_(ctx.smoothing / ctx.n_global)
        out.mul_(gradient.to(out.dtype)).masked_fill_(~counted.unsqueeze(1), 0)
        return out.to(logits.dtype), None, None, None, None


def _widened(logits: Tensor) -> Tensor:
    half = logits.dtype in (torch.float16, torch.bfloat16)
    return logits.float() if half else logits
