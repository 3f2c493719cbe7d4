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

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.precision import working_dtype
from autopar.runtime.groups import Group
from autopar.runtime.lowered.lowered import Kept, Lowered


def localised(ids: Tensor, n_local: int, n_valid: int, g: Group) -> tuple[Tensor, Tensor]:
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


def local_padding(padding_idx: int, n_local: int, g: Group) -> int:
    """`padding_idx` as a local row number; -1 if there is none, or another rank has it."""
    padding = padding_idx - g.rank * n_local
    return padding if padding_idx >= 0 and 0 <= padding < n_local else -1


def _embedding(
    weight_local: Tensor, ids: Tensor, g: Group, padding_idx: int = -1, n_valid: int | None = None
) -> tuple[Tensor, Kept]:
    """Rows of the table at `ids`, as a Partial: v h, * -> * h.

    `ids` and `padding_idx` count over the whole vocabulary. Rows at `padding_idx` get no
    gradient, as in `aten.embedding` (-1: none). Rows from `n_valid` on are padding.
    """
    n_local = weight_local.shape[0]
    n_valid = n_local * g.size if n_valid is None else n_valid
    local, others = localised(ids, n_local, n_valid, g)
    padding = local_padding(padding_idx, n_local, g)
    rows = torch.ops.aten.embedding.default(weight_local, local, padding)
    return rows.masked_fill(others.unsqueeze(-1), 0), (local, others, n_local, padding)


def _embedding_backward(
    kept: Kept, inputs: Sequence[Tensor], gradients: Sequence[Tensor], wanted: Sequence[bool]
) -> tuple[Tensor | None, None]:
    local, others, n_local, padding = kept
    rows = gradients[0].masked_fill(others.unsqueeze(-1), 0)
    backward = torch.ops.aten.embedding_dense_backward.default
    return (backward(rows, local, n_local, padding, False) if wanted[0] else None), None


def _cross_entropy(
    logits_local: Tensor,
    labels: Tensor,
    g: Group,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    n_valid: int | None = None,
) -> tuple[Tensor, Kept]:
    """The sum of the rows' losses, Invariant: n v, n -> scalar.

    Rows whose label is `ignore_index` count 0. Half-precision logits are computed in float32;
    the result has the logits' dtype, as in `aten.cross_entropy_loss`. Columns from `n_valid` on
    are padding.
    """
    n_local = logits_local.shape[1]
    n_valid = n_local * g.size if n_valid is None else n_valid
    counted = labels != ignore_index
    # Ignored labels become label 0, so that only invalid labels are out of range.
    local, others = localised(labels.where(counted, 0), n_local, n_valid, g)
    local = local.unsqueeze(1)

    n_own = min(max(n_valid - g.rank * n_local, 0), n_local)
    wide = logits_local.to(working_dtype(logits_local.dtype))
    z = wide[:, :n_own]
    # A rank may hold only padding.
    highest = z.amax(dim=1) if n_own else wide.new_full((len(wide),), -torch.inf)
    peak = g.all_reduce(highest, op="max")
    lse = peak + g.all_reduce((z - peak.unsqueeze(1)).exp().sum(dim=1)).log()
    picked = wide.gather(1, local).squeeze(1).masked_fill(others, 0) * (1 - label_smoothing)
    if label_smoothing:
        picked = picked + z.sum(dim=1) * (label_smoothing / n_valid)
    losses = lse - g.all_reduce(picked)
    loss = losses.masked_fill(~counted, 0).sum().to(logits_local.dtype)
    return loss, (lse, local, others, counted, label_smoothing, n_valid, n_own)


def _cross_entropy_backward(
    kept: Kept, inputs: Sequence[Tensor], gradients: Sequence[Tensor], wanted: Sequence[bool]
) -> tuple[Tensor | None, None]:
    if not wanted[0]:
        return None, None
    (logits,) = inputs
    lse, local, others, counted, smoothing, n_valid, n_own = kept
    out = (logits.to(lse.dtype) - lse.unsqueeze(1)).exp_()
    hit = (~others).to(out.dtype).unsqueeze(1) * (1 - smoothing)
    out.scatter_add_(1, local, -hit)
    if smoothing:
        out.sub_(smoothing / n_valid)
    out.mul_(gradients[0].to(out.dtype)).masked_fill_(~counted.unsqueeze(1), 0)
    out[:, n_own:] = 0
    return out.to(logits.dtype), None


vocab_parallel_embedding = Lowered(_embedding, _embedding_backward)
vocab_parallel_cross_entropy = Lowered(_cross_entropy, _cross_entropy_backward, keeps=(0,))
