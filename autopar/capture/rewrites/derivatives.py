"""Derivatives of operators, as operators that have rules and a derivative of their own.

They are in a graph whose forward asks for derivatives (`trace/derivatives.py`). Most have a
decomposition in torch's tables. That of a convolution is convolutions:

    of the input     the transposed convolution of the gradient with the same kernel
    of the kernel    the convolution of the input with the gradient as kernel, where rows are summed
                     over as channels are, and stride and dilation change places
    of the bias      a sum

That of an embedding adds rows up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._decomp import decomposition_table

from autopar.errors import NotSupportedError

aten = torch.ops.aten


def derivative(target: torch._ops.OpOverload) -> Callable[..., object] | None:
    """How to compute an operator that is the derivative of another; None for any other."""
    if target is aten.convolution_backward.default:
        return _of_convolution
    if target is aten.embedding_dense_backward.default:
        return _of_embedding
    if "_backward" in target._schema.name:
        return decomposition_table.get(target)
    return None


def _of_convolution(
    gradient: Tensor, x: Tensor, weight: Tensor, bias_sizes: Sequence[int] | None,
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], transposed: bool,
    output_padding: Sequence[int], groups: int, mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    n = weight.dim() - 2
    stride, padding, dilation = ([*v] * (n // len(v)) for v in (stride, padding, dilation))
    of_x = of_weight = of_bias = None
    if mask[0]:
        lost = [0] * n
        if not transposed:
            lost = [
                x.shape[2 + i] - (gradient.shape[2 + i] - 1) * stride[i] + 2 * padding[i]
                - dilation[i] * (weight.shape[2 + i] - 1) - 1
                for i in range(n)
            ]  # fmt: skip
        of_x = aten.convolution(
            gradient, weight, None, stride, padding, dilation, not transposed, lost, groups
        )
    if mask[1]:
        wide, narrow = (gradient, x) if transposed else (x, gradient)
        image = wide.unflatten(1, (groups, -1)).permute(2, 1, 0, *range(3, 3 + n)).flatten(1, 2)
        of_weight = aten.convolution(
            image, narrow.transpose(0, 1), None, dilation, padding, stride, False, [0] * n, groups
        ).transpose(0, 1)
        for i in range(n):
            of_weight = of_weight.narrow(2 + i, 0, weight.shape[2 + i])
    if mask[2]:
        of_bias = gradient.sum([0, *range(2, 2 + n)])
    return of_x, of_weight, of_bias


def _of_embedding(
    gradient: Tensor, indices: Tensor, n_rows: int, padding_index: int, by_frequency: bool
) -> Tensor:
    if by_frequency:
        raise NotSupportedError(
            "torch.autograd.grad in forward through an embedding with scale_grad_by_freq",
            hint="leave scale_grad_by_freq out",
        )
    gradient = gradient.masked_fill((indices == padding_index).unsqueeze(-1), 0)
    table = aten.zeros([n_rows, gradient.shape[-1]], dtype=gradient.dtype, device=gradient.device)
    return table.index_add(0, indices.flatten(), gradient.flatten(0, -2))
