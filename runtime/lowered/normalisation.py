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

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.placement import Split
from autopar.precision import working_dtype
from autopar.runtime.groups import Group, phase

Statistics = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def synchronised_batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, g: Group, eps: float
) -> Tensor:
    """Normalise with the statistics of the rows of all ranks: b c *, c, c -> b c *."""
    out: Tensor = _BatchNorm.apply(x, weight, bias, g, eps)[0]
    return out


def synchronised_batch_norm_with_statistics(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    g: Group,
    momentum: float,
    eps: float,
) -> Statistics:
    """As `synchronised_batch_norm`, with the batch's statistics and the new running ones.

    Returns (output, mean, 1 / standard deviation, running mean, running variance). The running
    variance uses the batch's unbiased variance, as in torch.
    """
    out, mean, scale, variance = _BatchNorm.apply(x, weight, bias, g, eps)
    n = x.numel() // x.shape[1] * g.size
    unbiased = variance * (n / max(n - 1, 1))
    keep = 1 - momentum
    return (
        out,
        mean,
        scale,
        running_mean * keep + mean.to(running_mean.dtype) * momentum,
        running_var * keep + unbiased.to(running_var.dtype) * momentum,
    )


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    """[c] as [1 c 1 ...]."""
    return values.view(1, -1, *(1,) * (like.dim() - 2))


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, g: Group, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = x.to(working_dtype(x.dtype))
        dims = [d for d in range(x.dim()) if d != 1]
        n = x.numel() // x.shape[1]
        mean = wide.mean(dims)
        squares = (wide - _per_channel(mean, x)).square().sum(dims)
        means, sums = g.all_gather(torch.stack([mean, squares])[None], Split(0)).unbind(1)
        mean = means.mean(0)
        variance = (sums + n * (means - mean).square()).sum(0) / (n * g.size)
        scale = (variance + eps).rsqrt()
        out = (wide - _per_channel(mean, x)) * _per_channel(scale, x)
        if weight is not None:
            out = out * _per_channel(weight, x)
        if bias is not None:
            out = out + _per_channel(bias, x)
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.g, ctx.bias_dtype = g, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(mean, scale, variance)
        return out.to(x.dtype), mean, scale, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        g: Group = ctx.g
        wide, dy = x.to(working_dtype(x.dtype)), gradient.to(working_dtype(x.dtype))
        dims = [d for d in range(x.dim()) if d != 1]
        normal = (wide - _per_channel(mean, x)) * _per_channel(scale, x)
        sums = torch.stack([dy.sum(dims), (dy * normal).sum(dims)])
        weight_gradient = None if weight is None else sums[1].to(weight.dtype)
        bias_gradient = None if ctx.bias_dtype is None else sums[0].to(ctx.bias_dtype)
        x_gradient = None
        if ctx.needs_input_grad[0]:
            with phase("backward", g.context):
                shift, slope = g.all_reduce(sums) / (x.numel() // x.shape[1] * g.size)
            factor = scale if weight is None else scale * weight
            moved = dy - _per_channel(shift, x) - normal * _per_channel(slope, x)
            x_gradient = (moved * _per_channel(factor, x)).to(x.dtype)
        return x_gradient, weight_gradient, bias_gradient, None, None
