"""Forward passes with checks of values that only raise: pytest rewrites asserts of test files."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def raises(self: Any, a: Tensor) -> Tensor:
    if a.max() > 100:
        raise ValueError(f"too large: {a.max()}")
    return self.linear(a).sum()


def raises_one_of_many(self: Any, a: Tensor) -> Tensor:
    if not (torch.isfinite(a).all() and a.abs().max().item() < 100):
        worst = a.abs().max()
        raise ValueError(f"{worst} is too large")
    return self.linear(a).sum()


def asserts(self: Any, a: Tensor) -> Tensor:
    assert (a > -100).all(), "too small"
    assert not (a > 100).any()
    torch._assert((a < 100).all(), "too large")
    return self.linear(a).sum()
