"""Queries, keys and values of random numbers, for operators of attention."""

from __future__ import annotations

import torch
from torch import Tensor


def attention_inputs(
    query: tuple[int, ...], key: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """With gradients, always the same numbers; values are one narrower than keys."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
        for shape in (query, key, (*key[:-1], key[-1] - 1))
    )
    return q, k, v
