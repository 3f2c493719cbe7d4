"""Batch norm over a batch that is sharded on a group, with statistics of the whole batch.

Rank r holds n of the N = p·n elements of every channel. It computes its mean m_r and its sum of
squared deviations M_r. One all_gather of both gives the statistics of the whole batch. This
avoids the cancellation of a difference of sums (Chan, Golub, LeVeque: "Updating formulae and a
pairwise algorithm for computing sample variances", 1979; here for equal n):

    m = mean_r m_r        M = Σ_r (M_r + n·(m_r − m)²)        y = w·x̂ + b,  x̂ = (x − m)·(M/N + ε)^−½

m and M depend on every element of the batch, so the gradient of x needs two sums over all ranks.
One all_reduce computes them. The gradients of w and b are Partial; each rank has its term:

    dx = w·(M/N + ε)^−½ · (dy − (Σ dy + x̂·Σ dy·x̂) / N)        dw = Σ_r dy·x̂        db = Σ_r dy

Half precision is computed in float32, as in `aten`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.placement import Split
from autopar.precision import working_dtype
from autopar.runtime.groups import Group, phase
from autopar.runtime.lowered.lowered import Kept, Lowered

Statistics = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _channel_view(values: Tensor, like: Tensor) -> Tensor:
    """[c] as [1 c 1 ...]."""
    return values.view(1, -1, *(1,) * (like.dim() - 2))


def _normalised(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, g: Group, eps: float
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Kept]:
    """(output, mean, 1 / standard deviation, variance), and what backward keeps."""
    wide = x.to(working_dtype(x.dtype))
    dims = [d for d in range(x.dim()) if d != 1]
    n = x.numel() // x.shape[1]
    mean = wide.mean(dims)
    squares = (wide - _channel_view(mean, x)).square().sum(dims)
    means, sums = g.all_gather(torch.stack([mean, squares])[None], Split(0)).unbind(1)
    mean = means.mean(0)
    variance = (sums + n * (means - mean).square()).sum(0) / (n * g.size)
    scale = (variance + eps).rsqrt()
    out = (wide - _channel_view(mean, x)) * _channel_view(scale, x)
    if weight is not None:
        out = out * _channel_view(weight, x)
    if bias is not None:
        out = out + _channel_view(bias, x)
    kept = mean, scale, None if bias is None else bias.dtype, g
    return (out.to(x.dtype), mean, scale, variance), kept


def _batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, g: Group, eps: float
) -> tuple[Tensor, Kept]:
    """Normalise with the statistics of the rows of all ranks: b c *, c, c -> b c *."""
    results, kept = _normalised(x, weight, bias, g, eps)
    return results[0], kept


def _batch_norm_with_statistics(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    g: Group,
    momentum: float,
    eps: float,
) -> tuple[tuple[Tensor, ...], Kept]:
    """As `synchronised_batch_norm`, with the batch's statistics and the new running ones.

    Returns (output, mean, 1 / standard deviation, running mean, running variance). The running
    variance uses the batch's unbiased variance, as in torch.
    """
    (out, mean, scale, variance), kept = _normalised(x, weight, bias, g, eps)
    n = x.numel() // x.shape[1] * g.size
    unbiased = variance * (n / max(n - 1, 1))
    keep = 1 - momentum
    results = (
        out,
        mean,
        scale,
        running_mean * keep + mean.to(running_mean.dtype) * momentum,
        running_var * keep + unbiased.to(running_var.dtype) * momentum,
    )
    return results, kept


def _backward(
    kept: Kept, inputs: Sequence[Tensor | None], gradients: Sequence[Tensor], wanted: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    x, weight = inputs
    mean, scale, bias_dtype, g = kept
    assert x is not None
    wide, dy = x.to(working_dtype(x.dtype)), gradients[0].to(working_dtype(x.dtype))
    dims = [d for d in range(x.dim()) if d != 1]
    normal = (wide - _channel_view(mean, x)) * _channel_view(scale, x)
    sums = torch.stack([dy.sum(dims), (dy * normal).sum(dims)])
    x_gradient = None
    if wanted[0]:
        with phase("backward", g.context):
            shift, slope = g.all_reduce(sums) / (x.numel() // x.shape[1] * g.size)
        factor = scale if weight is None else scale * weight
        moved = dy - _channel_view(shift, x) - normal * _channel_view(slope, x)
        x_gradient = (moved * _channel_view(factor, x)).to(x.dtype)
    found: list[Tensor | None] = [x_gradient]
    # Gradients are of the tensor arguments that there are.
    found += [] if weight is None else [sums[1].to(weight.dtype)]
    found += [] if bias_dtype is None else [sums[0].to(bias_dtype)]
    return *found, *[None] * (len(wanted) - len(found))


synchronised_batch_norm = Lowered(_batch_norm, _backward, keeps=(0, 1))
synchronised_batch_norm_with_statistics = Lowered(
    _batch_norm_with_statistics, _backward, keeps=(0, 1)
)
