"""A sum whose backward returns one tensor for both terms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad
